"""Medians and trimmed means: columns are sorted in cache, and their middle goes through a fused pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.kernels.host.reference.sorting import infinity_of, key_dtype, quiet_nan
from crossdevice.kernels.host.resources.threads import num_threads, run_together
from crossdevice.values.recipe import Recipe

Arrays = Sequence[NDArray[Any]]

SORTED_BYTES = 1 << 20
"""Keys that are sorted before their middle is combined: they stay in a second-level cache."""

MIN_ELEMENTS, MAX_ELEMENTS = 1 << 10, 1 << 14
PADDING_ELEMENTS = 64
"""Padding between rows of keys, so that they do not compete for the same cache lines."""

THREADED_ELEMENTS = 1 << 17


def sorted_pass(
    inputs: Arrays, outputs: Arrays, recipe: Recipe, combine: Callable[[Arrays, Arrays, Recipe], None]
) -> None:
    """Computes MEDIAN and TRIMMED_MEAN with a compiled sort; `combine` is a fused pass."""
    from crossdevice.kernels.host.llvm.sorting import compiled_sort, network_of

    dtype, size, count = inputs[0].dtype, inputs[0].size, len(inputs)
    start, stop = recipe.op.sorted_range(count)
    infinity, kind = infinity_of(dtype) or 0, key_dtype(dtype)
    sort, network, mean = compiled_sort(kind.name), network_of(count), recipe.of_sorted(count)
    width = min(max(SORTED_BYTES // (count * dtype.itemsize), MIN_ELEMENTS), MAX_ELEMENTS)
    starts = iter(range(0, size, width))

    def work() -> None:
        keys = np.empty((count, width + PADDING_ELEMENTS), kind)
        for first in starts:
            last = min(first + width, size)
            length = last - first
            for row, array in zip(keys, inputs, strict=True):
                row[:length] = array[first:last].view(kind)
            sort(keys, length, network, start, stop, infinity, quiet_nan(infinity))
            rows = [row[:length].view(dtype) for row in keys[start:stop]]
            combine(rows, [array[first:last] for array in outputs], mean)

    run_together(work, 1 if size * count < THREADED_ELEMENTS else num_threads())

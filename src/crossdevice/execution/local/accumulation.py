"""Reductions by a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from crossdevice.backends.numpy_backend import array_of_numbers
from crossdevice.backends.protocol import Array
from crossdevice.execution.local.combining import combine
from crossdevice.execution.reading.leaf_spec import LeafSpec
from crossdevice.execution.reading.values import backend_of
from crossdevice.kernels.recipe import Recipe
from crossdevice.values.device import Device
from crossdevice.values.dtypes import check_reducible, result_dtype
from crossdevice.values.options import Precision
from crossdevice.values.reduce_op import ReduceOp


def accumulate(
    function: Callable[[tuple[Any, ...]], Any],
    arrays: Sequence[Array],
    spec: LeafSpec,
    op: ReduceOp,
    precision: Precision,
    at: Device,
) -> tuple[Array, ...]:
    """Calls `function` on copies at device `at`; a mean divides what it returned, whatever that is."""
    answer = function(tuple(spec.backend.copy(array, at) for array in arrays))
    if not hasattr(answer, "dtype"):
        answer = spec.backend.from_host(
            array_of_numbers(answer).reshape(-1), array_of_numbers(answer).shape, at
        )
    backend = backend_of(answer, 0, "accumulation_fn's result")
    if op is ReduceOp.MEAN:
        dtype = backend.dtype_of(answer)
        check_reducible(dtype, op, "accumulation_fn's result")
        recipe = Recipe(ReduceOp.SUM, precision, len(arrays))
        flat = combine(backend, [backend.flat(answer)], recipe, result_dtype(dtype, op), at)
        answer = backend.reshape(flat, backend.shape_of(answer))
    return tuple(backend.copy(answer, device) for device in spec.destinations)

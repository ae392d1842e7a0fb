"""Many ndarrays at a glance: whether they stay as they are, fit a signature, and lie apart."""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from crossdevice.kernels.host.fused_pass import selected_kernels
from crossdevice.kernels.host.work_list import TUPLE_HEADER_BYTES, address_of

Arrays: TypeAlias = tuple[NDArray[Any], ...]


class FixedArrays:
    """Addresses and shapes of ndarrays, to detect later changes.

    Arrays that are written to must stay writeable, too.

    `ndarray.resize` frees memory that a kernel would still write to, even where NumPy is told not to look
    for other users of it.
    """

    first_changed: Callable[[], int]
    """Which array is the first that has another address or shape; -1 if all are as they were."""

    def __init__(self, arrays: Sequence[NDArray[Any]], is_written: Sequence[bool]) -> None:
        self._arrays = tuple(arrays)
        if selected_kernels() == "numba":
            from crossdevice.kernels.host.llvm.watching import WRITEABLE_FLAG, compiled_watch

            # In the order in which the compiled function reads an array's own C struct.
            words = (
                (address_of(item), WRITEABLE_FLAG * written, item.ndim, *item.shape)
                for item, written in zip(self._arrays, is_written, strict=True)
            )
            self._words = array("q", itertools.chain.from_iterable(words))
            place = id(self._arrays) + TUPLE_HEADER_BYTES
            self.first_changed = functools.partial(
                compiled_watch(), place, len(self._arrays), self._words.buffer_info()[0]
            )
        else:
            # Not a method of this object, which would keep it, and its arrays, until garbage is collected.
            known = _found(self._arrays, is_written)
            self.first_changed = functools.partial(_first_changed, self._arrays, tuple(is_written), known)


def _first_changed(arrays: Arrays, is_written: Sequence[bool], known: Sequence[Any]) -> int:
    pairs = zip(_found(arrays, is_written), known, strict=True)
    return next((number for number, (found, before) in enumerate(pairs) if found != before), -1)


def _found(arrays: Arrays, is_written: Sequence[bool]) -> list[tuple[int, tuple[int, ...], bool]]:
    return [
        (address_of(item), item.shape, written and item.flags.writeable)
        for item, written in zip(arrays, is_written, strict=True)
    ]


class Signature:
    """Types of objects, and dtypes, shapes and memory order of ndarrays, as compiled code compares them."""

    def __init__(self, items: Sequence[Any], *, first_written: int | None = None) -> None:
        """Records objects that fit, ndarrays and NumPy scalars, without keeping them; needs numba.

        Those from `first_written` on must be writeable.
        """
        from crossdevice.kernels.host.llvm import watching

        words: list[int] = []
        # Words have the addresses of types and dtypes, which are kept, so that no others can have them.
        kept = self._kept = [(type(item), item.dtype) for item in items]
        for position, (item, (kind, dtype)) in enumerate(zip(items, kept, strict=True)):
            if not isinstance(item, np.ndarray):
                words += (id(kind), 0, 0, 0, 0)
                continue
            has_strides = not item.flags.c_contiguous
            is_written = first_written is not None and position >= first_written
            flags = watching.WRITEABLE_FLAG * is_written + watching.CONTIGUOUS_FLAG * (not has_strides)
            words += (id(kind), id(dtype), flags, has_strides, item.ndim, *item.shape, *item.strides)
        self._words, self._number = array("q", words), len(items)
        self._fit, self._place = watching.compiled_fit(), self._words.buffer_info()[0]

    def fits(self, items: tuple[Any, ...]) -> bool:
        """Returns True if as many objects are given and all match, one by one."""
        number = self._number
        return len(items) == number and self._fit(id(items) + TUPLE_HEADER_BYTES, number, self._place)


class Separation:
    """A compiled look at the memory of inputs and outputs of several leaves."""

    holds: Callable[[int, int], bool]
    """Whether no output overlaps another array, except exactly an input of its own leaf.

    Takes the addresses of pointers to all inputs, and to all outputs. It does not keep this object, which has
    the memory that it works in.
    """

    def __init__(self, leaves: Sequence[tuple[int, int, int, int]]) -> None:
        """Takes for each leaf the number and bytes of inputs, and the same of outputs; needs numba."""
        from crossdevice.kernels.host.llvm.watching import compiled_are_apart

        self._table = array("q", itertools.chain.from_iterable(leaves))
        # One for all threads: the compiled look does not let others run meanwhile.
        self._scratch = array("q", bytes(16 * sum(leaf[0] + leaf[2] for leaf in leaves)))
        places = self._table.buffer_info()[0], len(leaves), self._scratch.buffer_info()[0]
        self.holds = functools.partial(compiled_are_apart(), *places)

"""Many ndarrays at a glance: whether they stay as they are, and whether they are alike."""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from numpy.typing import NDArray

from crossdevice.kernels.host.fused_pass import selected_kernels
from crossdevice.kernels.host.work_list import TUPLE_HEADER_BYTES

Arrays: TypeAlias = tuple[NDArray[Any], ...]


class FixedArrays:
    """The addresses and shapes of ndarrays, compared with what they are later.

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
                (item.__array_interface__["data"][0], WRITEABLE_FLAG * written, item.ndim, *item.shape)
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
        (item.__array_interface__["data"][0], item.shape, written and item.flags.writeable)
        for item, written in zip(arrays, is_written, strict=True)
    ]


def compiled_are_alike() -> Callable[[int, int], bool] | None:
    """A function of an address of pointers to objects, the first an ndarray, and of their number.

    It tells whether all have the type, dtype, shape and strides of the first, in a tenth of the time that
    asking each takes. None without numba.
    """
    if selected_kernels() != "numba":
        return None
    from crossdevice.kernels.host.llvm import watching

    return watching.compiled_are_alike()

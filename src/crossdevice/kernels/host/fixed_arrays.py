"""Arrays that must stay as they are: a look at hundreds of them takes a microsecond or two."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from crossdevice.kernels.host.fused_pass import selected_kernels
from crossdevice.kernels.host.work_list import TUPLE_HEADER_BYTES


class FixedArrays:
    """The addresses and shapes of ndarrays, to be compared with what they are later.

    Those that are written to must be writeable, too.

    `ndarray.resize` frees memory that a kernel would still write to, even where NumPy is told not to look
    for other users of it.
    """

    def __init__(self, arrays: Sequence[NDArray[Any]], is_written: Sequence[bool]) -> None:
        self._arrays = tuple(arrays)
        self._is_written = tuple(is_written)
        self._first_changed: Callable[[], int] | None = None
        if selected_kernels() == "numba":
            from crossdevice.kernels.host.llvm.watching import WRITEABLE_FLAG, compiled_watch

            # In the order in which the compiled function reads an array's own C struct.
            words = (
                (item.__array_interface__["data"][0], WRITEABLE_FLAG * written, item.ndim, *item.shape)
                for item, written in zip(self._arrays, self._is_written, strict=True)
            )
            known = array("q", itertools.chain.from_iterable(words))
            watch, place = compiled_watch(), id(self._arrays) + TUPLE_HEADER_BYTES
            number = len(self._arrays)
            self._first_changed = lambda: watch(place, number, known.buffer_info()[0])
        else:
            self._known = self._found()

    def first_changed(self) -> int | None:
        """Which array is the first that has another address or shape; None if all are as they were."""
        if self._first_changed is not None:
            changed = self._first_changed()
            return None if changed < 0 else changed
        pairs = zip(self._found(), self._known, strict=True)
        return next((number for number, (found, known) in enumerate(pairs) if found != known), None)

    def _found(self) -> list[tuple[int, tuple[int, ...], bool]]:
        return [
            (item.__array_interface__["data"][0], item.shape, written and item.flags.writeable)
            for item, written in zip(self._arrays, self._is_written, strict=True)
        ]

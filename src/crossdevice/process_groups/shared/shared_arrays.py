"""Arrays that other ranks of the host read and write where they are: each in a file without a name."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import math
import mmap
import os
import secrets
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from crossdevice.errors import OptionError
from crossdevice.values.nesting import flatten, unflatten

Bytes = NDArray[np.uint8]

LINE_BYTES = 64

_FIXED = 0x10  # of Linux on every processor: the place is given


class Place(NamedTuple):
    """Place of an array, in terms that other processes understand."""

    descriptor: int
    number: int
    """Number that identifies the file: descriptors are reused."""
    num_bytes: int
    offset: int


NOWHERE = Place(-1, 0, 0, 0)
"""Place of arrays in private memory."""


class SharedArrays:
    """The shared arrays of one rank, and those of others that have been used."""

    def __init__(self, processes: Sequence[tuple[int, int]]) -> None:
        """`processes` has the id and the start time of each rank's process."""
        self._processes = processes
        self._blocks: list[tuple[int, int, int, int]] = []
        self._mapped: dict[tuple[int, int], tuple[int, Bytes]] = {}
        self._freed_by: dict[int, int] = {}
        self.num_freed = 0
        """Number of own files that are gone: others then release their mappings."""

    def empty(self, num_bytes: int) -> Bytes:
        """Allocates memory with no particular content, on a page boundary."""
        number = secrets.randbits(62)
        descriptor = os.memfd_create(name_of(number), os.MFD_CLOEXEC)
        try:
            length = max(num_bytes, 1)
            os.ftruncate(descriptor, length)
            mapped = mapped_file(descriptor, length)
        except BaseException:
            os.close(descriptor)
            raise
        memory = np.frombuffer(mapped, np.uint8)
        start = int(memory.__array_interface__["data"][0])
        bisect.insort(self._blocks, (start, descriptor, number, length))
        # Of the mapping, which lives as long as any array in it.
        weakref.finalize(mapped, self._forget, start, os.getpid())
        return memory[:num_bytes]

    def place_of(self, array: NDArray[Any]) -> Place:
        """Returns the place of an array of this process."""
        if not self._blocks:
            return NOWHERE
        address = int(array.__array_interface__["data"][0])
        position = bisect.bisect(self._blocks, (address, sys.maxsize)) - 1
        if position < 0:
            return NOWHERE
        start, descriptor, number, length = self._blocks[position]
        is_inside = address + array.nbytes <= start + length
        return Place(descriptor, number, length, address - start) if is_inside else NOWHERE

    def array_at(self, rank: int, place: Place, like: NDArray[Any]) -> NDArray[Any]:
        """Returns another rank's array, of the size and dtype of an own one."""
        key = (rank, place.number)
        if key not in self._mapped:
            descriptor = os.open(self._path(rank, place), os.O_RDWR | os.O_CLOEXEC)
            try:
                memory = np.frombuffer(mapped_file(descriptor, place.num_bytes), np.uint8)
            finally:
                os.close(descriptor)
            self._mapped[key] = (place.descriptor, memory)
        memory = self._mapped[key][1]
        return memory[place.offset : place.offset + like.nbytes].view(like.dtype)

    def note_freed(self, rank: int, num_freed: int) -> None:
        """Releases memory that another rank has freed since the last check."""
        if self._freed_by.get(rank, 0) != num_freed:
            self._freed_by[rank] = num_freed
            for key, (descriptor, _) in list(self._mapped.items()):
                if key[0] == rank and not self._is_there(rank, Place(descriptor, key[1], 0, 0)):
                    del self._mapped[key]

    def _path(self, rank: int, place: Place) -> str:
        if not self._is_there(rank, place):
            raise ConnectionError(f"the memory of rank {rank} is not where it said")
        return f"/proc/{self._processes[rank][0]}/fd/{place.descriptor}"

    def _is_there(self, rank: int, place: Place) -> bool:
        try:
            found = os.readlink(f"/proc/{self._processes[rank][0]}/fd/{place.descriptor}")
        except OSError:
            return False
        return found == f"/memfd:{name_of(place.number)} (deleted)"

    def _forget(self, start: int, process: int) -> None:
        for block in self._blocks:
            if block[0] == start:
                self._blocks.remove(block)
                with contextlib.suppress(OSError):
                    os.close(block[1])
                break
        if process == os.getpid():
            self.num_freed += 1


def name_of(number: int) -> str:
    """Returns a descriptive name for lists of open files; the file cannot be opened by it."""
    return f"crossdevice-{number:016x}"


def empty_array(arrays: SharedArrays | None, shape: int | Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """Allocates a NumPy array in shared memory, or an ordinary one without shared memory."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    element = np.dtype(dtype)
    if arrays is None:
        return np.empty(sizes, element)
    return arrays.empty(math.prod(sizes) * element.itemsize).view(element).reshape(sizes)


def empty_tree(arrays: SharedArrays | None, tree: Any) -> Any:
    """Allocates arrays like those of a structure, in one piece of memory."""
    leaves, structure = flatten(tree)
    starts, end = [], 0
    for leaf in leaves:
        starts.append(end)
        end += -(-_num_bytes(leaf) // LINE_BYTES) * LINE_BYTES
    memory = np.empty(end, np.uint8) if arrays is None else arrays.empty(end)
    made = [_array_like(leaf, memory[start:]) for leaf, start in zip(leaves, starts, strict=True)]
    return unflatten(structure, made)


def _num_bytes(leaf: Any) -> int:
    return int(leaf.nbytes if hasattr(leaf, "nbytes") else np.asarray(leaf).nbytes)


def _array_like(leaf: Any, memory: Bytes) -> Any:
    own = memory[: _num_bytes(leaf)]
    if any(kind.__module__.partition(".")[0] == "torch" for kind in type(leaf).__mro__):
        return _tensor_in(own, leaf)
    array = np.asarray(leaf)
    return own.view(array.dtype).reshape(array.shape)


def _tensor_in(memory: Bytes, like: Any) -> Any:
    """Returns a tensor of that memory with the dtype and shape of another one, which must be on the host."""
    import torch

    if like.device.type != "cpu" or like.layout != torch.strided:
        raise OptionError(
            f"shared memory is the host's, and holds dense tensors; got one on {like.device}, {like.layout}"
        )
    if not like.numel():
        return torch.empty_like(like)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)


def mapped_file(descriptor: int, num_bytes: int) -> mmap.mmap:
    """Maps the file, which other processes share; the descriptor may be closed afterwards.

    Python's own mapping of a file keeps a copy of the descriptor as long as any array is in it. So it maps
    nothing here, and the file takes the place.
    """
    memory = mmap.mmap(-1, num_bytes)
    address = int(np.frombuffer(memory, np.uint8, 1).__array_interface__["data"][0])
    if (
        _map()(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _FIXED, descriptor, 0)
        != address
    ):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return memory


@functools.cache
def _map() -> Callable[..., int]:
    call = ctypes.CDLL(None, use_errno=True).mmap
    number = ctypes.c_int
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long]
    call.restype = ctypes.c_void_p
    return call

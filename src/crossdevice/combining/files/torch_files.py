"""PyTorch's files of tensors, loaded with `weights_only`: no code in them is ever run."""

from __future__ import annotations

import bisect
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import os
import pickle
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from crossdevice.backends.protocol import dtype_named
from crossdevice.backends.registry import backend_named
from crossdevice.combining.files.model_file import (
    ModelFile,
    ModelWriter,
    StoredFile,
    TensorSpec,
    replaced,
    unreadable,
)
from crossdevice.combining.files.zip_members import BAD_ARCHIVE, Checksum, check_members
from crossdevice.errors import FileError
from crossdevice.kernels.host.resources.threads import num_threads, run_together
from crossdevice.values.device import host_device
from crossdevice.values.dtypes import ITEM_BYTES
from crossdevice.values.quantities import counted, kind_text

ELEMENTS = "data/"
"""Beginning of the names of members with elements."""

IDENTITY = ".data/serialization_id"
"""The name of a member that follows from all others, elements included, and is not read."""

CHECKED_BYTES = 1 << 20
"""Bytes that are read at a time to be compared with a checksum."""


@dataclasses.dataclass(eq=False)
class _Contents:
    """Contents of files that differ in elements alone: PyTorch unpickles 50,000 tensors in seconds."""

    metadata: Any
    tensors: dict[str, TensorSpec]
    ties: dict[str, str]
    members: dict[str, tuple[str, int]]
    """For each tensor the member that it is in, and at which byte of that it starts."""


_known_contents: weakref.WeakValueDictionary[bytes, _Contents] = weakref.WeakValueDictionary()
"""Contents of open files, by a digest of the sizes of all members and the bytes of those without elements."""


class TorchFile(StoredFile):
    """Tensors of a state_dict, or of dicts and lists around it; other contents are kept unchanged.

    PyTorch maps the file; where that is known, elements are read from it by their place.
    """

    def __init__(self, path: Path) -> None:
        self._arrays: dict[str, torch.Tensor] = {}
        self._starts: dict[str, int] = {}
        """The byte at which each member with elements starts, by its name without the archive's."""
        self.ties: dict[str, str] = {}
        """Tensors in the memory of one before them, as tied weights are, and the name of that one."""
        super().__init__(path)
        key = self._check_members()
        self._contents = None if key is None else _known_contents.get(key)
        if self._contents is None:
            self._load(path)
            self._contents = self._in_common()
            if key is not None and self._contents is not None:
                _known_contents[key] = self._contents
        else:
            self.metadata, self.tensors = self._contents.metadata, self._contents.tensors
            self.ties = self._contents.ties
            places = self._contents.members.items()
            self.places = {name: self._starts[member] + at for name, (member, at) in places}

    def _in_common(self) -> _Contents | None:
        """Returns what equal files need not load; None if tensors lie elsewhere than in members."""
        if self.places.keys() != self.tensors.keys() or not self._starts:
            return None
        names = sorted(self._starts, key=self._starts.__getitem__)
        starts = [self._starts[name] for name in names]
        members = {}
        for name, place in self.places.items():
            number = bisect.bisect_right(starts, place) - 1
            if number < 0:
                return None
            members[name] = names[number], place - starts[number]
        return _Contents(self.metadata, self.tensors, self.ties, members)

    def _load(self, path: Path) -> None:
        """Has PyTorch load all tensors, and finds out where they are."""
        self.metadata = _loaded(path)
        backend = backend_named("torch")
        self.tensors = {}
        try:
            _collect(self.metadata, "", self._arrays)
        except (ValueError, RecursionError) as error:
            raise unreadable(path, error) from error
        mappings = _mappings_of(path, os.fstat(self._descriptor).st_ino)
        self.places = {}
        for name, tensor in self._arrays.items():
            try:
                backend.check_array(tensor, f"tensor {name!r}")
            except ValueError as error:
                raise unreadable(path, error) from error
            dtype = backend.dtype_of(tensor)
            if dtype not in ITEM_BYTES:
                known = ", ".join(ITEM_BYTES)
                raise unreadable(path, f"tensor {name!r} has dtype {dtype}; expected one of {known}")
            spec = TensorSpec(dtype, tuple(tensor.shape))
            if spec.num_bytes > self.num_bytes:  # as of one element that is seen many times
                raise unreadable(
                    path,
                    f"tensor {name!r} has {counted(spec.num_bytes, 'byte')}, and the file {self.num_bytes}",
                )
            self.tensors[name] = spec
            address = tensor.data_ptr()
            for start, stop, place in mappings:
                is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
                if is_plain and start <= address and address + spec.num_bytes <= stop:
                    self.places[name] = place + address - start
        places = {name: (t.data_ptr(), t.stride(), t.shape, t.dtype) for name, t in self._arrays.items()}
        firsts = {place: name for name, place in reversed(places.items())}
        self.ties = {name: firsts[place] for name, place in places.items() if firsts[place] != name}
        if not self.tensors:
            raise unreadable(path, f"it holds {kind_text(self.metadata)} without tensors")

    def elements(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Reads elements; where PyTorch does not say from where, its tensor is looked at."""
        if name in self.places:
            return super().elements(name, start, stop)
        if os.fstat(self._descriptor).st_size < self.num_bytes:
            raise unreadable(self.path, "it was truncated meanwhile")
        flat: NDArray[Any] = backend_named("torch").host_view(self._arrays[name])
        return flat[start:stop]

    def close(self) -> None:
        """Gives the tensors up, and closes the file."""
        self._arrays = {}
        super().close()

    def _check_members(self) -> bytes | None:
        """Compares all members with their checksums; PyTorch does not.

        Returns:
            The digest of all but elements, None if members are compressed.
        """
        try:
            if self.bytes_at(0, 2) != b"PK" and not zipfile.is_zipfile(self.path):
                return None  # written before PyTorch 1.6, without checksums
            with zipfile.ZipFile(self.path) as archive:
                members = archive.infolist()
            check_members(members, self.num_bytes, self.bytes_at)
            stored = [each for each in members if each.compress_type == zipfile.ZIP_STORED]
            # 0: saved without any.
            waiting = iter([each for each in stored if each.CRC])
            run_together(lambda: self._check_some(waiting), num_threads())
            return self._digest_of(members) if len(stored) == len(members) else None
        except BAD_ARCHIVE as error:
            raise error if isinstance(error, FileError) else unreadable(self.path, error) from error

    def _check_some(self, waiting: Iterator[zipfile.ZipInfo]) -> None:
        room = np.empty(CHECKED_BYTES, np.uint8)
        for member in waiting:
            checksum, start = Checksum(member.filename, member.CRC, member.file_size), self.start_of(member)
            self._starts[_name_in_archive(member)] = start
            for at in range(0, member.file_size, CHECKED_BYTES):
                part = room[: min(CHECKED_BYTES, member.file_size - at)]
                self.read_into(part, start + at)
                checksum.add(at, part.data)

    def _digest_of(self, members: Iterable[zipfile.ZipInfo]) -> bytes:
        """Digests all but the elements, of which the sizes; keeps where the members of those start."""
        digest = hashlib.sha256()
        starts: dict[str, int] = {}
        for member in members:
            name, size = _name_in_archive(member), member.file_size
            start = self._starts[name] if name in self._starts else self.start_of(member)
            digest.update(f"{len(name)} {name} {size} ".encode())
            if name.startswith(ELEMENTS):
                starts[name] = start
            elif name != IDENTITY:
                digest.update(self.bytes_at(start, start + size))
        self._starts = starts
        return digest.digest()


def _name_in_archive(member: zipfile.ZipInfo) -> str:
    """Returns a member's name after that of the archive, which PyTorch makes from the file's."""
    return member.filename.partition("/")[2]


def _mappings_of(path: Path, number: int) -> list[tuple[int, int, int]]:
    """Finds where a file is mapped into memory: start, stop and the place in the file; none if unknown."""
    found = []
    with contextlib.suppress(OSError), open("/proc/self/maps") as lines:
        for line in lines:
            addresses, _, place, _, inode, *name = line.split(maxsplit=5)
            if int(inode) == number or (name and name[0].rstrip("\n") == os.path.realpath(path)):
                start, stop = (int(address, 16) for address in addresses.split("-"))
                found.append((start, stop, int(place, 16)))
    return found


def _loaded(path: Path) -> Any:
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # written before PyTorch 1.6, which cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise unreadable(
            path, "it holds more than tensors and plain values, which only code could load, and none is run"
        ) from error
    except OSError as error:
        raise unreadable(path, error.strerror or error) from error
    except Exception as error:  # of other bytes PyTorch reports whatever its unpickler stumbles over
        raise unreadable(path, f"PyTorch does not load it: {error!r}") from error


def _collect(node: Any, prefix: str, found: dict[str, torch.Tensor]) -> None:
    if isinstance(node, torch.Tensor):
        if prefix in found:
            raise ValueError(f"two of its tensors are called {prefix!r}, by dicts in dicts or keys with dots")
        found[prefix] = node.detach()
    else:
        for key, child in _entries(node):
            _collect(child, f"{prefix}.{key}" if prefix else str(key), found)


def _entries(node: Any) -> Iterable[tuple[Any, Any]]:
    """Lists the entries of a container, by key or number; none for anything else."""
    if isinstance(node, Mapping):
        return node.items()
    return enumerate(node) if isinstance(node, (list, tuple)) else ()


@contextlib.contextmanager
def written_torch(path: Path, tensors: Mapping[str, TensorSpec], like: ModelFile) -> Iterator[ModelWriter]:
    """Writes a file with all that another one of the format holds around its tensors, from memory."""
    flats = {name: np.empty(spec.num_elements, dtype_named(spec.dtype)) for name, spec in tensors.items()}

    def write(name: str, start: int, elements: NDArray[Any]) -> None:
        flats[name][start : start + elements.size] = elements

    with replaced(path) as file:
        yield ModelWriter(write)
        backend = backend_named("torch")
        made = {
            name: backend.from_host(flat, tensors[name].shape, host_device(0)) for name, flat in flats.items()
        }
        around = dict.fromkeys(made, torch.empty(0))
        if isinstance(like, TorchFile):
            around = like.metadata
            for name, tied in like.ties.items():
                if {name, tied} <= made.keys() and flats[name].tobytes() == flats[tied].tobytes():
                    made[name] = made[tied]
        try:
            _uninterrupted(lambda: torch.save(_with_tensors(around, "", made), file))
        except RuntimeError as error:  # what PyTorch makes of a disk that is full
            reason = getattr(error.__context__, "strerror", None) or error
            raise FileError(f"{path} cannot be written: {reason}") from error


def _uninterrupted(work: Callable[[], None]) -> None:
    """Works in a thread, which receives no signals: one would make PyTorch's writer end the process."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(work)
        try:
            running.result()
        except KeyboardInterrupt:
            concurrent.futures.wait([running])
            raise


def _with_tensors(node: Any, prefix: str, made: Mapping[str, torch.Tensor]) -> Any:
    """Rebuilds the containers and plain values with other tensors; leaves out tensors that are gone."""
    if isinstance(node, torch.Tensor):
        return made[prefix]
    if not isinstance(node, (Mapping, list, tuple)):
        return node
    entries = []
    for key, child in _entries(node):
        name = f"{prefix}.{key}" if prefix else str(key)
        if not isinstance(child, torch.Tensor) or name in made:
            entries.append((key, _with_tensors(child, name, made)))
    kind: Any = type(node)
    return kind(entries) if isinstance(node, Mapping) else kind(child for _, child in entries)

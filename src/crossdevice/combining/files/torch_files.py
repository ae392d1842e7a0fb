"""PyTorch's files of tensors, loaded with `weights_only`: no code in them is ever run."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from crossdevice.backends.protocol import dtype_named
from crossdevice.backends.registry import backend_named
from crossdevice.combining.files.model_file import (
    FileState,
    ModelFile,
    ModelWriter,
    TensorSpec,
    unreadable,
)
from crossdevice.combining.files.replacing import replaced
from crossdevice.errors import FileError
from crossdevice.values.device import host_device
from crossdevice.values.dtypes import ITEM_BYTES


class TorchFile(ModelFile):
    """The tensors of a state_dict, or of dicts and lists around it; what else is in them is kept as it is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = FileState.of(path.stat())
        self.metadata = _loaded(path)
        self._arrays: dict[str, torch.Tensor] = {}
        backend = backend_named("torch")
        self.tensors = {}
        try:
            _collect(self.metadata, "", self._arrays)
        except ValueError as error:
            raise unreadable(path, error) from error
        for name, tensor in self._arrays.items():
            try:
                backend.check_array(tensor, f"tensor {name!r}")
            except ValueError as error:
                raise unreadable(path, error) from error
            dtype = backend.dtype_of(tensor)
            if dtype not in ITEM_BYTES:
                known = ", ".join(ITEM_BYTES)
                raise unreadable(path, f"tensor {name!r} has dtype {dtype}; expected one of {known}")
            self.tensors[name] = TensorSpec(dtype, tuple(tensor.shape))
        places = {name: (t.data_ptr(), t.stride(), t.shape, t.dtype) for name, t in self._arrays.items()}
        firsts = {place: name for name, place in reversed(places.items())}
        self.ties = {name: firsts[place] for name, place in places.items() if firsts[place] != name}
        """Tensors in the memory of one before them, as tied weights are, and the name of that one."""
        if not self.tensors:
            raise unreadable(path, f"it holds a {type(self.metadata).__name__} without tensors")

    def elements(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """A view of the tensor, which is the file's memory where PyTorch can map it."""
        flat: NDArray[Any] = backend_named("torch").host_view(self._arrays[name])
        return flat[start:stop]

    def close(self) -> None:
        """Gives the tensors up."""
        self._arrays.clear()


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
    """What a container holds, by key or number; of anything else nothing."""
    if isinstance(node, Mapping):
        return node.items()
    return enumerate(node) if isinstance(node, (list, tuple)) else ()


@contextlib.contextmanager
def written_torch(path: Path, tensors: Mapping[str, TensorSpec], like: ModelFile) -> Iterator[ModelWriter]:
    """A file with all that another one of the format holds around its tensors; written from memory."""
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
            torch.save(_with_tensors(around, "", made), file)
        except RuntimeError as error:  # what PyTorch makes of a disk that is full
            reason = getattr(error.__context__, "strerror", None) or error
            raise FileError(f"{path} cannot be written: {reason}") from error


def _with_tensors(node: Any, prefix: str, made: Mapping[str, torch.Tensor]) -> Any:
    """The same containers and plain values with other tensors; without those that are not there any more."""
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

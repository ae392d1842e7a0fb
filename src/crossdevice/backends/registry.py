"""The backend of an array, found by the module that defines its type."""

from __future__ import annotations

from typing import Any

from crossdevice.backends.protocol import Backend
from crossdevice.values.nesting import NUMBERS
from crossdevice.values.registry import Registry

BACKENDS = Registry(
    "an array library",
    {
        "numpy": "crossdevice.backends.numpy_backend:NumpyBackend",
        "torch": "crossdevice.backends.torch_backend:TorchBackend",
        "jax": "crossdevice.backends.jax_backend:JaxBackend",
        "tensorflow": "crossdevice.backends.tensorflow_backend:TensorflowBackend",
        "cupy": "crossdevice.backends.cupy_backend:CupyBackend",
    },
    entry_point_group="crossdevice.backends",
)


def backend_named(name: str) -> Backend:
    """Returns the one backend object of that name."""
    if name not in _by_name:
        # Two threads may both come here. `setdefault` decides between them without a lock, which an import
        # in another thread might wait for and an interrupt might leave held.
        _by_name.setdefault(name, BACKENDS.load(name)())
    return _by_name[name]


def loaded_backends() -> list[Backend]:
    """Lists the backends requested so far."""
    return list(_by_name.values())


def backend_of_type(kind: type[Any]) -> Backend | None:
    """Returns the backend of arrays of this type; None if no known library made it."""
    if kind not in _by_type:
        _by_type[kind] = _found_for(kind)
    return _by_type[kind]


_by_name: dict[str, Backend] = {}
_by_type: dict[type[Any], Backend | None] = {}


def _found_for(kind: type[Any]) -> Backend | None:
    if issubclass(kind, (*NUMBERS, list, tuple)):
        return backend_named("numpy")
    for base in kind.__mro__:
        library = base.__module__.partition(".")[0]
        # Libraries have other types as well: PyTorch's modules, which in transformers have a dtype too.
        if (
            library in BACKENDS
            and hasattr(kind, "dtype")
            and (hasattr(kind, "shape") or hasattr(kind, "ndim"))
        ):
            return backend_named(library)
    return None

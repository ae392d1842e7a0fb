"""Which backend an array belongs to, by the module its type comes from."""

from __future__ import annotations

import functools
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


@functools.cache
def backend_named(name: str) -> Backend:
    """The one backend object of that name."""
    backend: Backend = BACKENDS.load(name)()
    return backend


def backend_of_type(kind: type[Any]) -> Backend | None:
    """The backend of arrays of this type; None if no known library made it."""
    if kind not in _by_type:
        _by_type[kind] = _found_for(kind)
    return _by_type[kind]


_by_type: dict[type[Any], Backend | None] = {}


def _found_for(kind: type[Any]) -> Backend | None:
    if issubclass(kind, (*NUMBERS, list, tuple)):
        return backend_named("numpy")
    for base in kind.__mro__:
        library = base.__module__.partition(".")[0]
        if library in BACKENDS and hasattr(kind, "dtype"):
            return backend_named(library)
    return None

"""Tables of names, with classes that are loaded on first use; optional libraries, and what installs them."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from crossdevice.errors import OptionError


class Library(NamedTuple):
    """Names a library is distributed under, what pip installs it as, and the features it brings."""

    distributions: tuple[str, ...]
    install: str = ""
    gives: str = ""
    needs_gpu: bool = False


LIBRARIES: Mapping[str, Library] = {
    "numpy": Library(("numpy",)),
    "numba": Library(("numba",), "numba", "compiled fused passes; NumPy is used now"),
    "ml_dtypes": Library(("ml_dtypes",)),
    "optree": Library(("optree",)),
    "array-api-compat": Library(("array-api-compat",)),
    "torch": Library(("torch",), "'crossdevice[torch]'", "PyTorch tensors and modules"),
    "jax": Library(("jax",), "'crossdevice[jax]'", "JAX arrays"),
    "tensorflow": Library(
        ("tensorflow", "tensorflow-cpu"), "'crossdevice[tensorflow]'", "TensorFlow tensors, and tf.distribute"
    ),
    "cupy": Library(
        ("cupy", "cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x"), "cupy-cuda13x", "CuPy arrays", True
    ),
    "triton": Library(("triton",), "'crossdevice[gpu]'", "the fused GPU kernel", True),
    "nccl4py": Library(("nccl4py",), "'nccl4py[cu13]'", "NCCL through NVIDIA's own binding", True),
    "nvidia-ml-py": Library(("nvidia-ml-py",), "'crossdevice[gpu]'", "GPUs and links in this report", True),
    "mpi4py": Library(("mpi4py",), "'crossdevice[mpi]'", "reductions between the processes of MPI"),
    "rich": Library(("rich",), "'crossdevice[cli]'", "tables and progress bars on a terminal"),
}
"""Libraries by the names that `crossdevice doctor` prints: module names where code imports them."""


def installed_version(distribution: str) -> str | None:
    """Returns the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing_library(error: ModuleNotFoundError) -> str:
    """Says which library is missing and how to install it.

    >>> missing_library(ModuleNotFoundError(name="mpi4py"))
    "mpi4py: pip install 'crossdevice[mpi]'"
    """
    library = str(error.name).partition(".")[0]
    known = LIBRARIES.get(library)
    if known is None:
        return f"{library}, which is not installed"
    return f"{library}: pip install {known.install or library}"


def loaded(target: str) -> Any:
    """Imports and returns what `module:attribute` names."""
    module, _, attribute = target.partition(":")
    found = importlib.import_module(module)
    if not hasattr(found, attribute):
        raise OptionError(f"{target!r} names nothing: module {module} has no {attribute}")
    return getattr(found, attribute)


class Registry(Mapping[str, str]):
    """A table `{name: "module:class"}`; third parties add rows through an entry point group."""

    def __init__(self, what: str, table: Mapping[str, str], entry_point_group: str) -> None:
        self._what = what
        self._table = dict(table)
        self._group = entry_point_group

    def load(self, name: str) -> Any:
        """Imports and returns the class of that name; refuses unknown names and missing libraries."""
        target = self.get(name) if isinstance(name, str) else None
        if target is None:
            raise OptionError(f"{name!r} is not {self._what}; expected one of {', '.join(self)}")
        try:
            return loaded(target)
        except ModuleNotFoundError as error:
            raise OptionError(f"{name!r}, {self._what}, needs {missing_library(error)}") from error

    def _rows(self) -> dict[str, str]:
        found = importlib.metadata.entry_points(group=self._group)
        return self._table | {entry.name: entry.value for entry in found if entry.name not in self._table}

    def __getitem__(self, name: str) -> str:
        # Installed packages are searched only for names that are not ours, which takes milliseconds.
        return self._table[name] if name in self._table else self._rows()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows())

    def __len__(self) -> int:
        return len(self._rows())

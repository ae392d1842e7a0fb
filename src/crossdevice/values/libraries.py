"""Libraries that may be missing, and what installs each."""

from __future__ import annotations

from collections.abc import Mapping

INSTALLED_BY: Mapping[str, str] = {
    "torch": "'crossdevice[torch]'",
    "jax": "'crossdevice[jax]'",
    "tensorflow": "'crossdevice[tensorflow]'",
    "cupy": "cupy-cuda13x",
    "mpi4py": "'crossdevice[mpi]'",
}
"""For pip, by the name of the module."""


def missing_library(error: ModuleNotFoundError) -> str:
    """Says which library is missing and how to install it.

    >>> missing_library(ModuleNotFoundError(name="mpi4py"))
    "mpi4py: pip install 'crossdevice[mpi]'"
    """
    library = str(error.name).partition(".")[0]
    known = INSTALLED_BY.get(library)
    return f"{library}: pip install {known}" if known else f"{library}, which is not installed"

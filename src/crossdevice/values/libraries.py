"""Optional libraries, and what installs each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


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

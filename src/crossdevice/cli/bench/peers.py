"""Peers for comparisons: their modules, requirements, and launch methods."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from crossdevice.values.registry import loaded

Runs = Literal["here", "process", "processes", "mpirun"]
"""Process of a peer: this one, its own, one per replica, or those of mpirun."""


class PeerSetup(NamedTuple):
    """Settings of a peer in another process."""

    num_devices: int
    num_processes: int
    rank: int
    folder: str


class Peer(NamedTuple):
    """One row of the table."""

    target: str
    needs: str
    runs: Runs
    what: str


PEERS: Mapping[str, Peer] = {
    "numpy": Peer("local_competitors:NumpyLoop", "numpy", "here", "a loop of NumPy additions and copies"),
    "torch": Peer("local_competitors:TorchLoop", "torch", "here", "a loop of PyTorch additions and copies"),
    "torch_flatten": Peer(
        "local_competitors:TorchFlatten", "torch", "here", "PyTorch: concatenate, add, clone, split"
    ),
    "numpy_stack": Peer(
        "local_competitors:NumpyStack", "numpy", "here", "np.add.reduce over a stack that is there already"
    ),
    "torch_stack": Peer(
        "local_competitors:TorchStack", "torch", "here", "torch.sum over a stack that is there already"
    ),
    "torch_one_shot": Peer("local_competitors:TorchOneShot", "torch", "here", "torch.stack, then sum"),
    "torch_foreach": Peer("local_competitors:TorchForeach", "torch", "here", "torch._foreach_add_"),
    "torch_compile": Peer(
        "local_competitors:TorchCompiled", "torch", "here", "sum and copies in one function of torch.compile"
    ),
    "jax_jit": Peer("compiled_peers:JaxJit", "jax", "process", "JAX's jitted sum on one device"),
    "tensorflow": Peer(
        "compiled_peers:TensorflowReductionToOneDevice",
        "tensorflow",
        "process",
        "TensorFlow's ReductionToOneDevice in a tf.function",
    ),
    "tensorflow_hierarchical_copy": Peer(
        "compiled_peers:TensorflowHierarchicalCopy",
        "tensorflow",
        "process",
        "TensorFlow's HierarchicalCopyAllReduce(num_packs=1) in a tf.function",
    ),
    "tensorflow_ring": Peer(
        "compiled_peers:TensorflowRing", "tensorflow", "process", "TensorFlow's ring in a tf.function"
    ),
    "jax": Peer("compiled_peers:JaxPsum", "jax", "process", "JAX's psum in a shard_map"),
    "gloo": Peer("rank_peers:GlooRank", "torch", "processes", "torch.distributed on gloo"),
    "mpi": Peer("rank_peers:MpiRank", "mpi4py", "mpirun", "MPI through mpi4py"),
}


def peer_unavailable(name: str) -> str | None:
    """Names what a peer needs and this machine lacks; None if it can run."""
    peer = PEERS[name]
    if importlib.util.find_spec(peer.needs) is None:
        return f"{peer.needs} not installed"
    if peer.runs == "mpirun" and launcher() is None:
        return "no mpirun or mpiexec found"
    return None


def launcher() -> str | None:
    """Returns the mpirun of this Python's packages, else the one on the path."""
    beside = str(Path(sys.executable).parent)
    found = (shutil.which(name, path=where) for where in (beside, None) for name in ("mpirun", "mpiexec"))
    return next((path for path in found if path is not None), None)


def peer_class(name: str) -> Any:
    """Returns the class of a peer of the table, or one named by `module:class`."""
    return loaded(f"crossdevice.cli.bench.{PEERS[name].target}" if name in PEERS else name)

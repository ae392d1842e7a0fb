"""The sums that are compared, and one rank of a launch that makes them; rank 0 writes the results:

python -m crossdevice.cli.determinism.sums BACKEND RANKS ELEMENTS RESULTS.npz
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.values.distributed import PerReplica
from crossdevice.values.options import CommunicationOptions

Array = NDArray[Any]
ValuesOf = Callable[[int], Array]
"""The addend of each rank."""

BASE = "base"
SEED = 57
CHANGES = ("message size", "bucket size", "permutation", "algorithm")
"""Changes within one launch."""

IN_FLOAT32 = CommunicationOptions(precision="fast", lowering="off")
"""Options under which each step of a plan rounds, as on devices with separate memories."""


class Sizes(NamedTuple):
    """The number of ranks, and of elements that are added in each way."""

    ranks: int
    elements: int

    @property
    def longer(self) -> int:
        """Length of the message that sends the same elements together with others."""
        return self.elements * 16 // 13  # 1664 rows of a matrix, and 2048

    @property
    def bucket(self) -> int:
        """Length of a bucket; the last one is shorter."""
        return max(self.elements * 3 // 10, 1)


class Sums(Protocol):
    """A way to add float32 arrays of all ranks."""

    def all_reduce(self, values_of: ValuesOf) -> Array:
        """Returns the sum."""

    def otherwise(self, values_of: ValuesOf) -> list[Array]:
        """Returns the same sum by other algorithms."""


def values(rank: int, length: int) -> Array:
    """Returns the addend of one rank; a shorter one is the beginning of a longer one."""
    return np.random.default_rng([SEED, rank]).standard_normal(length, np.float32)


def sums_in_all_ways(sums: Sums, sizes: Sizes) -> dict[str, list[Array]]:
    """Returns the results of each change; those without one are under `BASE`."""
    num_ranks, length, longer, bucket = sizes.ranks, sizes.elements, sizes.longer, sizes.bucket
    everything = [values(rank, longer) for rank in range(num_ranks)]

    def part(start: int, end: int) -> ValuesOf:
        return lambda rank: everything[rank][start:end]

    def permuted(order: Sequence[int]) -> Array:
        return sums.all_reduce(lambda rank: everything[order[rank]][:length])

    ranks = list(range(num_ranks))
    buckets = [
        sums.all_reduce(part(start, min(start + bucket, length))) for start in range(0, length, bucket)
    ]
    return {
        BASE: [sums.all_reduce(part(0, length))],
        "message size": [sums.all_reduce(part(0, longer))[:length]],
        "bucket size": [np.concatenate(buckets)],
        "permutation": [permuted(ranks[::-1]), permuted([*ranks[1:], 0])],
        "algorithm": sums.otherwise(part(0, length)),
    }


def changed_shares(found: Mapping[str, Sequence[Array]]) -> dict[str, float | None]:
    """Returns the share of changed elements for each change; None if a library has no other way."""
    (base,) = found[BASE]
    return {change: share_of(base, found[change]) for change in CHANGES}


def share_of(base: Array, others: Sequence[Array]) -> float | None:
    """Returns the share of elements that are not the same in all."""
    if not others:
        return None
    differs = np.zeros(base.shape, bool)
    for other in others:
        differs |= base.view(np.uint32) != other.view(np.uint32)
    return float(differs.mean())


class PlannedSums:
    """Sums by the plan of an algorithm, added in float32 within this process."""

    def __init__(self, algorithm: CrossDeviceOps, num_ranks: int) -> None:
        self._algorithm, self._num_ranks = algorithm, num_ranks

    def all_reduce(self, values_of: ValuesOf) -> Array:
        """Returns the sum."""
        addends = PerReplica([values_of(rank) for rank in range(self._num_ranks)])
        total: Array = self._algorithm.reduce("sum", addends, "cpu:0", options=IN_FLOAT32)
        return total

    def otherwise(self, values_of: ValuesOf) -> list[Array]:  # noqa: ARG002
        """Returns nothing: there is no other way."""
        return []


PRECISIONS = ("accurate", "exact")


class TorchSums:
    """A group of torch.distributed, with tensors on a kind of device."""

    def __init__(self, group: Any, device: str = "cpu") -> None:
        self._torch: Any = importlib.import_module("torch")
        self._distributed: Any = self._torch.distributed
        self._group, self._rank, self._device = group, self._distributed.get_rank(), device
        self._size = self._distributed.get_world_size()

    def all_reduce(self, values_of: ValuesOf) -> Array:
        """Returns the sum."""
        tensor = self._own(values_of)
        self._distributed.all_reduce(tensor, group=self._group)
        return self._array(tensor)

    def otherwise(self, values_of: ValuesOf) -> list[Array]:
        """Returns the sums by reductions to the first rank, and to each rank's own part."""
        reduced, own = self._own(values_of), self._own(values_of)
        self._distributed.reduce(reduced, 0, group=self._group)
        length = own.numel()
        whole = own.new_zeros(-(-length // self._size) * self._size)
        whole[:length] = own
        part = own.new_empty(whole.numel() // self._size)
        self._distributed.reduce_scatter_tensor(part, whole, group=self._group)
        self._distributed.all_gather_into_tensor(whole, part, group=self._group)
        return [self._array(reduced), self._array(whole[:length])]

    def _own(self, values_of: ValuesOf) -> Any:
        return self._torch.from_numpy(values_of(self._rank).copy()).to(self._device)

    def _array(self, tensor: Any) -> Array:
        array: Array = tensor.cpu().numpy()
        return array


class MpiSums:
    """The world of an MPI."""

    def __init__(self) -> None:
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        self._world = self._mpi.COMM_WORLD
        self.rank: int = self._world.rank

    def all_reduce(self, values_of: ValuesOf) -> Array:
        """Returns the sum."""
        own = values_of(self.rank)
        total = np.empty_like(own)
        self._world.Allreduce(own, total)
        return total

    def otherwise(self, values_of: ValuesOf) -> list[Array]:
        """Returns the sums by reductions to the first rank, and to each rank's own part."""
        own, size = values_of(self.rank), self._world.size
        reduced = np.zeros_like(own)
        self._world.Reduce(own, reduced, root=0)
        whole = np.zeros(-(-own.size // size) * size, own.dtype)
        whole[: own.size] = own
        part = np.empty(whole.size // size, own.dtype)
        self._world.Reduce_scatter_block(whole, part)
        self._world.Allgather(part, whole)
        return [reduced, whole[: own.size]]


def write(path: str, by_row: Mapping[str, Sums], sizes: Sizes, rank: int) -> None:
    """Makes all sums, with all ranks, and writes those of the first rank."""
    found = {
        f"{row}/{change}/{number}": result
        for row, sums in by_row.items()
        for change, results in sums_in_all_ways(sums, sizes).items()
        for number, result in enumerate(results)
    }
    if rank == 0:
        np.savez(path, allow_pickle=False, **found)


def main(backend: str, num_ranks: str, num_elements: str, path: str) -> None:
    """Makes sums with one library; with ours under each precision that promises bits."""
    sizes = Sizes(int(num_ranks), int(num_elements))
    if backend == "mpi":
        mpi = MpiSums()
        write(path, {backend: mpi}, sizes, mpi.rank)
        return
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    integration: Any = importlib.import_module("crossdevice.integrations.torch")
    distributed = torch.distributed
    distributed.init_process_group(backend)
    device = "cpu"
    if backend == "nccl":
        device = "cuda"
        torch.cuda.set_device(distributed.get_rank())
    rows: dict[str, Sums] = {backend: TorchSums(None, device)}
    if backend == "crossdevice":
        rows = {
            f"{backend}, {precision}": TorchSums(
                distributed.new_group(
                    backend=backend, pg_options=integration.BackendOptions(precision=precision)
                )
            )
            for precision in PRECISIONS
        }
    write(path, rows, sizes, distributed.get_rank())
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""One rank of a launch; rank 0 writes the results: `rank.py BACKEND RANKS ELEMENTS RESULTS.npz`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from crossdevice.cli.determinism.sums import Array, Sizes, Sums, ValuesOf, sums_in_all_ways

PRECISIONS = ("accurate", "exact")


class TorchSums:
    """A group of torch.distributed."""

    def __init__(self, group: Any) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._distributed: Any = self._torch.distributed
        self._group, self._rank = group, self._distributed.get_rank()
        self._size = self._distributed.get_world_size()

    def all_reduce(self, values_of: ValuesOf) -> Array:
        """The sum."""
        tensor = self._own(values_of)
        self._distributed.all_reduce(tensor, group=self._group)
        return self._array(tensor)

    def otherwise(self, values_of: ValuesOf) -> list[Array]:
        """Reduced to the first rank, and to each rank's own part."""
        reduced, own = self._own(values_of), self._own(values_of)
        self._distributed.reduce(reduced, 0, group=self._group)
        length = own.numel()
        whole = self._torch.zeros(-(-length // self._size) * self._size)
        whole[:length] = own
        part = self._torch.empty(whole.numel() // self._size)
        self._distributed.reduce_scatter_tensor(part, whole, group=self._group)
        self._distributed.all_gather_into_tensor(whole, part, group=self._group)
        return [self._array(reduced), self._array(whole[:length])]

    def _own(self, values_of: ValuesOf) -> Any:
        return self._torch.from_numpy(values_of(self._rank).copy())

    def _array(self, tensor: Any) -> Array:
        array: Array = tensor.numpy()
        return array


class MpiSums:
    """The world of an MPI."""

    def __init__(self) -> None:
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        self._world = self._mpi.COMM_WORLD
        self.rank: int = self._world.rank

    def all_reduce(self, values_of: ValuesOf) -> Array:
        """The sum."""
        own = values_of(self.rank)
        total = np.empty_like(own)
        self._world.Allreduce(own, total)
        return total

    def otherwise(self, values_of: ValuesOf) -> list[Array]:
        """Reduced to the first rank, and to each rank's own part."""
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
    """Makes all sums, in which each rank takes part, and writes those of the first one."""
    found = {
        f"{row}/{change}/{number}": result
        for row, sums in by_row.items()
        for change, results in sums_in_all_ways(sums, sizes).items()
        for number, result in enumerate(results)
    }
    if rank == 0:
        np.savez(path, allow_pickle=False, **found)


def main(backend: str, num_ranks: str, num_elements: str, path: str) -> None:
    """Sums with one library; with ours under each precision that promises bits."""
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
    rows: dict[str, Sums] = {backend: TorchSums(None)}
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

"""Peers of several processes, most with one replica each: one rank of gloo or of MPI, with its buffers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from crossdevice.backends.protocol import dtype_named
from crossdevice.backends.registry import backend_named
from crossdevice.cli.bench import data
from crossdevice.cli.bench.measure import Calls, Competitor
from crossdevice.cli.bench.peers import PeerSetup
from crossdevice.cli.bench.workload import ResultPlace, UnsupportedWorkError, Workload
from crossdevice.values.device import host_device


class Rank(Competitor):
    """A rank of gloo or MPI: collectives run array by array, and a mean is a sum, divided."""

    rank: int
    places: Mapping[str, Sequence[ResultPlace]]
    """Places in which the library can put the results of each collective."""

    def replicas(self, work: Workload) -> Sequence[int]:  # noqa: ARG002
        """Lists the replicas with inputs on this rank."""
        return [self.rank]

    def ready(self, work: Workload, inputs: Sequence[data.Arrays]) -> Calls:
        """Prepares calls; `inputs` are only this rank's."""
        self.check(work)
        (mine,) = inputs
        shares = work.num_devices if work.collective == "gather" else 1
        buffers = [np.zeros(array.size * shares, dtype_named(work.dtype)) for array in mine]
        is_root = self.rank == 0
        brings = is_root or work.collective != "broadcast"
        gets = is_root or work.num_results > 1

        def refill() -> None:
            for buffer, array in zip(buffers, mine, strict=True):
                if brings:
                    np.copyto(buffer, array)

        def poison() -> None:
            for buffer in buffers:
                buffer.fill(data.POISON)

        collect = self.collective(work)
        pairs = list(zip(self.placed(mine), self.placed(buffers), strict=True))

        def call(place: ResultPlace) -> None:
            """Takes this rank's part in the collective, from `mine` to `buffers` or on `buffers` alone."""
            for array, buffer in pairs:
                collect(None if place == "in_place" else array, buffer)
                if gets and work.op == "MEAN":
                    buffer /= work.num_devices

        calls = {place: partial(call, place) for place in self.places[work.collective]}
        results = [buffers] if gets else []
        return Calls(work, calls, lambda _: results, refill=refill, poison=poison, meet=self.meet)

    def placed(self, arrays: data.Arrays) -> list[Any]:
        """Returns the same memory in the library's type."""
        return arrays

    def collective(self, work: Workload) -> Callable[[Any, Any], object]:
        """Does it for one array and buffer; without an array, the buffer holds it."""
        raise NotImplementedError

    def meet(self) -> None:
        """Waits for all other ranks."""
        raise NotImplementedError


class GlooRank(Rank):
    """torch.distributed on CPUs, always with reductions and broadcasts in place."""

    name = "gloo"
    places = dict.fromkeys(("all_reduce", "reduce", "broadcast"), ("in_place",)) | {"gather": ("given",)}

    def __init__(self, setup: PeerSetup) -> None:
        self.rank = setup.rank
        # As torchrun does: ranks share the cores, so none has threads of its own.
        importlib.import_module("torch").set_num_threads(1)
        self._distributed: Any = importlib.import_module("torch.distributed")
        self._distributed.init_process_group(
            "gloo", init_method=f"file://{setup.folder}/store", rank=setup.rank, world_size=setup.num_devices
        )

    def placed(self, arrays: data.Arrays) -> list[Any]:
        """Returns tensors."""
        backend, device = backend_named("torch"), host_device(0)
        return [backend.from_host(array, array.shape, device) for array in arrays]

    def collective(self, work: Workload) -> Callable[[Any, Any], object]:
        """Runs the collective on tensors of the same memory."""
        distributed, is_root = self._distributed, self.rank == 0
        op = getattr(distributed.ReduceOp, {"MEAN": "SUM", "PROD": "PRODUCT"}.get(work.op, work.op))

        def gather(array: Any, buffer: Any) -> None:
            distributed.gather(array, list(buffer.chunk(work.num_devices)) if is_root else None)

        collectives: dict[str, Callable[[Any, Any], object]] = {
            "all_reduce": lambda _, buffer: distributed.all_reduce(buffer, op),
            "reduce": lambda _, buffer: distributed.reduce(buffer, 0, op),
            "broadcast": lambda _, buffer: distributed.broadcast(buffer, 0),
            "gather": gather,
        }
        return collectives[work.collective]

    def meet(self) -> None:
        """Runs a barrier."""
        self._distributed.barrier()

    def close(self) -> None:
        """Leaves the group."""
        self._distributed.destroy_process_group()


class MpiRank(Rank):
    """Any MPI that mpi4py finds; it does everything in place and out of place, but knows no bfloat16."""

    name = "mpi"
    places = dict.fromkeys(("all_reduce", "reduce"), ("given", "in_place")) | {
        "broadcast": ("in_place",),
        "gather": ("given",),
    }

    def __init__(self, setup: PeerSetup) -> None:  # noqa: ARG002
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        self._world = self._mpi.COMM_WORLD
        self.rank: int = self._world.rank

    def collective(self, work: Workload) -> Callable[[Any, Any], object]:
        """Runs the collective on NumPy arrays; only the root of a reduction may use in-place buffers."""
        if work.dtype == "bfloat16":
            raise UnsupportedWorkError("no bfloat16")
        world, is_root, in_place = self._world, self.rank == 0, self._mpi.IN_PLACE
        op = getattr(self._mpi, "SUM" if work.op == "MEAN" else work.op)

        def all_reduce(array: Any, buffer: Any) -> None:
            world.Allreduce(in_place if array is None else array, buffer, op)

        def reduce(array: Any, buffer: Any) -> None:
            own = in_place if is_root else buffer
            world.Reduce(own if array is None else array, buffer if is_root else None, op, 0)

        collectives: dict[str, Callable[[Any, Any], object]] = {
            "all_reduce": all_reduce,
            "reduce": reduce,
            "broadcast": lambda _, buffer: world.Bcast(buffer, 0),
            "gather": lambda array, buffer: world.Gather(array, buffer if is_root else None, 0),
        }
        return collectives[work.collective]

    def meet(self) -> None:
        """Runs a barrier."""
        self._world.Barrier()

"""Peers of several processes, most with one replica each: one rank of gloo or of MPI, with its buffers."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from crossdevice.backends.protocol import dtype_named
from crossdevice.backends.registry import backend_named
from crossdevice.cli.bench import data
from crossdevice.cli.bench.calls import Call, Calls
from crossdevice.cli.bench.loops import check_plain_mean
from crossdevice.cli.bench.peers import Seat
from crossdevice.cli.bench.work import Place, UnsupportedWorkError, Work
from crossdevice.values.device import host_device


class Rank:
    """What gloo and MPI share; neither has a mean, so they sum and divide."""

    name: str
    rank: int

    def replicas(self, work: Work) -> Sequence[int]:  # noqa: ARG002
        """Those whose inputs this rank has."""
        return [self.rank]

    def ready(self, work: Work, inputs: Sequence[data.Arrays]) -> Calls:
        """`inputs` are this rank's alone."""
        check_plain_mean(work)
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

        return Calls(
            work,
            self.calls(work, mine, buffers),
            read=lambda _: [buffers] if gets else [],
            refill=refill,
            poison=poison,
            meet=self.meet,
        )

    def calls(self, work: Work, mine: data.Arrays, buffers: data.Arrays) -> dict[Place, Call]:
        """This rank's part in the collective, from `mine` to `buffers` or on `buffers` alone."""
        raise NotImplementedError

    def meet(self) -> None:
        """Waits for all other ranks."""
        raise NotImplementedError

    def close(self) -> None:
        """Leaves the group."""
        raise NotImplementedError


class GlooRank(Rank):
    """torch.distributed on CPUs, whose reductions and broadcasts are always in place."""

    name = "gloo"

    def __init__(self, seat: Seat) -> None:
        self.rank = seat.rank
        # As torchrun does: ranks share the cores, so none has threads of its own.
        importlib.import_module("torch").set_num_threads(1)
        self._distributed: Any = importlib.import_module("torch.distributed")
        self._distributed.init_process_group(
            "gloo", init_method=f"file://{seat.folder}/store", rank=seat.rank, world_size=seat.num_devices
        )

    def calls(self, work: Work, mine: data.Arrays, buffers: data.Arrays) -> dict[Place, Call]:
        """On tensors that are the same memory."""
        distributed, is_root = self._distributed, self.rank == 0
        sent, tensors = _as_tensors(mine), _as_tensors(buffers)
        name = {"MEAN": "SUM", "PROD": "PRODUCT"}.get(work.op, work.op)
        op = getattr(distributed.ReduceOp, name)

        def finish(tensor: Any) -> None:
            if work.op == "MEAN":
                tensor /= work.num_devices

        def all_reduce() -> None:
            for tensor in tensors:
                distributed.all_reduce(tensor, op)
                finish(tensor)

        def reduce() -> None:
            for tensor in tensors:
                distributed.reduce(tensor, 0, op)
                if is_root:
                    finish(tensor)

        def broadcast() -> None:
            for tensor in tensors:
                distributed.broadcast(tensor, 0)

        def gather() -> None:
            for array, tensor in zip(sent, tensors, strict=True):
                distributed.gather(array, list(tensor.chunk(work.num_devices)) if is_root else None)

        if work.collective == "gather":
            return {"given": gather}
        return {
            "in_place": {"all_reduce": all_reduce, "reduce": reduce, "broadcast": broadcast}[work.collective]
        }

    def meet(self) -> None:
        """A barrier."""
        self._distributed.barrier()

    def close(self) -> None:
        """Leaves the group."""
        self._distributed.destroy_process_group()


class MpiRank(Rank):
    """Any MPI that mpi4py finds."""

    name = "mpi"

    def __init__(self, seat: Seat) -> None:  # noqa: ARG002
        self._mpi: Any = importlib.import_module("mpi4py.MPI")
        self._world = self._mpi.COMM_WORLD
        self.rank: int = self._world.rank

    def calls(self, work: Work, mine: data.Arrays, buffers: data.Arrays) -> dict[Place, Call]:
        """MPI does all of it, in place and out of place, but knows no bfloat16."""
        if work.dtype == "bfloat16":
            raise UnsupportedWorkError("no bfloat16")
        world, is_root, in_place = self._world, self.rank == 0, self._mpi.IN_PLACE
        op = getattr(self._mpi, work.op if work.op != "MEAN" else "SUM")
        pairs = list(zip(mine, buffers, strict=True))

        def finish(buffer: Any) -> None:
            if work.op == "MEAN":
                buffer /= work.num_devices

        def all_reduce(*, replaces: bool) -> None:
            for array, buffer in pairs:
                world.Allreduce(in_place if replaces else array, buffer, op)
                finish(buffer)

        def reduce(*, replaces: bool) -> None:
            for array, buffer in pairs:
                world.Reduce(in_place if replaces and is_root else array, buffer if is_root else None, op, 0)
                if is_root:
                    finish(buffer)

        def broadcast() -> None:
            for buffer in buffers:
                world.Bcast(buffer, 0)

        def gather() -> None:
            for array, buffer in pairs:
                world.Gather(array, buffer if is_root else None, 0)

        if work.collective == "broadcast":
            return {"in_place": broadcast}
        if work.collective == "gather":
            return {"given": gather}
        call = all_reduce if work.collective == "all_reduce" else reduce
        return {"given": lambda: call(replaces=False), "in_place": lambda: call(replaces=True)}

    def meet(self) -> None:
        """A barrier."""
        self._world.Barrier()

    def close(self) -> None:
        """MPI ends with the process."""


def _as_tensors(arrays: data.Arrays) -> list[Any]:
    backend, device = backend_named("torch"), host_device(0)
    return [backend.from_host(array, array.shape, device) for array in arrays]

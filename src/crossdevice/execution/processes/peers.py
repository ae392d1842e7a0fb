"""Processes that reach each other's GPU memory: found out once by each group, by trying."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

from crossdevice import runtime
from crossdevice.execution.local.gpu_passes import fused_pass_unavailable
from crossdevice.execution.local.prepared import recipe_for
from crossdevice.execution.processes.peer_addresses import PeerAddresses
from crossdevice.execution.reading.leaf_spec import LeafSpec
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.device import Device, device_of
from crossdevice.values.dtypes import result_dtype
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp

NO_GPU, NO_PEER, PEER = b"0", b"1", b"2"
"""What a rank says first: that it has nothing on a GPU, nothing that others reach, or what it is."""


class Peers:
    """The ways in which ranks reach each other's GPU memory, or the reason they do not."""

    def __init__(
        self,
        gpu: Device | None = None,
        addresses: PeerAddresses | None = None,
        workers: Sequence[int] = (),
        unavailable: str | None = None,
        are_on_gpus: bool = True,
    ) -> None:
        self.gpu = gpu
        """The GPU of this process whose memory the others reach."""
        self.addresses = addresses
        self.workers = workers
        """For each rank the one that reduces on its GPU: processes on one GPU would take turns on it."""
        self.unavailable = unavailable
        self.are_on_gpus = are_on_gpus
        """Whether the arrays of all ranks are on GPUs, whether or not these are reached."""

    def __del__(self) -> None:
        if self.addresses is not None and not sys.is_finalizing():
            self.addresses.close()


_peers: weakref.WeakKeyDictionary[ProcessGroup, Peers] = weakref.WeakKeyDictionary()


def known_peers(group: ProcessGroup) -> Peers | None:
    """Returns what a group has found out; None if it has not been asked."""
    return _peers.get(group)


def peers_unavailable(
    spec: LeafSpec, op: ReduceOp, options: CommunicationOptions, group: ProcessGroup
) -> str | None:
    """Reason a leaf cannot be reduced from the GPU memory of all ranks; None if it can.

    Only what does not depend on the replicas of other ranks.
    """
    if spec.backend.name != "torch" or not spec.num_elements or group.size == 1:
        return "there is nothing that other ranks could read: expected elements of PyTorch's tensors"
    peers = known_peers(group)
    if peers is None:
        return "the group finds out in its first reduction"
    if peers.unavailable is not None:
        return peers.unavailable
    if spec.shared_gpu is None or spec.shared_gpu != peers.gpu:
        return f"its arrays are not all on {peers.gpu}, which other ranks reach"
    if options.lowering != "auto":
        return "lowering is off"
    if op.is_order_statistic or spec.into is not None or spec.own_op is not None:
        return "kernels sort no values, and results have the dtype that the operation gives"
    return fused_pass_unavailable(spec, recipe_for(op, options, group.size), result_dtype(spec.dtype, op))


def explained_peers(group: ProcessGroup) -> str:
    """Names the ranks that reduce from the GPU memory of all, and what."""
    peers = known_peers(group)
    assert peers is not None
    workers = list(dict.fromkeys(peers.workers))
    if len(workers) == group.size:
        return "each process sums its shard (of reduce_scatter its part) from the GPU memory of all"
    ranks = " and ".join(map(str, workers))
    return (
        "one process of each GPU sums its shard (of reduce_scatter the parts there) from the GPU memory of "
        f"all (rank {ranks})"
    )


def find_peers(call: GroupCall, gpu: Device | None) -> None:
    """Has all ranks of a call try to read each other's GPU memory, the first time it is called for a group.

    A rank whose arrays are not on one GPU, as far as it knows by then, takes no part, and then none does.
    """
    if call.group not in _peers:
        _peers[call.group] = _found(call, gpu)


def _found(call: GroupCall, gpu: Device | None) -> Peers:
    unavailable, record = _own_record(gpu)
    kind = NO_GPU if gpu is None else NO_PEER if record is None else PEER
    answers = call.all_gather_uneven(kind + (unavailable.encode() if record is None else record))
    refusing = [rank for rank, answer in enumerate(answers) if answer[:1] != PEER]
    if refusing:
        why = f"{call.group.members[refusing[0]]} {answers[refusing[0]][1:].decode()}"
        return Peers(unavailable=why, are_on_gpus=all(answer[:1] != NO_GPU for answer in answers))
    records = [answer[1:] for answer in answers]
    from crossdevice.kernels.cuda.driver import DriverError
    from crossdevice.kernels.cuda.peer_memory import Found, Mapped, Probe

    mapped = [Mapped() for _ in records]
    probes = list(map(Found.read, records))
    try:
        found = [
            rank == call.group.rank or Probe.finds(probe, mapped[rank]) for rank, probe in enumerate(probes)
        ]
    except DriverError as error:
        unavailable, found = str(error), [False]
    answers = call.all_gather(b"1" if all(found) else b"0")
    if b"0" not in answers:
        gpus = [probe.gpu for probe in probes]
        return Peers(gpu, PeerAddresses(call.group.rank, mapped), [gpus.index(each) for each in gpus])
    rank = answers.index(b"0")
    why = f"{call.group.members[rank]} cannot map the GPU memory of all others"
    return Peers(unavailable=f"{why} ({unavailable})" if unavailable else why)


def offered_gpu(arrays: Sequence[Any], group: ProcessGroup) -> Device | None:
    """The GPU that all arrays are on, PyTorch's tensors, if others may reach it, as far as is known."""
    places = set(map(device_of, arrays))
    if len(places) != 1 or group.size == 1 or not all(hasattr(array, "data_ptr") for array in arrays):
        return None
    gpu, peers = Device.parse(places.pop() or "cpu"), known_peers(group)
    is_reached = peers is None or (peers.unavailable is None and peers.gpu == gpu)
    return gpu if gpu.type == "cuda" and is_reached else None


def are_reached(call: GroupCall, gpu: Device | None, are_offered: Sequence[bool]) -> bool:
    """Returns True if ranks copy from each other's GPU memory, given which of them offer theirs."""
    if not all(are_offered):
        return False
    find_peers(call, gpu)
    peers = known_peers(call.group)
    return peers is not None and peers.unavailable is None


_probes: list[object] = []
"""Bytes that other processes may be reading stay where they are."""


def _own_record(gpu: Device | None) -> tuple[str, bytes | None]:
    """Describes this process to others: how to find its probe, or the reason it takes no part."""
    wish = runtime.PEER_MEMORY.read()
    if wish == "0":
        return f"has {runtime.PEER_MEMORY.variable}=0", None
    if gpu is None or not sys.platform.startswith("linux"):
        return "had nothing on a GPU of its own in the group's first reduction", None
    from crossdevice.kernels.cuda.availability import kernels_unavailable

    missing = kernels_unavailable()
    if missing is not None:
        return f"lacks kernels: {missing}", None
    from crossdevice.kernels.cuda.driver import DriverError
    from crossdevice.kernels.cuda.peer_memory import Probe

    try:
        probe = Probe(gpu.index, is_alone=wish == "each")
    except DriverError as error:
        return f"cannot export GPU memory: {error}", None
    _probes.append(probe)
    return "", probe.record

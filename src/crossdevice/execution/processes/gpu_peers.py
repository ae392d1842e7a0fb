"""Processes that reach each other's GPU memory: found out once by each group, by trying.

Addresses of all ranks' arrays there are told once, and later known by a few bytes.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from crossdevice import runtime
from crossdevice.execution.local.gpu_passes import fused_pass_unavailable
from crossdevice.execution.local.prepared import recipe_for
from crossdevice.execution.reading.leaf_spec import LeafSpec
from crossdevice.execution.signature_cache import SignatureCache
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.device import Device, device_of
from crossdevice.values.dtypes import result_dtype
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp

if TYPE_CHECKING:
    from crossdevice.kernels.cuda.peer_memory import Exported, Mapped

NO_GPU, NO_PEER, PEER = b"0", b"1", b"2"
"""What a rank says first: that it has nothing on a GPU, nothing that others reach, or what it is."""

_DIGEST = struct.Struct("<2q")
MAX_TOLD = 256
"""Sets of arrays of one rank that others remember; a program with more tells them again now and then."""

_left_behind: list[object] = []
"""Arrays of calls that failed: another process may still read them, or write to them."""


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
    from crossdevice.kernels.cuda.driver import kernels_unavailable

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


class PeerAddresses:
    """The addresses at which one rank finds the arrays of all, for the calls of one group."""

    def __init__(self, rank: int, mapped: Sequence[Mapped]) -> None:
        from crossdevice.kernels.cuda import peer_memory, tensors

        self._memory: Any = peer_memory
        self._tensors = tensors
        self._rank, self._mapped = rank, mapped
        # What a rank has told is remembered and forgotten by all ranks in the same call.
        self._told: list[SignatureCache[Sequence[Exported]]] = [SignatureCache(MAX_TOLD) for _ in mapped]
        self._own: SignatureCache[tuple[bytes, bytes]] = SignatureCache()
        self._found: SignatureCache[list[int]] = SignatureCache()

    def visit(
        self,
        call: GroupCall,
        place: Any,
        arrays: Sequence[Any],
        own: Sequence[int],
        work: Callable[[list[int], int], None] | None,
    ) -> None:
        """Has work done on the arrays of all ranks, when all of them are ready and before any goes on.

        It is given their addresses and a stream; this rank's own are those of `arrays`, on device `place`.
        The host waits for the GPU, so that a process that is lost leaves nobody's stream stuck.
        """
        try:
            self._tensors.wait_for(place)
            addresses = self.met(call, own)
            if work is not None:
                work(addresses, self._tensors.stream_of(place))
                self._tensors.wait_for(place)
            meet(call)
        except BaseException:
            _left_behind.append(arrays)
            raise
        self.forget_old()

    def met(self, call: GroupCall, own: Sequence[int]) -> list[int]:
        """The addresses of the arrays of all ranks, in order, once all have come here with their own."""
        digest, record = self._announced(own)
        digests = _exchanged(call, digest)
        is_told = [each in told for each, told in zip(digests, self._told, strict=True)]
        if not all(is_told):
            records = call.all_gather_uneven(b"" if is_told[self._rank] else record)
            for told, each, text in zip(self._told, digests, records, strict=True):
                if each not in told:
                    told[each] = _unpacked(text)
        key = tuple(digests)
        found = self._found.get(key)
        if found is None:
            found = []
            for rank, (told, each) in enumerate(zip(self._told, digests, strict=True)):
                mapped = self._mapped[rank]
                found += own if rank == self._rank else map(mapped.address_of, told[each])
            self._found[key] = found
        return found

    def forget_old(self) -> None:
        """Lets go of mappings that were not used for long, when no rank is at work on them."""
        are_old = [mapped.forget_old() for mapped in self._mapped]
        if any(are_old):
            self._found.clear()

    def close(self) -> None:
        """Lets go of all mappings."""
        for mapped in self._mapped:
            mapped.close()

    def _announced(self, own: Sequence[int]) -> tuple[bytes, bytes]:
        """Describes the own arrays, and what others need to find them."""
        # An address that was freed and used again is in another allocation.
        key = (*own, *map(self._memory.allocation_of, own))
        known = self._own.get(key)
        if known is None:
            record = _packed([self._memory.exported(address) for address in own])
            known = hashlib.blake2b(record, digest_size=_DIGEST.size).digest(), record
            self._own[key] = known
        return known


def meet(call: GroupCall) -> None:
    """Returns when all ranks have come here."""
    if call.group.shared is None:
        call.all_gather(b"done")
    else:
        call.step()


def _exchanged(call: GroupCall, digest: bytes) -> list[bytes]:
    """The digests of all ranks."""
    shared = call.group.shared
    if shared is None:
        return call.all_gather(digest)
    call.step(_DIGEST.unpack(digest))
    return [_DIGEST.pack(*shared.steps.numbers_of(rank, 0, 2)) for rank in range(call.group.size)]


def _packed(places: Sequence[Exported]) -> bytes:
    """Addresses for others: each allocation's handle once, then which of them, and how far into it."""
    handles = list(dict.fromkeys(place.handle for place in places))
    numbers = [number for place in places for number in (handles.index(place.handle), place.offset)]
    return struct.pack("<q", len(handles)) + b"".join(handles) + struct.pack(f"<{len(numbers)}q", *numbers)


def _unpacked(record: bytes) -> list[Exported]:
    from crossdevice.kernels.cuda.peer_memory import HANDLE_BYTES, Exported

    (number,) = struct.unpack_from("<q", record)
    end = 8 + number * HANDLE_BYTES
    handles = [record[start : start + HANDLE_BYTES] for start in range(8, end, HANDLE_BYTES)]
    return [Exported(handles[which], offset) for which, offset in struct.iter_unpack("<qq", record[end:])]

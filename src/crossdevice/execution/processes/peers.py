"""Processes that reach each other's GPU memory: found out once by each group, by trying."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.device import Device

if TYPE_CHECKING:
    from crossdevice.kernels.cuda.peer_memory import Exported, Mapped

VARIABLE = "CROSSDEVICE_PEER_MEMORY"


class Peers:
    """What a group has found out: why its ranks do not reach each other's GPU memory, or how they do."""

    def __init__(self, gpu: Device | None, mapped: Sequence[Mapped], why_not: str | None = None) -> None:
        self.gpu = gpu
        """Of this process's GPUs the one whose memory the others reach."""
        self._mapped = mapped
        self.why_not = why_not

    def address_of(self, rank: int, place: Exported) -> int:
        """Where this process finds what another rank has exported."""
        return self._mapped[rank].address_of(place)

    def forget_old(self) -> None:
        """Lets go of mappings that were not used for long, when no rank is at work on them."""
        for mapped in self._mapped:
            mapped.forget_old()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            for mapped in self._mapped:
                mapped.close()


_peers: weakref.WeakKeyDictionary[ProcessGroup, Peers] = weakref.WeakKeyDictionary()


def known_peers(group: ProcessGroup) -> Peers | None:
    """What a group has found out; None if it has not been asked."""
    return _peers.get(group)


def why_no_peers(group: ProcessGroup) -> str:
    """For people: why ranks do not use each other's GPU memory."""
    peers = known_peers(group)
    if peers is None:
        return "the group finds out in its first reduction"
    return peers.why_not or "kernels cannot repeat the bits of the host"


def find_peers(call: GroupCall, gpu: Device | None) -> None:
    """Has all ranks of a call try to read each other's GPU memory, the first time it is called for a group.

    A rank whose arrays are not on one GPU, as far as it knows by then, takes no part, and then none does.
    """
    if call.group not in _peers:
        _peers[call.group] = _found(call, gpu)


def _found(call: GroupCall, gpu: Device | None) -> Peers:
    why_not, record = _own_record(gpu)
    records = call.all_gather_uneven(record or f"!{why_not}".encode())
    refusing = {rank: text[1:].decode() for rank, text in enumerate(records) if text.startswith(b"!")}
    if refusing:
        rank, why = next(iter(refusing.items()))
        return Peers(gpu, (), f"{call.group.members[rank]} {why}")
    from crossdevice.kernels.cuda.peer_memory import Mapped, PeerMemoryError, Probe

    mapped = [Mapped() for _ in records]
    answer = b"1"
    try:
        found = [
            rank == call.group.rank or Probe.finds(record, mapped[rank])
            for rank, record in enumerate(records)
        ]
    except PeerMemoryError as error:
        why_not, answer = str(error), b"0"
    else:
        answer = b"1" if all(found) else b"0"
    answers = call.all_gather(answer)
    if b"0" not in answers:
        return Peers(gpu, mapped)
    rank = answers.index(b"0")
    why = f"{call.group.members[rank]} cannot map the GPU memory of all others"
    return Peers(gpu, mapped, why if why_not is None else f"{why} ({why_not})")


_probes: list[object] = []
"""Bytes that other processes may be reading stay where they are."""


def _own_record(gpu: Device | None) -> tuple[str | None, bytes]:
    """Why this process takes no part, or what others need to find its probe."""
    if os.environ.get(VARIABLE) == "0":
        return f"has {VARIABLE}=0", b""
    if gpu is None or not sys.platform.startswith("linux"):
        return "had nothing on a GPU of its own in the group's first reduction", b""
    from crossdevice.kernels.cuda.availability import kernels_missing

    missing = kernels_missing()
    if missing is not None:
        return f"lacks kernels: {missing}", b""
    from crossdevice.kernels.cuda.peer_memory import PeerMemoryError, Probe

    try:
        probe = Probe(gpu.index)
    except PeerMemoryError as error:
        return f"cannot export GPU memory: {error}", b""
    _probes.append(probe)
    return None, probe.record

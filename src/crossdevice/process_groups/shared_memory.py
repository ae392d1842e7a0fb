"""Memory that all ranks of a group share because they run on one host, and how they find out that they do.

Rank 0 makes a file without a name (a memfd), which is gone with the last process that has it; the others open
it through /proc, and read back what it has written there. Nothing is concluded from names of hosts or from
variables: ranks in different containers, or of different users, do not get at it, and say why.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.errors import OptionError
from crossdevice.process_groups.mapping import mapped_file
from crossdevice.process_groups.process_births import birth_of
from crossdevice.process_groups.shared_arrays import Bytes, SharedArrays, name_of
from crossdevice.process_groups.shared_steps import SharedSteps, steps_bytes

if TYPE_CHECKING:
    from crossdevice.process_groups.group_call import GroupCall

VARIABLE = "CROSSDEVICE_SHARED_MEMORY"

WINDOW_BYTES = 2 << 20
"""What one rank can show the others at once. More has to go in several steps, and less stays in caches."""

TOKEN_BYTES = 16
REASON_BYTES = 200
_OFFER = struct.Struct(f"<qqq{TOKEN_BYTES}s{REASON_BYTES}s")


class SharedMemory:
    """The memory of one group, seen from one rank: steps, and windows for what ranks show each other.

    For each of two steps in turn every rank has one window for what it brings and one for what it makes of
    it. A rank writes to its own windows only.
    """

    def __init__(self, memory: mmap.mmap, rank: int, processes: list[tuple[int, int]]) -> None:
        size = len(processes)
        self.rank = rank
        self.steps = SharedSteps(memory, rank, size, processes)
        self.arrays = SharedArrays(processes)
        pages = np.frombuffer(memory, np.uint8)[steps_bytes(size) :].reshape(2, 2, size, WINDOW_BYTES)
        self.brought: list[list[Bytes]] = [list(pages[0, parity]) for parity in (0, 1)]
        """By parity of the step and by rank."""
        self.made: list[list[Bytes]] = [list(pages[1, parity]) for parity in (0, 1)]
        self.on_shown: Callable[[NDArray[Any]], None] | None = None
        """Called with what this rank has put into a window, before others read it: for faults on purpose."""


class _Offer(NamedTuple):
    """What a rank tells the others: its process, where its file is and what it begins with, or why not."""

    process: int
    birth: int
    descriptor: int
    token: bytes
    reason: bytes

    @classmethod
    def read(cls, record: bytes) -> _Offer:
        return cls(*_OFFER.unpack(record))


def is_wanted(given: bool | None) -> bool:
    """Whether a group is to use shared memory: as it was told, else as the variable says, else yes."""
    if given is not None:
        return given
    word = os.environ.get(VARIABLE, "1")
    if word not in ("0", "1"):
        raise OptionError(f"{VARIABLE} must be 0 or 1; got {word!r}")
    return word == "1"


def unavailable_reason() -> str | None:
    """Reason why this process cannot share memory with others; None if it can."""
    if sys.platform != "linux":
        return f"it is implemented for Linux, and this is {sys.platform}"
    if platform.machine() != "x86_64":
        return f"it is implemented for x86-64, and this is {platform.machine()}"
    if birth_of(os.getpid()) is None:
        return "/proc cannot be read"
    return None


def memory_shared_by(call: GroupCall, *, wanted: bool) -> tuple[SharedMemory | None, str]:
    """The memory that all ranks of the call's group share, or the reason why there is none."""
    rank, size, members = call.group.rank, call.group.size, call.group.members
    if len({member.partition(" ")[2].partition(" ")[2] for member in members}) < size:
        return None, "several ranks are threads of one process"
    reason = unavailable_reason() if wanted else f"it was switched off (shared_memory=False or {VARIABLE}=0)"
    mapped: mmap.mmap | None = None
    token, descriptor = secrets.token_bytes(TOKEN_BYTES), -1
    num_bytes = steps_bytes(size) + 4 * size * WINDOW_BYTES
    if rank == 0 and reason is None:
        try:
            descriptor = os.memfd_create(name_of(_number(token)), os.MFD_CLOEXEC)
            os.ftruncate(descriptor, num_bytes)
            mapped = mapped_file(descriptor, num_bytes)
            mapped[:TOKEN_BYTES] = token
        except OSError as error:
            reason = f"no memory could be made: {error}"
    try:
        process = os.getpid()
        offers = _told(call, _Offer(process, birth_of(process) or 0, descriptor, token, _short(reason)))
        reasons = {number: offer.reason for number, offer in enumerate(offers) if offer.reason}
        if not reasons:
            if rank:
                mapped, reason = _opened(offers[0], num_bytes)
            answers = _told(call, _Offer(process, 0, 0, b"", _short(reason)))
            reasons = {number: answer.reason for number, answer in enumerate(answers) if answer.reason}
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if reasons:
        first, *more = sorted(reasons)
        others = f" (and {len(more)} more)" if more else ""
        return None, f"{members[first]}{others}: {reasons[first].decode(errors='replace')}"
    assert mapped is not None
    return SharedMemory(mapped, rank, [(offer.process, offer.birth) for offer in offers]), ""


def _told(call: GroupCall, offer: _Offer) -> list[_Offer]:
    records = [_Offer.read(record) for record in call.all_gather(_OFFER.pack(*offer))]
    return [record._replace(reason=record.reason.rstrip(b"\0")) for record in records]


def _opened(offer: _Offer, num_bytes: int) -> tuple[mmap.mmap | None, str | None]:
    """Rank 0's memory, or the reason why this rank cannot have it."""
    place = f"/proc/{offer.process}/fd/{offer.descriptor}"
    try:
        # The name first: in another container the number may be that of a process that has nothing to do
        # with this one, and to open what it has open might disturb it.
        if os.readlink(place) != f"/memfd:{name_of(_number(offer.token))} (deleted)":
            return None, f"rank 0 is in another container or on another host: {place} is something else"
        descriptor = os.open(place, os.O_RDWR | os.O_CLOEXEC)
        try:
            mapped = mapped_file(descriptor, num_bytes)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return None, f"rank 0 is in another container or on another host: {place} is not there"
    except OSError as error:
        return None, f"the memory of rank 0 cannot be opened: {error}"
    if mapped[:TOKEN_BYTES] != offer.token:
        return None, "rank 0 is in another container or on another host: the memory is not its own"
    return mapped, None


def _number(token: bytes) -> int:
    """Half of it, by which the file is known; all of it is to be read in the memory."""
    return int.from_bytes(token[: TOKEN_BYTES // 2], "little")


def _short(reason: str | None) -> bytes:
    return (reason or "").encode()[:REASON_BYTES]

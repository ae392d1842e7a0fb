"""Addresses of all ranks' arrays on GPUs that all of them reach: told once, later known by a few bytes."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from crossdevice.execution.signature_cache import SignatureCache
from crossdevice.process_groups.group_call import GroupCall

if TYPE_CHECKING:
    from crossdevice.kernels.cuda.peer_memory import Exported, Mapped

_DIGEST = struct.Struct("<2q")
MAX_TOLD = 256
"""Sets of arrays of one rank that others remember; a program with more tells them again now and then."""


_left_behind: list[object] = []
"""Arrays of calls that failed: another process may still read them, or write to them."""


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

"""Collectives that move bytes: each is one exchange between ranks, and looks at no element.

They are made of `ProcessGroup.make_call` and `GroupCall.exchange`, which need nothing that is compiled.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from crossdevice.backends.torch_backend import TensorMemory
from crossdevice.errors import ShapeMismatchError
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.process_groups.protocol import Message
from crossdevice.process_groups.shared.shared_memory import WINDOW_BYTES, SharedMemory

Bytes = NDArray[np.uint8]


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """Returns the memory of a contiguous host tensor."""
    return np.asarray(TensorMemory(tensor, "|u1", tensor.nbytes)) if tensor.numel() else np.empty(0, np.uint8)


@functools.lru_cache(maxsize=1024)
def _signature(what: str) -> bytes:
    return hashlib.blake2b(what.encode(), digest_size=16).digest()


class HostCopies:
    """Collectives that copy host tensors: contiguous ones, which are read and written where they are."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def barrier(self, seconds: float | None = None) -> None:
        """Returns when all ranks have come."""
        self._make(_meet, "barrier", seconds)

    def all_gather(
        self, of_ranks: Sequence[torch.Tensor], own: torch.Tensor, what: str, seconds: float | None = None
    ) -> None:
        """Fills in the tensors of all ranks, which may have different sizes."""
        self._make(_all_gather, what, seconds, list(map(bytes_of, of_ranks)), bytes_of(own))

    def broadcast(
        self, tensors: Sequence[torch.Tensor], root: int, what: str, seconds: float | None = None
    ) -> None:
        """Copies the root's tensors to those of all others."""
        self._make(_broadcast, what, seconds, list(map(bytes_of, tensors)), root)

    def all_to_all(
        self,
        received: Sequence[torch.Tensor | None],
        sent: Sequence[torch.Tensor | None],
        what: str,
        seconds: float | None = None,
    ) -> None:
        """Sends each rank a part and receives one from each; None stands for nothing."""
        self._make(
            _all_to_all,
            what,
            seconds,
            [_or_none(each) for each in received],
            [_or_none(each) for each in sent],
        )

    def exchange_arrays(
        self, received: Sequence[Bytes], sent: Sequence[Bytes], what: str, seconds: float | None = None
    ) -> None:
        """Exchanges NumPy arrays."""
        self._make(_all_to_all, what, seconds, received, sent)

    def _make(self, work: Callable[..., None], what: str, seconds: float | None, *args: Any) -> None:
        self._group.make_call(work, what, _signature(what), seconds, *args)


def _or_none(tensor: torch.Tensor | None) -> Bytes | None:
    return None if tensor is None else bytes_of(tensor)


def _meet(call: GroupCall) -> None:
    if call.group.shared is not None:
        call.step()
    elif call.group.size > 1:
        call.all_gather(b"!")


def _all_gather(call: GroupCall, of_ranks: Sequence[Bytes], own: Bytes) -> None:
    rank = call.group.rank
    if call.group.shared is not None and max([memory.size for memory in of_ranks]) <= WINDOW_BYTES:
        windows = _shown(call, own)
        for peer in call.others():
            of_ranks[peer][:] = windows[peer][: of_ranks[peer].size]
        _copy(of_ranks[rank], own)
        return
    parts = [[memory] for memory in of_ranks]
    parts[rank] = [own]
    call.all_gather_into(parts)
    _copy(of_ranks[rank], own)


def _broadcast(call: GroupCall, memory: Sequence[Bytes], root: int) -> None:
    if call.group.shared is not None and len(memory) == 1 and memory[0].size <= WINDOW_BYTES:
        is_root = call.group.rank == root
        windows = _shown(call, memory[0] if is_root else None)
        if not is_root:
            memory[0][:] = windows[root][: memory[0].size]
    elif call.group.rank == root:
        call.exchange([Message(peer, each) for peer in call.others() for each in memory], [])
    else:
        call.exchange([], [Message(root, each) for each in memory])


def _shown(call: GroupCall, memory: Bytes | None) -> Sequence[Bytes]:
    """Shows memory to the ranks of this host in one step, and returns the windows of all of them.

    All ranks know that it fits into one: how much it is belongs to the signature of the call.
    """
    shared = call.group.shared
    assert shared is not None
    windows = shared.brought[shared.steps.parity]
    if memory is not None:
        window = windows[shared.rank][: memory.size]
        window[:] = memory
        if shared.on_shown is not None:
            shared.on_shown(window)
    call.step()
    return windows


def _exchanged(
    call: GroupCall,
    shared: SharedMemory,
    received: Sequence[Bytes | None],
    sent: Sequence[Bytes | None],
) -> bool:
    """Exchanges in one step if the windows suffice; False on all ranks if they do not on any.

    Ranks know what they send and receive themselves, and tell each other where in their windows it is.
    """
    size, others, windows = call.group.size, call.others(), shared.brought[shared.steps.parity]
    going = _messages(others, sent)
    fits = sum([memory.size for _, memory in going]) <= WINDOW_BYTES
    table, end = [int(fits), *[0] * 2 * size], 0
    for peer, memory in going if fits else ():
        start, end = end, end + memory.size
        windows[shared.rank][start:end] = memory
        table[1 + 2 * peer : 3 + 2 * peer] = start, end
    if shared.on_shown is not None:
        shared.on_shown(windows[shared.rank][:end])
    call.step(table)
    tables = {peer: shared.steps.numbers_of(peer, 0, len(table)) for peer in others}
    if not (fits and all(fits_there for fits_there, *_ in tables.values())):
        return False
    for peer, memory in _messages(others, received):
        start, end = tables[peer][1 + 2 * shared.rank : 3 + 2 * shared.rank]
        if end - start != memory.size:
            raise ShapeMismatchError(
                f"rank {peer} sends {end - start} bytes to rank {call.group.rank}, which expects "
                f"{memory.size}: input and output splits of {call.what} have to agree"
            )
        memory[:] = windows[peer][start:end]
    return True


def _all_to_all(call: GroupCall, received: Sequence[Bytes | None], sent: Sequence[Bytes | None]) -> None:
    rank, others, shared = call.group.rank, call.others(), call.group.shared
    if shared is None or not _exchanged(call, shared, received, sent):
        call.exchange(_messages(others, sent), _messages(others, received))
    own, target = sent[rank], received[rank]
    if own is not None and target is not None:
        _copy(target, own)


def _messages(peers: Sequence[int], of_ranks: Sequence[Bytes | None]) -> list[Message]:
    return [Message(peer, memory) for peer in peers if (memory := of_ranks[peer]) is not None]


def _copy(target: Bytes, source: Bytes) -> None:
    if target.size and target.ctypes.data != source.ctypes.data:
        target[:] = source

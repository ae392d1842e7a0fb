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

from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.process_groups.protocol import Message

Bytes = NDArray[np.uint8]


class _Memory:
    """The bytes of a contiguous tensor for NumPy; `Tensor.numpy` would forbid to resize its storage."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.numel() * tensor.element_size(),),
            "typestr": "|u1",
            "version": 3,
        }


def bytes_of(tensor: torch.Tensor) -> Bytes:
    """The memory of a contiguous host tensor."""
    return np.asarray(_Memory(tensor)) if tensor.numel() else np.empty(0, np.uint8)


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
        """Fills in what each rank has; tensors of other ranks may have other sizes."""
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
        """The same for memory of NumPy."""
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
    parts = [[memory] for memory in of_ranks]
    parts[rank] = [own]
    call.all_gather_into(parts)
    _copy(of_ranks[rank], own)


def _broadcast(call: GroupCall, memory: Sequence[Bytes], root: int) -> None:
    if call.group.rank == root:
        call.exchange([Message(peer, each) for peer in call.others() for each in memory], [])
    else:
        call.exchange([], [Message(root, each) for each in memory])


def _all_to_all(call: GroupCall, received: Sequence[Bytes | None], sent: Sequence[Bytes | None]) -> None:
    rank, others = call.group.rank, call.others()
    call.exchange(_messages(others, sent), _messages(others, received))
    own, target = sent[rank], received[rank]
    if own is not None and target is not None:
        _copy(target, own)


def _messages(peers: Sequence[int], of_ranks: Sequence[Bytes | None]) -> list[Message]:
    return [Message(peer, memory) for peer in peers if (memory := of_ranks[peer]) is not None]


def _copy(target: Bytes, source: Bytes) -> None:
    if target.size and target.ctypes.data != source.ctypes.data:
        target[:] = source

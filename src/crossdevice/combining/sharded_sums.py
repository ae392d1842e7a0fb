"""Exact sums that each rank holds a shard of: arrays are exchanged as they come, and added there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.combining.between_ranks import (
    Bytes,
    Range,
    RoundedSum,
    gathered_json,
    joined,
    shards_of,
    write_own,
)
from crossdevice.kernels.host.running_sum import RunningSum, add_all
from crossdevice.process_groups.group_call import GroupCall, receive_buffer
from crossdevice.process_groups.protocol import Message


class ShardedSums:
    """Sums of flat arrays, each rank with its shard of every bucket; all ranks call all methods alike."""

    def __init__(
        self, sizes: Sequence[int], dtypes: Sequence[np.dtype[Any]], ranks: int, bucket_bytes: int
    ) -> None:
        self._dtypes = dtypes
        self._buckets = list(shards_of(sizes, [dtype.itemsize for dtype in dtypes], ranks, bucket_bytes))
        self._running: dict[Range, RunningSum] = {}
        self.used: set[int] = set()
        """Numbers of the arrays that any rank has added to."""

    @property
    def num_apart(self) -> int:
        """The number of elements of this rank's shards that float64 numbers cannot hold."""
        return sum(running.num_apart for running in self._running.values())

    @property
    def num_elements(self) -> int:
        """The number of elements that this rank holds sums of."""
        return sum(running.size for running in self._running.values())

    def clear(self) -> None:
        """Resets the sums and keeps the memory."""
        for running in self._running.values():
            running.clear()
        self.used = set()

    def add(
        self,
        call: GroupCall,
        arrays: Mapping[int, NDArray[Any]],
        held: Sequence[Sequence[int]],
        weights: Sequence[int],
    ) -> int:
        """Adds the arrays of all ranks, times a weight of each rank, once they have told each other these.

        Args:
            arrays: what this rank has, by number.
            held: the numbers of the arrays of each rank.
            weights: the weight of each rank.

        Returns:
            The bytes that this rank has sent.
        """
        rank, sent = call.group.rank, 0
        own = {number: array.view(np.uint8) for number, array in arrays.items()}
        having = [{*numbers} if weight else set() for numbers, weight in zip(held, weights, strict=True)]
        self.used |= set().union(*having)
        for shards in self._buckets:
            received: dict[int, Bytes] = {}
            sends: list[Message] = []
            for peer in call.others():
                going = [self._bytes_of(own[r.number], r) for r in shards[peer] if r.number in having[rank]]
                if going:
                    sends.append(Message(peer, joined(going)))
                coming = sum(self._num_bytes(r) for r in shards[rank] if r.number in having[peer])
                if coming:
                    received[peer] = receive_buffer(call.group.members[peer], [coming], np.uint8)
            call.exchange(sends, [Message(peer, memory) for peer, memory in received.items()])
            sent += sum(message.memory.nbytes for message in sends)
            self._add_shard(shards[rank], own, received, having, weights, rank)
        return sent

    def write(self, call: GroupCall, outs: Mapping[int, NDArray[Any]], divisor: Fraction) -> int:
        """Writes the sums over a divisor, each rounded once, on all ranks; returns the bytes sent."""
        gathered_json(call, len(outs))  # all hear of all, also those that no shard comes from
        rank, sent = call.group.rank, 0
        memory = {number: out.view(np.uint8) for number, out in outs.items()}
        for shards in self._buckets:
            used = [[each for each in shard if each.number in self.used] for shard in shards]
            write_own(
                [
                    RoundedSum(self._running[each], outs[each.number][each.start : each.stop], divisor)
                    for each in used[rank]
                ]
            )
            places = [[self._bytes_of(memory[each.number], each) for each in shard] for shard in used]
            going = [Message(peer, joined(places[rank])) for peer in call.others() if places[rank]]
            coming = {
                peer: np.empty(sum(place.nbytes for place in places[peer]), np.uint8)
                for peer in call.others()
                if places[peer]
            }
            call.exchange(going, [Message(peer, packed) for peer, packed in coming.items()])
            sent += sum(message.memory.nbytes for message in going)
            for peer, packed in coming.items():
                at = 0
                for place in places[peer]:
                    place[:] = packed[at : at + place.nbytes]
                    at += place.nbytes
        return sent

    def _add_shard(
        self,
        shard: Sequence[Range],
        own: Mapping[int, Bytes],
        received: Mapping[int, Bytes],
        having: Sequence[set[int]],
        weights: Sequence[int],
        rank: int,
    ) -> None:
        tasks: list[tuple[RunningSum, Sequence[NDArray[Any]], Sequence[float]]] = []
        at = dict.fromkeys(received, 0)
        for each in shard:
            inputs: list[NDArray[Any]] = []
            factors: list[float] = []
            for peer, numbers in enumerate(having):
                if each.number not in numbers:
                    continue
                if peer == rank:
                    part = self._bytes_of(own[each.number], each)
                else:
                    part = received[peer][at[peer] : at[peer] + self._num_bytes(each)]
                    at[peer] += part.nbytes
                inputs.append(part.view(self._dtypes[each.number]))
                factors.append(float(weights[peer]))
            if inputs:
                if each not in self._running:
                    self._running[each] = RunningSum(
                        each.stop - each.start, self._dtypes[each.number], "exact"
                    )
                tasks.append((self._running[each], inputs, factors))
        add_all(tasks)

    def _num_bytes(self, each: Range) -> int:
        return (each.stop - each.start) * self._dtypes[each.number].itemsize

    def _bytes_of(self, array: Bytes, each: Range) -> Bytes:
        width = self._dtypes[each.number].itemsize
        return array[each.start * width : each.stop * width]

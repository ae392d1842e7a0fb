"""Exact sums of all ranks of a group, added without rounding and rounded once, a bucket at a time.

Ranks hold sums of their own until the end, or shards of one sum, to which arrays are added as they come.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.kernels.host.running_sum import RunningSum, add_all, write_all
from crossdevice.process_groups.group_call import GroupCall, receive_buffer
from crossdevice.process_groups.protocol import Message

BUCKET_BYTES = 16 << 20
"""Parts of a sum that each rank has on its way at once, of all shards together."""

LONE_BYTES = 64 << 10
"""Ranges of at least this many bytes are sent from where they are; smaller ones are packed."""

Bytes = NDArray[np.uint8]


class Range(NamedTuple):
    """Elements of one sum."""

    number: int
    start: int
    stop: int


class RoundedSum(NamedTuple):
    """A sum of this rank, the array for the result of all ranks, and the divisor."""

    running: RunningSum
    out: NDArray[Any]
    divisor: Fraction


def shards_of(sizes: Sequence[int], element_bytes: Sequence[int], ranks: int, bucket_bytes: int) -> Shards:
    """Cuts arrays, one after the other, into buckets, and each bucket into a shard for every rank.

    >>> first, second = shards_of([5, 2], [8, 8], 2, 48)
    >>> first[1]
    [Range(number=0, start=3, stop=5), Range(number=1, start=0, stop=1)]
    >>> second
    [[Range(number=1, start=1, stop=2)], []]
    """
    waiting = [Range(number, 0, size) for number, size in enumerate(sizes) if size]
    for bucket in _cut(waiting, element_bytes, bucket_bytes):
        total = sum((each.stop - each.start) * element_bytes[each.number] for each in bucket)
        largest = max(element_bytes[each.number] for each in bucket)
        shards = list(_cut(bucket, element_bytes, -(-total // ranks // largest) * largest))
        while len(shards) > ranks:  # what rounding has left over
            shards[-2:] = [shards[-2] + shards[-1]]
        yield shards + [[] for _ in range(ranks - len(shards))]


Shards = Iterator[list[list[Range]]]


def _cut(ranges: Sequence[Range], element_bytes: Sequence[int], most_bytes: int) -> Iterator[list[Range]]:
    """Cuts consecutive ranges into groups of at most this many bytes, and at least one element each."""
    group: list[Range] = []
    left = most_bytes
    for number, start, stop in ranges:
        while start < stop:
            fitting = left // element_bytes[number]
            if not fitting and group:
                yield group
                group, left = [], most_bytes
                continue
            end = min(start + max(fitting, 1), stop)
            group.append(Range(number, start, end))
            left -= (end - start) * element_bytes[number]
            start = end
    if group:
        yield group


def gathered_json(call: GroupCall, facts: Any) -> list[Any]:
    """Gathers one JSON value from every rank, in rank order."""
    return [json.loads(text) for text in call.all_gather_uneven(json.dumps(facts).encode())]


def write_totals(call: GroupCall, sums: Sequence[RoundedSum], bucket_bytes: int | None = None) -> int:
    """Writes the sums of all ranks, each over its divisor and rounded once; all ranks call it alike.

    Every rank adds up one shard of each bucket, of parts that others send it, and sends what it has rounded
    to them. Own sums stay as they are.

    Returns:
        The bytes that this rank has sent.
    """
    size, rank = call.group.size, call.group.rank
    if size == 1:
        write_own(sums)
        return 0
    apart = gathered_json(call, [_described_fractions(each.running) for each in sums])
    # Where a rank has more parts than others, all of them send as many.
    parts = [max(facts[number]["parts"] for facts in apart) for number in range(len(sums))]
    for each, wanted in zip(sums, parts, strict=True):
        while len(each.running.parts) < wanted:
            each.running.widen()
    fractions = [
        [_read_fractions(facts[number]) for peer, facts in enumerate(apart) if peer != rank]
        for number in range(len(sums))
    ]
    widths = [8 * wanted for wanted in parts]
    outs = [each.out.view(np.uint8) for each in sums]
    item_bytes = [each.out.itemsize for each in sums]
    sent = 0
    rounded: list[list[Range]] | None = None  # the shards of the bucket before
    buckets = shards_of([each.running.size for each in sums], widths, size, bucket_bytes or BUCKET_BYTES)
    for shards in itertools.chain(buckets, [None]):
        sends: list[Message] = []
        receives: list[Message] = []
        received: dict[int, NDArray[np.float64]] = {}
        unpacked: list[tuple[Bytes, list[Bytes]]] = []
        for peer in call.others():
            if shards is not None:
                going = [
                    part
                    for each in shards[peer]
                    for part in sums[each.number].running.travelling_parts(*each[1:])
                ]
                sends += [Message(peer, memory) for memory in _packed(going)]
                length = sum((each.stop - each.start) * parts[each.number] for each in shards[rank])
                received[peer] = receive_buffer(call.group.members[peer], [length], np.float64)
                lengths = [e.stop - e.start for e in shards[rank] for _ in range(parts[e.number])]
                receives += [
                    Message(peer, memory) for memory in _packed_like(received[peer], [8 * n for n in lengths])
                ]
            if rounded is not None:
                own = [_bytes_of(outs, item_bytes, each) for each in rounded[rank]]
                sends += [Message(peer, memory) for memory in _packed(own)]
                theirs = [_bytes_of(outs, item_bytes, each) for each in rounded[peer]]
                if _are_packed([memory.nbytes for memory in theirs]):
                    packed = np.empty(sum(memory.nbytes for memory in theirs), np.uint8)
                    receives.append(Message(peer, packed))
                    unpacked.append((packed, theirs))
                else:
                    receives += [Message(peer, memory) for memory in theirs]
        sent += sum(message.memory.nbytes for message in sends)
        call.exchange(sends, receives)
        for packed, places in unpacked:
            _unpack(packed, places)
        if shards is not None:
            _total_shard(shards[rank], sums, parts, list(received.values()), fractions)
        rounded = shards
    return sent


def _total_shard(
    shard: Sequence[Range],
    sums: Sequence[RoundedSum],
    parts: Sequence[int],
    received: Sequence[NDArray[np.float64]],
    fractions: Sequence[Sequence[Mapping[int, Fraction]]],
) -> None:
    """Adds the received parts of a shard to a copy of this rank's own, and rounds it into `out`."""
    tasks: list[tuple[RunningSum, Sequence[NDArray[Any]], Sequence[float]]] = []
    writes: list[RoundedSum] = []
    at = 0
    for number, start, stop in shard:
        length = stop - start
        total = sums[number].running.copy_of(start, stop)
        inputs: list[NDArray[Any]] = []
        for theirs in received:
            first = at
            held = [
                theirs[first + part * length : first + (part + 1) * length] for part in range(parts[number])
            ]
            for rest in held[1:]:
                np.copyto(rest, -0.0, where=rest == 0)  # so that a sum of -0.0 stays that
            inputs += held
        at += parts[number] * length
        tasks.append((total, inputs, [1.0] * len(inputs)))
        writes.append(RoundedSum(total, sums[number].out[start:stop], sums[number].divisor))
    add_all(tasks)
    for (total, _, _), (number, start, stop) in zip(tasks, shard, strict=True):
        for found in fractions[number]:
            for element, fraction in found.items():
                if start <= element < stop:
                    total.fractions[element - start] = (
                        total.fractions.get(element - start, Fraction(0)) + fraction
                    )
    write_own(writes)


def write_own(sums: Sequence[RoundedSum]) -> None:
    """Writes the sums of this rank alone, each over its divisor and rounded once."""
    by_divisor: dict[Fraction, list[tuple[RunningSum, NDArray[Any]]]] = {}
    for running, out, divisor in sums:
        by_divisor.setdefault(divisor, []).append((running, out))
    for divisor, tasks in by_divisor.items():
        write_all(tasks, divisor)


def _described_fractions(running: RunningSum) -> dict[str, Any]:
    """Describes the exact remainders as JSON; denominators are powers of two, as for all floats."""
    rows = [
        [element, hex(fraction.numerator), fraction.denominator.bit_length() - 1]
        for element, fraction in running.fractions.items()
    ]
    return {"parts": len(running.parts), "fractions": rows}


def _read_fractions(facts: Mapping[str, Any]) -> dict[int, Fraction]:
    return {
        element: Fraction(int(numerator, 16), 1 << exponent)
        for element, numerator, exponent in facts["fractions"]
    }


def _bytes_of(arrays: Sequence[Bytes] | Mapping[int, Bytes], item_bytes: Sequence[int], part: Range) -> Bytes:
    width = item_bytes[part.number]
    return arrays[part.number][part.start * width : part.stop * width]


def _are_packed(lengths: Sequence[int]) -> bool:
    """Returns True if this many pieces travel as one message."""
    return len(lengths) > 1 and sum(lengths) < LONE_BYTES * len(lengths)


def joined(pieces: Sequence[Bytes]) -> Bytes:
    """Joins pieces into one message; a single piece is sent without a copy."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _packed(pieces: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    if _are_packed([piece.nbytes for piece in pieces]):
        return [np.concatenate(pieces)]
    return list(pieces)


def _unpack(packed: Bytes, places: Sequence[Bytes]) -> None:
    at = 0
    for place in places:
        place[:] = packed[at : at + place.nbytes]
        at += place.nbytes


def _packed_like(memory: NDArray[np.float64], lengths: Sequence[int]) -> list[NDArray[Any]]:
    """Splits memory into the messages that `_packed` makes of pieces of these sizes."""
    if _are_packed(lengths) or not lengths:
        return [memory] if lengths else []
    ends = list(itertools.accumulate(length // 8 for length in lengths))
    return [memory[end - length // 8 : end] for end, length in zip(ends, lengths, strict=True)]


class ShardedSums:
    """Sums of flat arrays, each rank with its shard of every bucket; all ranks call all methods alike."""

    def __init__(
        self, sizes: Sequence[int], dtypes: Sequence[np.dtype[Any]], ranks: int, bucket_bytes: int
    ) -> None:
        self._dtypes = dtypes
        self._item_bytes = [dtype.itemsize for dtype in dtypes]
        self._buckets = list(shards_of(sizes, self._item_bytes, ranks, bucket_bytes))
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
                going = [
                    _bytes_of(own, self._item_bytes, r) for r in shards[peer] if r.number in having[rank]
                ]
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
            places = [[_bytes_of(memory, self._item_bytes, each) for each in shard] for shard in used]
            going = [Message(peer, joined(places[rank])) for peer in call.others() if places[rank]]
            coming = {
                peer: np.empty(sum(place.nbytes for place in places[peer]), np.uint8)
                for peer in call.others()
                if places[peer]
            }
            call.exchange(going, [Message(peer, packed) for peer, packed in coming.items()])
            sent += sum(message.memory.nbytes for message in going)
            for peer, packed in coming.items():
                _unpack(packed, places[peer])
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
                    part = _bytes_of(own, self._item_bytes, each)
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
        return (each.stop - each.start) * self._item_bytes[each.number]

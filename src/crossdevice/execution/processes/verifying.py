"""Collectives between processes that are checked from end to end, so that no flipped bit goes unnoticed.

What is sent is digested before it is handed over, and what has arrived is compared with that; results are
compared with those of the rank that combined them; wrapping sums of integers are checked by sums that are
linear in them, and a part of every result is computed again by the reference kernel.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import dtype_named
from crossdevice.errors import CorruptionError
from crossdevice.execution.fingerprints import fingerprint
from crossdevice.kernels.host.check_sums import check_sums, row_columns, zero_columns
from crossdevice.kernels.host.fingerprint_pass import FINGERPRINT, RowSums, pieces_of, sums_of
from crossdevice.kernels.host.reference.numpy_pass import numpy_pass
from crossdevice.kernels.host.summed_pass import Summed, zero_sums
from crossdevice.kernels.position_keys import Words
from crossdevice.plans.tasks import Buffer, ReducedLeaf, Ref, Task, TaskPlan
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.process_groups.protocol import Message
from crossdevice.values.disagreement import differing_leaves
from crossdevice.values.dtypes import INTEGERS, ITEM_BYTES
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights

Flat = NDArray[Any]

SAMPLED = 1024
"""One element of so many is computed again by the reference kernel."""

RUN_ELEMENTS = 256
"""Sampled elements are next to each other in runs: kernels compute vectors, and so much is read at once."""

WHOLE_ELEMENTS = 1 << 12
"""Up to here, all elements of a leaf are computed again."""

CHECK_BYTES = 8

MAX_COMPLAINTS = 4


class Exchanged(NamedTuple):
    """One message: in which exchange of which leaf, and the digest of its bytes."""

    where: str
    digest: str


class Shard(NamedTuple):
    """The elements `start` to `stop` of a leaf, combined by one rank."""

    start: int
    stop: int
    worker: int

    def named(self, path: str) -> str:
        """Names it in an error."""
        return f"{path or 'the result'}[{self.start}:{self.stop}], combined by rank {self.worker},"


class OwnResult(NamedTuple):
    """Elements of a leaf's result that this rank has got, from `start` on."""

    start: int
    flat: Flat


class _SumsOf:
    """Sums of one shard that transports add up while they have it in a cache, and bytes they had so far."""

    def __init__(self, shard: Shard, item_bytes: int, sums: Flat, kind: RowSums) -> None:
        self._start, self._item_bytes, self._kind = shard.start, item_bytes, kind
        self._sums, self._num_bytes = sums, 0

    def with_more(self, start: int, array: Flat) -> Summed:
        """Returns a range from this element on, to be added."""
        self._num_bytes += array.nbytes
        offset = (start - self._start) * self._item_bytes
        return Summed(array, self._sums, offset, self._kind)

    def clear(self) -> None:
        """Sets them to 0, for the same ranges in another call."""
        self._sums[:] = 0

    def of(self, arrays: Sequence[Flat]) -> Flat:
        """Returns the sums of these arrays; adds them up now unless that is done."""
        if self._num_bytes != sum([array.nbytes for array in arrays]):
            self._sums[:] = 0
            for array in arrays:
                Summed(array, self._sums, 0, self._kind).add()
        return self._sums


_SharedKey = tuple[Buffer, tuple[int, ...]]
"""What goes through shared memory: an array of one rank, and who reads it."""


class LeafSums(NamedTuple):
    """Sums that transports add up for a leaf, in places that stay the same if they are used again.

    Of its shards: results, and of integers that wrap all arrays; of shared memory: what is shown and seen.
    """

    shards: Sequence[Shard]
    results: Sequence[_SumsOf]
    brought: Sequence[_SumsOf]
    made: Sequence[_SumsOf]
    shown: dict[_SharedKey, Words]
    seen: dict[_SharedKey, Words]

    def clear(self) -> None:
        """Sets all to the sums of nothing."""
        for of_shard in itertools.chain(self.results, self.brought, self.made):
            of_shard.clear()
        for sums in itertools.chain(self.shown.values(), self.seen.values()):
            sums[:] = 0


class Verification:
    """Record of one call of this rank: bytes sent, bytes received, results, and what was wrong."""

    def __init__(self, call: GroupCall) -> None:
        self._call = call
        self.leaf = ""
        """The leaf whose messages are about to be exchanged."""
        self._sent: dict[int, list[Exchanged]] = {}
        self._received: dict[int, list[Exchanged]] = {}
        self._results: dict[str, tuple[int | None, str]] = {}
        """By what they are: the rank that has combined them, if it was one, and their digest."""
        self._complaints: list[str] = []
        self.sums = LeafSums((), (), (), (), {}, {})
        """Those of the leaf that is being reduced, or of what is being copied."""
        self._adds_up = False
        call.hops = self

    def begin_leaf(self, path: str, leaf: ReducedLeaf, plan: TaskPlan) -> None:
        """Prepares for a leaf, which is about to be reduced."""
        self.leaf = path or "the value"
        shards = _shards(plan)
        is_sum = leaf.of_ranks.op is ReduceOp.SUM and leaf.of_ranks.divisor is None
        is_wrapping = is_sum and leaf.of_ranks.weights is None and leaf.dtype == leaf.result in INTEGERS
        result, dtype = ITEM_BYTES[leaf.result], ITEM_BYTES[leaf.dtype]

        def columns() -> list[_SumsOf]:
            if not is_wrapping:
                return []
            kind = row_columns(dtype)
            return [_SumsOf(shard, dtype, zero_columns(dtype), kind) for shard in shards]

        results = [_SumsOf(shard, result, zero_sums(), FINGERPRINT) for shard in shards]
        self.sums = LeafSums(shards, results, columns(), columns(), {}, {})
        self._adds_up = not plan.are_combined_by_all

    def of_input(self, ref: Ref, array: Flat) -> list[Summed]:
        """Returns what is to be added up of a range of a replica's array, once, while it is in a cache."""
        return self._more(self.sums.brought, ref.start, array)

    def of_result(self, task: Task, array: Flat) -> list[Summed]:
        """Returns the same of a range of the result, which this task has made."""
        sums, start = self.sums, task.inputs[0].start
        own = sums.made if task.worker == self._call.group.rank else ()
        return self._more(sums.results, start, array) + self._more(own, start, array)

    def _more(self, of_shards: Sequence[_SumsOf], start: int, array: Flat) -> list[Summed]:
        if not of_shards or not array.size or not self._adds_up:
            return []
        number = bisect.bisect(self.sums.shards, start, key=lambda shard: shard.start) - 1
        return [of_shards[number].with_more(start, array)]

    def note_sent(self, messages: Sequence[Message]) -> None:
        """Digests what is about to be handed over."""
        self._note(self._sent, messages)

    def note_received(self, messages: Sequence[Message]) -> None:
        """Digests what has arrived."""
        self._note(self._received, messages)

    def sums_shown(self, buffer: Buffer, peers: tuple[int, ...]) -> Words:
        """Returns the sums of all that just these peers read of an array in this rank's window."""
        return self.sums.shown.setdefault((buffer, peers), zero_sums())

    def sums_seen(self, buffer: Buffer) -> Words:
        """Returns the sums of all that this rank reads of an array in the window of its rank."""
        return self.sums.seen.setdefault((buffer, (buffer.rank,)), zero_sums())

    def note_shared(self) -> None:
        """Notes what has gone through shared memory since the last time, all rounds of an array in one."""
        self._note_sums(self._sent, self.sums.shown)
        self._note_sums(self._received, self.sums.seen)
        self.sums = self.sums._replace(shown={}, seen={})

    def _note(self, noted: dict[int, list[Exchanged]], messages: Sequence[Message]) -> None:
        digests: dict[int, str] = {}  # what goes to several ranks is read once
        for _, memory in messages:
            if id(memory) not in digests:
                digests[id(memory)] = _digest(memory)
        where = f"exchange {self._call.num_exchanges}" + (f" of {self.leaf}" if self.leaf else "")
        for peer, memory in messages:
            noted.setdefault(peer, []).append(Exchanged(where, digests[id(memory)]))

    def _note_sums(self, noted: dict[int, list[Exchanged]], sums: Mapping[_SharedKey, Words]) -> None:
        totals: dict[tuple[Buffer, int], Words] = {}
        for (buffer, peers), own in sums.items():
            for peer in peers:
                key = buffer, peer
                totals[key] = totals[key] + own if key in totals else own
        where = f"shared memory of {self.leaf}" if self.leaf else "shared memory"
        for buffer, peer in sorted(totals):
            noted.setdefault(peer, []).append(Exchanged(where, _hex(totals[buffer, peer])))

    def check_leaf(
        self,
        path: str,
        leaf: ReducedLeaf,
        views: Sequence[Flat],
        own: Sequence[OwnResult],
        weights: Weights | None,
    ) -> None:
        """Computes a part of a leaf's result again, of integers that wrap check sums of all of it.

        Args:
            views: the replicas of this rank.
            own: what this rank has got of the result: all of it, or the parts of its replicas.
        """
        self.leaf = f"the check of {path or 'the value'}"
        shards = self.sums.shards
        if self.sums.brought and weights is None:
            for shard in self._wrong_sums(self.sums, views, own):
                self._complaints.append(f"{shard.named(path)} is not the sum of what ranks have brought")
        places = _sampled(leaf.length, self._call.number)
        if not places.size:
            return
        expected = self._computed_again(leaf, [view[places] for view in views], weights)
        for start, result in own:
            here = slice(*np.searchsorted(places, [start, start + result.size]).tolist())
            if here.start == here.stop:
                continue
            different = np.flatnonzero(~_same(result[places[here] - start], expected[here]))
            if different.size:
                element = int(places[here][different[0]])
                ranks = [shard.worker for shard in shards if shard.start <= element < shard.stop]
                by = self._call.group.rank if self._call.group.rank in ranks else ranks[0]
                self._complaints.append(
                    f"element {element} of {path or 'the result'}, combined by rank {by}, is not what the "
                    "reference kernel gives"
                )

    def _wrong_sums(self, sums: LeafSums, views: Sequence[Flat], own: Sequence[OwnResult]) -> Iterator[Shard]:
        """Yields the shards whose elements are not the sums of those of all ranks."""
        brought = np.array(
            [
                check_sums(each.of([view[shard.start : shard.stop] for view in views]))
                for shard, each in zip(sums.shards, sums.brought, strict=True)
            ]
        )
        of_ranks = [
            np.frombuffer(record, brought.dtype) for record in self._call.all_gather(brought.tobytes())
        ]
        total = np.sum(of_ranks, axis=0, dtype=brought.dtype).reshape(brought.shape)
        for shard, made, expected in zip(sums.shards, sums.made, total, strict=True):
            for start, result in own if shard.worker == self._call.group.rank else ():
                if start <= shard.start and shard.stop <= start + result.size:
                    part = result[shard.start - start : shard.stop - start]
                    if (check_sums(made.of([part])) != expected).any():
                        yield shard

    def _computed_again(self, leaf: ReducedLeaf, views: Sequence[Flat], weights: Weights | None) -> Flat:
        """Computes some elements of all ranks again, by the reference."""
        travelling = dtype_named(leaf.travelling)
        own = [np.ascontiguousarray(view) for view in views]
        if leaf.partial is not None:
            partial = np.empty(own[0].size, travelling)
            numpy_pass(own, [partial], leaf.of_replicas)
            own = [partial]
        size = views[0].size
        arrays = [
            own if rank == self._call.group.rank else [np.empty(size, travelling) for _ in range(count)]
            for rank, count in enumerate(map(leaf.num_arrays, range(len(leaf.counts))))
        ]
        self._call.all_gather_into(arrays)
        expected = np.empty(size, dtype_named(leaf.result))
        with np.errstate(all="ignore"):
            numpy_pass(
                list(itertools.chain.from_iterable(arrays)),
                [expected],
                leaf.of_ranks.with_weights(weights),
            )
        return expected

    def note_results(
        self, path: str, plan: TaskPlan, own: Sequence[OwnResult], copies: Sequence[Any]
    ) -> None:
        """Digests the result of an all-reduce, by the ranks that have combined it.

        Args:
            own: all of it, as this rank has got it.
            copies: the arrays of all its destinations.
        """
        ((_, result),) = own
        for shard, sums in zip(self.sums.shards, self.sums.results, strict=True):
            key = f"{path or 'the value'}[{shard.start}:{shard.stop}]"
            worker = None if plan.are_combined_by_all else shard.worker
            self._results[key] = worker, _hex(sums.of([result[shard.start : shard.stop]]))
        if len(copies) > 1 and len({fingerprint(copy).digest for copy in copies}) > 1:
            rank = self._call.group.rank
            self._complaints.append(
                f"{path or 'the value'} is not the same on all destinations of rank {rank}"
            )

    def note_copies(self, arrays: Mapping[str, Flat]) -> None:
        """Digests results that are to be the same on all ranks, which nobody has combined."""
        for path, array in arrays.items():
            self._results[path or "the value"] = None, _digest(array)

    def conclude(self) -> None:
        """Compares all that was noted; raises CorruptionError on all ranks if anything is wrong on any."""
        call, rank = self._call, self._call.group.rank
        call.hops = None
        of_ranks = _records(call, [self._sent, self._results])
        answers: list[Mapping[str, tuple[int | None, str]]] = []
        for peer, record in enumerate(of_ranks):
            if record is None:
                self._complaints.append(f"what rank {peer} noted has changed on its way to rank {rank}")
                continue
            sent, results = record
            answers.append(results)
            for theirs, own in itertools.zip_longest(sent.get(str(rank), ()), self._received.get(peer, ())):
                if theirs is None or own is None or theirs[1] != own[1]:
                    where = (theirs or own)[0]
                    self._complaints.append(f"{where}: what rank {peer} sent is not what rank {rank} has got")
        if len(answers) == len(of_ranks):
            self._compare_results(answers)
        complaints = [
            complaint
            for peer, each in enumerate(_records(call, self._complaints))
            for complaint in (each if each is not None else [f"what rank {peer} found cannot be read"])
        ]
        if complaints:
            raise _corruption(call.what, list(dict.fromkeys(complaints)))

    def _compare_results(self, answers: Sequence[Mapping[str, tuple[int | None, str]]]) -> None:
        """Compares each shard with what its worker has, and what nobody has combined with what most have."""
        rank = self._call.group.rank
        for key, (worker, digest) in self._results.items():
            if worker is not None and tuple(answers[worker].get(key, ())) != (worker, digest):
                self._complaints.append(f"{key}: what rank {worker} combined is not what rank {rank} has got")
        alike = [
            {key: digest for key, (worker, digest) in each.items() if worker is None} for each in answers
        ]
        found = differing_leaves(alike, self._call.group.members)
        if found is not None:
            self._complaints.append(f"results are not the same on all ranks: {found}")


@contextlib.contextmanager
def verified_copies(call: GroupCall) -> Iterator[Verification]:
    """Checks what the block copies."""
    verification = Verification(call)
    yield verification
    verification.conclude()


def check_written(path: str, out: Sequence[Any], results: Sequence[Any]) -> None:
    """Compares arrays of `out` with the results that were just written to them."""
    if [fingerprint(each).digest for each in out] != [fingerprint(each).digest for each in results]:
        raise CorruptionError(
            f"{path or 'the value'} in `out` is not the result that was written to it, which is right and "
            "which all other ranks have"
        )


def _corruption(what: str, complaints: Sequence[str]) -> CorruptionError:
    few = "; ".join(complaints[:MAX_COMPLAINTS])
    more = f"; and {len(complaints) - MAX_COMPLAINTS} more" if len(complaints) > MAX_COMPLAINTS else ""
    error = CorruptionError(
        f"{what} was corrupted: {few}{more}. Its inputs are as they were, and the call can be repeated; "
        "do not use what is in `out`"
    )
    error.is_on_all_ranks = True
    return error


def _records(call: GroupCall, record: Any) -> list[Any]:
    """Reads the record of every rank; None for one that has changed on its way."""
    text = json.dumps(record).encode()
    check = hashlib.blake2b(text, digest_size=CHECK_BYTES).digest()
    found = call.all_gather_uneven(check + text)
    return [_read(each) for each in found]


def _read(record: bytes) -> Any:
    check, text = record[:CHECK_BYTES], record[CHECK_BYTES:]
    if hashlib.blake2b(text, digest_size=CHECK_BYTES).digest() != check:
        return None
    return json.loads(text)


def _digest(memory: Flat) -> str:
    return _hex(sums_of(pieces_of(0, memory), 1))


def _hex(sums: Words) -> str:
    return sums.tobytes().hex()


def _sampled(size: int, seed: int) -> NDArray[np.int64]:
    """The places of the elements that are computed again: the same on all ranks, others in every call."""
    if size <= WHOLE_ELEMENTS:
        return np.arange(size)
    random = np.random.default_rng([seed, size])
    starts = np.sort(random.integers(0, size - RUN_ELEMENTS + 1, -(-size // (SAMPLED * RUN_ELEMENTS))))
    return (starts[:, None] + np.arange(RUN_ELEMENTS)).reshape(-1)


def _same(found: Flat, expected: Flat) -> NDArray[np.bool_]:
    """Marks where bits agree; any two NaNs agree, since the reference makes other payloads."""
    unsigned = np.dtype(f"u{min(found.dtype.itemsize, 8)}")
    same = (found.view(unsigned) == expected.view(unsigned)).reshape(found.size, -1).all(axis=1)
    with np.errstate(all="ignore"):
        both = np.stack([found, expected]) if found.dtype.kind not in "iub" else None
        if both is not None:
            same |= (both != both).all(axis=0)
    return np.asarray(same, np.bool_)


def _shards(plan: TaskPlan) -> list[Shard]:
    """The ranges of the only leaf, with those who combine them; the same on all ranks."""
    ranges = [(task.inputs[0], task.worker) for task in plan.results if task.inputs and task.length]
    return sorted(Shard(ref.start, ref.stop, worker) for ref, worker in ranges)

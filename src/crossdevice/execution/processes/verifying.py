"""Reductions between processes that are checked from end to end, so that no flipped bit goes unnoticed.

What is sent is digested before it is handed over, and what has arrived is compared with that; results are
compared between all ranks; wrapping sums of integers are checked by a sum that is linear in them, and a part
of everything else is computed again by the reference kernel from what all ranks bring.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import dtype_named
from crossdevice.errors import CorruptionError
from crossdevice.execution.fingerprints import fingerprint
from crossdevice.kernels.host.fingerprint_pass import pieces_of, sums_of
from crossdevice.kernels.host.reference.numpy_pass import numpy_pass
from crossdevice.kernels.position_keys import splitmix64
from crossdevice.plans.reduced_leaf import ReducedLeaf
from crossdevice.plans.tasks import TaskPlan
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.process_groups.protocol import Message
from crossdevice.values.disagreement import differing_leaves
from crossdevice.values.dtypes import INTEGERS
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights

Flat = NDArray[Any]

SAMPLED = 256
"""One element of so many is computed again by the reference kernel."""

RUN_ELEMENTS = 64
"""Sampled elements are next to each other in runs: kernels compute vectors, and so much is read at once."""

WHOLE_ELEMENTS = 1 << 12
"""Up to here, all elements of a leaf are computed again."""

NUM_KEYS = 8
"""Sums of integers of 8 bits with as many keys have 64 bits."""

KEY_PERIOD = 1 << 16

CHECK_BYTES = 8

MAX_COMPLAINTS = 4


class Exchanged(NamedTuple):
    """One message: in which exchange of which leaf, and the digest of its bytes."""

    where: str
    digest: str


class Verification:
    """Record of one call of this rank: bytes sent, bytes received, and what was wrong."""

    def __init__(self, call: GroupCall) -> None:
        self._call = call
        self.leaf = ""
        """The leaf whose messages are about to be exchanged."""
        self._sent: dict[int, list[Exchanged]] = {}
        self._received: dict[int, list[Exchanged]] = {}
        self._complaints: list[str] = []
        call.hops = self

    def note_sent(self, messages: Sequence[Message]) -> None:
        """Digests what is about to be handed over."""
        self._note(self._sent, messages)

    def note_received(self, messages: Sequence[Message]) -> None:
        """Digests what has arrived."""
        self._note(self._received, messages)

    def _note(self, noted: dict[int, list[Exchanged]], messages: Sequence[Message]) -> None:
        where = f"exchange {self._call.num_exchanges}" + (f" of {self.leaf}" if self.leaf else "")
        for peer, memory in messages:
            noted.setdefault(peer, []).append(Exchanged(where, _digest(memory)))

    def check_leaf(
        self,
        path: str,
        leaf: ReducedLeaf,
        plan: TaskPlan,
        views: Sequence[Flat],
        result: Flat,
        op: ReduceOp,
        weights: Weights | None,
    ) -> None:
        """Computes a part of a leaf's result again, of integers that wrap a check sum of all of it."""
        self.leaf = f"the check of {path or 'the value'}"
        is_wrapping = op is ReduceOp.SUM and leaf.of_ranks.divisor is None
        if is_wrapping and weights is None and leaf.dtype in INTEGERS and leaf.dtype == leaf.result:
            wrong = self._has_wrong_sum(views, result)
            if wrong:
                self._complaints.append(f"{path or 'the result'} is not the sum of what ranks have brought")
            return
        places = _sampled(leaf.length, self._call.number)
        if not places.size:
            return
        expected = self._computed_again(leaf, [view[places] for view in views], weights)
        different = np.flatnonzero(~_same(result[places], expected))
        if different.size:
            element = int(places[different[0]])
            ranks = {
                task.worker
                for task in plan.results
                for ref in task.outputs
                if ref.start <= element < ref.stop
            }
            by = f", combined by rank {min(ranks)}," if not plan.are_combined_by_all else ""
            self._complaints.append(
                f"element {element} of {path or 'the result'}{by} is not what the reference kernel gives"
            )

    def _has_wrong_sum(self, views: Sequence[Flat], result: Flat) -> bool:
        unsigned = np.dtype(f"u{result.dtype.itemsize}")
        own = sum((_checksum(view.view(unsigned)) for view in views), np.zeros(NUM_KEYS, unsigned))
        of_ranks = [np.frombuffer(record, unsigned) for record in self._call.all_gather(own.tobytes())]
        total = np.sum(of_ranks, axis=0, dtype=unsigned)
        return bool((total != _checksum(result.view(unsigned))).any())

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

    def conclude(self, results: Mapping[str, Sequence[Any]]) -> None:
        """Compares all that was noted; raises CorruptionError on all ranks if anything is wrong on any.

        Args:
            results: those of each leaf, by its path, on the destinations of this rank.
        """
        call, rank = self._call, self._call.group.rank
        call.hops = None
        leaves = {path: _digest_of_all(found) for path, found in results.items()}
        of_ranks = _records(call, [self._sent, leaves])
        answers: list[Mapping[str, str]] = []
        for peer, record in enumerate(of_ranks):
            if record is None:
                self._complaints.append(f"what rank {peer} noted has changed on its way to rank {rank}")
                continue
            sent, their_leaves = record
            answers.append(their_leaves)
            for theirs, own in itertools.zip_longest(sent.get(str(rank), ()), self._received.get(peer, ())):
                if theirs is None or own is None or theirs[1] != own[1]:
                    where = (theirs or own)[0]
                    self._complaints.append(f"{where}: what rank {peer} sent is not what rank {rank} has got")
        if len(answers) == len(of_ranks):
            found = differing_leaves(answers, call.group.members)
            if found is not None:
                self._complaints.append(f"results are not the same on all ranks: {found}")
        complaints = [
            complaint
            for peer, each in enumerate(_records(call, self._complaints))
            for complaint in (each if each is not None else [f"what rank {peer} found cannot be read"])
        ]
        if complaints:
            raise _corruption(call.what, list(dict.fromkeys(complaints)))


def check_written(path: str, out: Sequence[Any], results: Sequence[Any]) -> None:
    """Compares arrays of `out` with the results that were just written to them."""
    if _digest_of_all(out) != _digest_of_all(results):
        raise CorruptionError(
            f"{path or 'the value'} in `out` is not the result that was written to it, which is right and "
            "which all other ranks have"
        )


def _corruption(what: str, complaints: Sequence[str]) -> CorruptionError:
    few = "; ".join(complaints[:MAX_COMPLAINTS])
    more = f"; and {len(complaints) - MAX_COMPLAINTS} more" if len(complaints) > MAX_COMPLAINTS else ""
    error = CorruptionError(
        f"{what} was corrupted: {few}{more}. Nothing was written to `out`, and the call can be repeated"
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
    return sums_of(pieces_of(0, memory), 1).tobytes().hex()


def _digest_of_all(arrays: Sequence[Any]) -> str:
    """The digest of arrays that should be the same; of all of them if they are not."""
    digests = list(dict.fromkeys(fingerprint(array).digest for array in arrays))
    return " ".join(digests)


def _sampled(size: int, seed: int) -> NDArray[np.int64]:
    """The places of the elements that are computed again: the same on all ranks, others in every call."""
    if size <= WHOLE_ELEMENTS:
        return np.arange(size)
    random = np.random.default_rng([seed, size])
    starts = random.integers(0, size - RUN_ELEMENTS + 1, -(-size // (SAMPLED * RUN_ELEMENTS)))
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


def _checksum(words: Flat) -> Flat:
    """Sums of all elements, each times odd keys of its position: linear, so those of ranks add up."""
    total = np.zeros(NUM_KEYS, words.dtype)
    for block, start in enumerate(range(0, words.size, KEY_PERIOD)):
        part = words[start : start + KEY_PERIOD]
        numbers = np.uint64(block * KEY_PERIOD) + np.arange(part.size, dtype=np.uint64)
        keys = splitmix64(numbers)
        for number in range(NUM_KEYS):
            shifted = (keys >> np.uint64(number * 8)) | np.uint64(1)
            total[number] += np.dot(part, shifted.astype(words.dtype))
    return total

"""Comparison, before any data moves, of what ranks call, and of the tasks and transports they would use."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

import numpy as np

from crossdevice.errors import (
    DtypeError,
    DtypeMismatchError,
    MismatchError,
    OptionError,
    ReduceOpError,
    ShapeMismatchError,
    StructureMismatchError,
)
from crossdevice.execution.reading.values import at
from crossdevice.plans.tasks import Ref, Task, TaskPlan
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.disagreement import disagreement
from crossdevice.values.nesting import spelled_structure
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.quantities import counted
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights, weights_for

DIGEST_BYTES = 16

MAX_KINDS = 1024
"""Kinds of call that a group remembers; a program with more compares them again now and then."""

COMPARING = b"comparing"
"""The signature of calls whose ranks do not know yet whether they agree."""

VARYING = 0
"""In place of a number of replicas: not all leaves have as many."""

OfRanks: TypeAlias = tuple[tuple[int, ...], ...]
"""For each rank the number of its replicas of each leaf."""

Answer = TypeVar("Answer")


class Course(NamedTuple):
    """One rank's choice of transports and tasks for some leaves of a call."""

    transport: str
    leaves: Sequence[int]
    plans: Sequence[TaskPlan]
    """None of the all-reduce of an engine."""

    def __str__(self) -> str:
        return f"{self.transport} for leaves {', '.join(map(str, self.leaves))}"


def compare_once(call: GroupCall, key: Hashable, courses: Callable[[], Sequence[Course]]) -> None:
    """Has ranks compare what they would do, unless they have in such a call: all know alike."""
    compared = call.group.compared_courses
    if key in compared:
        return
    compare_courses(call, courses())
    if len(compared) >= MAX_KINDS:
        compared.clear()
    compared.add(key)


def compare_courses(call: GroupCall, courses: Sequence[Course]) -> None:
    """Raises MismatchError on all ranks if one would use another transport, or has other tasks.

    A rank knows its own tasks, and what those of others do with its arrays, so for each pair of ranks
    the two have the same to say of what they do for each other. If all pairs agree, each digest of a pair is
    there twice, and exclusive or of them all is zero.
    """
    rank = call.group.rank
    transports = "; ".join(map(str, courses))
    of_pairs = _texts_of_pairs(courses, rank)
    digests = [int.from_bytes(_digest(texts), "little") if texts else 0 for texts in of_pairs]
    everything = functools.reduce(operator.xor, digests, 0)
    own = _digest([transports]) + everything.to_bytes(DIGEST_BYTES, "little")
    records = call.all_gather(own)
    numbers = [int.from_bytes(record[DIGEST_BYTES:], "little") for record in records]
    if len({record[:DIGEST_BYTES] for record in records}) > 1 or functools.reduce(operator.xor, numbers):
        digests += [0] * (call.group.size - len(digests))
        _refuse(call, transports, digests, of_pairs)


def _refuse(
    call: GroupCall, transports: str, digests: Sequence[int], of_pairs: Sequence[Sequence[str]]
) -> NoReturn:
    """Asks all ranks what they have, and names the odd one out."""
    group = call.group
    told = [json.loads(text) for text in call.all_gather_uneven(json.dumps([transports, digests]).encode())]
    text = disagreement({rank: each[0] for rank, each in enumerate(told)}, group.members, "has transports")
    if text is None:
        found = [pairs for _, pairs in told]
        ranks = range(group.size)
        wrong = [sum(found[rank][peer] != found[peer][rank] for peer in ranks) for rank in ranks]
        # Who is odd disagrees with the most others; of two, as elsewhere, the first is the usual one.
        odd = max(reversed(ranks), key=wrong.__getitem__)
        usual = next(peer for peer in ranks if found[odd][peer] != found[peer][odd])
        pair = {usual: odd, odd: usual}
        own = of_pairs[pair[group.rank]] if group.rank in pair else []
        texts = [json.loads(each) for each in call.all_gather_uneven(json.dumps(own).encode())]
        first = next(
            both
            for both in itertools.zip_longest(texts[usual], texts[odd], fillvalue="none")
            if both[0] != both[1]
        )
        text = disagreement(dict(zip((usual, odd), first, strict=True)), group.members, "has task")
    difference = MismatchError(f"call {call.number} would not be the same work on all ranks: {text}")
    difference.is_on_all_ranks = True
    raise difference


def _digest(texts: Sequence[str]) -> bytes:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=DIGEST_BYTES).digest()


def _texts_of_pairs(courses: Sequence[Course], rank: int) -> list[list[str]]:
    """For each peer what it and this rank do for each other, in an order in which both of them see it."""
    size = max((plan.size for course in courses for plan in course.plans), default=0)
    found: list[tuple[list[str], list[str]]] = [([], []) for _ in range(size)]
    for course in courses:
        for task in itertools.chain.from_iterable(plan.results for plan in course.plans):
            is_own = task.worker == rank
            for other, text in _texts_of(task, None if is_own else rank).items():
                if other != task.worker:
                    peer = other if is_own else task.worker
                    found[peer][task.worker > other].append(text)
    return [[*lower, *upper] for lower, upper in found]


def _texts_of(task: Task, rank: int | None) -> dict[int, str]:
    """Writes down what a task reads and writes of each rank, or of one."""
    inputs, outputs = map(_texts_by_rank, (task.inputs, task.outputs))
    ranks = {**inputs, **outputs} if rank is None else {rank: ()} if rank in inputs or rank in outputs else {}
    return {
        each: f"rank {task.worker} makes {' '.join(outputs.get(each, ['no result']))} "
        f"of {' '.join(inputs.get(each, ['no array']))} by {task.recipe}"
        for each in ranks
    }


def _texts_by_rank(refs: Sequence[Ref]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for ref in refs:
        text = f"{ref} ({ref.buffer.dtype}, of {ref.buffer.length})"
        found.setdefault(ref.buffer.rank, []).append(text)
    return found


class LeafDescription(NamedTuple):
    """One leaf: what it is ("array", "rows"), its dtype, what must agree of its shape, and of the whole's."""

    path: str
    kind: str
    dtype: str
    shape: tuple[int | None, ...]
    dense_shape: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Description:
    """All that must be the same on every rank for a call to make sense; one structure for each value."""

    operation: str
    structures: tuple[str, ...]
    leaves: tuple[LeafDescription, ...]

    def __post_init__(self) -> None:
        for leaf in self.leaves:
            if leaf.dtype == "object":
                raise DtypeError(
                    f"{self.operation} between processes cannot send dtype object{at(leaf.path)}: its "
                    "elements are Python objects of this process; expected numbers, booleans or strings of "
                    "one length"
                )

    @functools.cached_property
    def text(self) -> str:
        """The description in one line that can be read again."""
        return json.dumps([self.operation, self.structures, self.leaves])

    @functools.cached_property
    def digest(self) -> bytes:
        """A few bytes that stand for it."""
        return hashlib.blake2b(self.text.encode(), digest_size=DIGEST_BYTES).digest()

    @functools.cached_property
    def what(self) -> str:
        """The call, for people."""
        if not self.leaves:
            return f"{self.operation} of nothing"
        path, kind, dtype, shape, _ = self.leaves[0]
        more = f" and {len(self.leaves) - 1} more" if len(self.leaves) > 1 else ""
        rows = " rows" if kind == "rows" else ""
        return f"{self.operation} of {dtype}{rows} {_shape_text(shape)}{f' at {path}' if path else ''}{more}"

    @classmethod
    def read(cls, text: str) -> Description:
        """The description whose text this is."""
        operation, structures, leaves = json.loads(text)
        return cls(
            operation,
            tuple(structures),
            tuple(
                LeafDescription(path, kind, dtype, tuple(shape), None if whole is None else tuple(whole))
                for path, kind, dtype, shape, whole in leaves
            ),
        )


class Agreed(NamedTuple):
    """The number of replicas that each rank has of each leaf, for one kind of call.

    The signature is equal on ranks that know the same: ranks that bring other numbers than at the time
    they compared them do not take each other's bytes.
    """

    counts: tuple[tuple[int, ...], ...]
    signature: bytes

    @classmethod
    def of(cls, description: Description, counts: tuple[tuple[int, ...], ...]) -> Agreed:
        """For a call of that description."""
        text = description.digest + repr(counts).encode()
        return cls(counts, hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest())


@contextmanager
def agreed_call(
    group: ProcessGroup,
    description: Description,
    replicas: tuple[int, ...],
    timeout_seconds: float | None,
    courses: Callable[[GroupCall, tuple[tuple[int, ...], ...]], Sequence[Course]] | None = None,
) -> Iterator[tuple[GroupCall, tuple[tuple[int, ...], ...]]]:
    """The group's next call, once all ranks are known to make it, and each rank's replicas of each leaf.

    Args:
        replicas: how many replicas this rank has of each leaf; other ranks may have more or fewer.
        courses: what this rank would do in a call with these replicas of all ranks, which is compared, too,
            the first time. It may exchange what all ranks exchange there.

    Raises:
        MismatchError: the same on every rank; the group can be used further.
    """
    key = (description.digest, replicas)
    known: Agreed | None = group.agreed.get(key)
    compares = group.checks == "always" or (known is None and group.checks == "new")
    if known is None and len(group.agreed) >= MAX_KINDS:
        group.agreed.clear()  # on all ranks in the same call, so that all compare again
    if known is None and not compares:
        known = group.agreed[key] = Agreed.of(description, (replicas,) * group.size)
    signature = COMPARING if known is None or compares else known.signature
    with group.call(what_is_called(description, replicas), signature, timeout_seconds) as call:
        if known is None or compares:
            if group.checks == "new":
                call.what = f"{call.what[:-1]}, for the first time)"
            counts = _compared(call, description, replicas)
            if courses is not None:
                compare_once(
                    call, (description.digest, counts), refused_by_all()(lambda: courses(call, counts))
                )
            known = group.agreed[key] = Agreed.of(description, counts)
            call.signature = known.signature
            if len(set(known.counts)) > 1:
                group.compare_always()
        yield call, known.counts


class RepeatedCall:
    """A call that ranks make again and again, with other arrays: all that they compare of it.

    Arguments are those of `agreed_call`.
    """

    def __init__(
        self,
        group: ProcessGroup,
        description: Description,
        replicas: tuple[int, ...],
        timeout_seconds: float | None,
        courses: Callable[[GroupCall, OfRanks], Sequence[Course]] | None = None,
    ) -> None:
        self.group, self._seconds = group, timeout_seconds
        self._arguments = (group, description, replicas, timeout_seconds, courses)
        self._key, self._what = (description.digest, replicas), what_is_called(description, replicas)

    def agreed(self) -> AbstractContextManager[tuple[GroupCall, OfRanks]]:
        """The group's next call, for work of which something is known only then."""
        return agreed_call(*self._arguments)

    def make(
        self,
        works: dict[OfRanks, Callable[..., Answer]],
        prepare: Callable[[GroupCall, OfRanks], Callable[..., Answer]],
        *args: Any,
    ) -> Answer:
        """Makes the group's next call: `work(call, *args)`, with the one of `works` for these ranks.

        It is prepared in the first such call, and ranks are asked only if they have to be.
        """
        group = self.group
        known: Agreed | None = None if group.checks == "always" else group.agreed.get(self._key)
        work = None if known is None else works.get(known.counts)
        if known is not None and work is not None:
            return group.make_call(work, self._what, known.signature, self._seconds, *args)
        with self.agreed() as (call, of_ranks):
            work = works.get(of_ranks)
            if work is None:
                work = works[of_ranks] = prepare(call, of_ranks)
            return work(call, *args)


def what_is_called(description: Description, replicas: tuple[int, ...]) -> str:
    """A call and the number of its arrays, for people."""
    return f"{description.what} ({counted(sum(replicas), 'array')})"


def _compared(
    call: GroupCall, description: Description, replicas: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    usual = replicas[0] if len(set(replicas)) == 1 else VARYING
    headers = call.all_gather(description.digest + usual.to_bytes(8, "little"))
    if any(header[:DIGEST_BYTES] != description.digest for header in headers):
        texts = call.all_gather_uneven(description.text.encode())
        descriptions = [Description.read(text.decode()) for text in texts]
        difference = _difference(descriptions, call.group.members, call.number)
        difference.is_on_all_ranks = True
        raise difference
    numbers = [int.from_bytes(header[DIGEST_BYTES:], "little") for header in headers]
    if VARYING not in numbers:
        return tuple((number,) * len(replicas) for number in numbers)
    records = call.all_gather(b"".join(number.to_bytes(8, "little") for number in replicas))
    return tuple(
        tuple(int.from_bytes(record[start : start + 8], "little") for start in range(0, len(record), 8))
        for record in records
    )


def _difference(descriptions: Sequence[Description], members: Sequence[str], number: int) -> MismatchError:
    """The first thing in which calls differ, as an error that names the odd ones out."""
    for verb, error, answers, place in _questions(descriptions):
        text = disagreement(dict(enumerate(answers)), members, verb, place=place)
        if text is not None:
            return error(f"call {number} differs between ranks: {text}")
    return MismatchError(f"call {number} is not the same on all ranks")


def _questions(
    descriptions: Sequence[Description],
) -> Iterator[tuple[str, type[MismatchError], list[str], str]]:
    """Lists what ranks compare, the largest differences first: a verb, the error, the answers, a place."""
    yield "calls", MismatchError, [each.operation for each in descriptions], ""
    values = [f"{counted(len(each.structures), 'value')} in its batch" for each in descriptions]
    yield "has", StructureMismatchError, values, ""
    for entry, structures in enumerate(zip(*(each.structures for each in descriptions), strict=True)):
        place = f" in entry {entry} of the batch" if len(descriptions[0].structures) > 1 else ""
        yield "has", StructureMismatchError, list(structures), place
    for column in zip(*(each.leaves for each in descriptions), strict=False):
        place = f" at {column[0].path}" if column[0].path else ""
        yield "holds", StructureMismatchError, [leaf.kind for leaf in column], place
        yield "has dtype", DtypeMismatchError, [leaf.dtype for leaf in column], place
        yield "has shape", ShapeMismatchError, [_shape_text(leaf.shape) for leaf in column], place
        yield "has dense_shape", ShapeMismatchError, [str(leaf.dense_shape) for leaf in column], place


def _shape_text(shape: Sequence[int | None]) -> str:
    """A shape, with * where any length will do."""
    inside = ", ".join("*" if length is None else str(length) for length in shape)
    return f"({inside},)" if len(shape) == 1 else f"({inside})"


@contextmanager
def refused_by_all() -> Iterator[None]:
    """Around checks of what ranks have agreed on: all raise the same error, and the group can be used on."""
    try:
        yield
    except (OptionError, ReduceOpError) as error:
        refusal = MismatchError(str(error))
        refusal.is_on_all_ranks = True
        raise refusal from None


def structure_text(structure: Any) -> str:
    """A value's structure, as ranks compare it."""
    return "a single array" if structure is None else f"structure {spelled_structure(structure)}"


def seconds_of(options: CommunicationOptions) -> float | None:
    """The deadline of a call; None for that of its group."""
    seconds = options.timeout_seconds
    return seconds if seconds is None or isinstance(seconds, (int, float)) else seconds.total_seconds()


def weights_of_all_ranks(
    call: GroupCall, op: ReduceOp, factors: tuple[float, ...], counts: Sequence[int]
) -> Weights:
    """The weights of all replicas, of which each rank has so many, in the order of ranks."""
    found = np.empty(sum(counts))
    parts, start = [], 0
    for count in counts:
        parts.append([found[start : start + count]])
        start += count
    parts[call.group.rank][0][:] = factors
    call.all_gather_into(parts)
    with refused_by_all():
        return weights_for(tuple(found.tolist()), op)

"""Descriptions of calls that processes compare before any data moves, and how two of them differ."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeAlias, TypeVar

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
from crossdevice.execution.processes.task_agreement import DIGEST_BYTES, Course, compare_once
from crossdevice.execution.reading.values import at
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.disagreement import disagreement
from crossdevice.values.nesting import spelled_structure
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights, weights_for

COMPARING = b"comparing"
"""The signature of calls whose ranks do not know yet whether they agree."""


MAX_KINDS = 1024
"""Kinds of call that a group remembers; a program with more compares them again now and then."""

VARYING = 0
"""In place of a number of replicas: not all leaves have as many."""

OfRanks: TypeAlias = tuple[tuple[int, ...], ...]
"""For each rank the number of its replicas of each leaf."""

Answer = TypeVar("Answer")


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
    return f"{description.what} ({sum(replicas)} array{'' if sum(replicas) == 1 else 's'})"


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
    yield "has", StructureMismatchError, [_values_text(len(each.structures)) for each in descriptions], ""
    for entry, structures in enumerate(zip(*(each.structures for each in descriptions), strict=True)):
        place = f" in entry {entry} of the batch" if len(descriptions[0].structures) > 1 else ""
        yield "has", StructureMismatchError, list(structures), place
    for column in zip(*(each.leaves for each in descriptions), strict=False):
        place = f" at {column[0].path}" if column[0].path else ""
        yield "holds", StructureMismatchError, [leaf.kind for leaf in column], place
        yield "has dtype", DtypeMismatchError, [leaf.dtype for leaf in column], place
        yield "has shape", ShapeMismatchError, [_shape_text(leaf.shape) for leaf in column], place
        yield "has dense_shape", ShapeMismatchError, [str(leaf.dense_shape) for leaf in column], place


def _values_text(number: int) -> str:
    return f"{number} value{'' if number == 1 else 's'} in its batch"


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

"""Comparison, before anything travels, of the tasks and transports that all ranks would use."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, NoReturn

from crossdevice.errors import MismatchError
from crossdevice.plans.tasks import Ref, Task, TaskPlan
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.disagreement import disagreement

DIGEST_BYTES = 16


class Course(NamedTuple):
    """One rank's choice of transports and tasks for some leaves of a call."""

    transport: str
    leaves: Sequence[int]
    plans: Sequence[TaskPlan]
    """None of the all-reduce of an engine."""

    def __str__(self) -> str:
        return f"{self.transport} for leaves {', '.join(map(str, self.leaves))}"


MAX_COMPARED = 1024
"""Kinds of call that a group remembers to have compared; a program with more compares them again."""


def compare_once(call: GroupCall, key: Hashable, courses: Callable[[], Sequence[Course]]) -> None:
    """Has ranks compare what they would do, unless they have in such a call: all know alike."""
    compared = call.group.compared_courses
    if key in compared:
        return
    compare_courses(call, courses())
    if len(compared) >= MAX_COMPARED:
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

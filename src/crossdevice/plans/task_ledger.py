"""Proof that tasks compute their collective, element by element, before any exchange.

A meaning says of what each element of a result is made, and in which order; it knows nothing of workers,
shards and messages. Ranges of elements that are made alike are compared as one.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from crossdevice.errors import PlanError
from crossdevice.plans.tasks import Buffer, Ref, Task, TaskPlan
from crossdevice.values.quantities import counted
from crossdevice.values.recipe import COPYING, Recipe

Place: TypeAlias = tuple[int, int, int]
"""The rank, the leaf and the replica of an array."""

Contribution: TypeAlias = tuple[int, int, int, int]
"""A range of an input: rank, leaf, replica, and its offset relative to the result."""


class Made(NamedTuple):
    """Elements `start` to `stop` of a result, and the contributions to each, in order."""

    start: int
    stop: int
    recipe: Recipe
    contributions: tuple[Contribution, ...]


class Meaning(NamedTuple):
    """Definition of a collective: the results of each rank, and their contributions."""

    results: Sequence[Sequence[Place]]
    made: Callable[[Place], Sequence[Made]]


# ---------------------------------------------------------------- what each collective means


def meaning_of_all_reduce(leaves: Mapping[int, tuple[int, Sequence[int], Recipe]]) -> Meaning:
    """Defines an all-reduce: every rank has every element of all replicas, combined in rank order.

    `leaves` has the length of each, its replicas on each rank, and how they are combined.
    """
    made: dict[Place, list[Made]] = {}
    for leaf, (length, counts, recipe) in leaves.items():
        whole = [Made(0, length, recipe, tuple((*place, 0) for place in _replicas(leaf, counts)))]
        made |= {(rank, leaf, 0): whole for rank in range(len(counts))}
    return _of_places(made)


def meaning_of_reduce_scatter(
    leaves: Mapping[int, tuple[Sequence[int], Sequence[int], Recipe]],
) -> Meaning:
    """Defines a reduce-scatter: each replica has its own part; `leaves` has the lengths of these."""
    made: dict[Place, list[Made]] = {}
    for leaf, (lengths, counts, recipe) in leaves.items():
        first = 0
        replicas = _replicas(leaf, counts)
        for owner, length in zip(replicas, lengths, strict=True):
            made[owner] = [Made(0, length, recipe, tuple((*place, first) for place in replicas))]
            first += length
    return _of_places(made)


def meaning_of_gather(num_bytes: Sequence[Sequence[int]]) -> Meaning:
    """Defines a gather: every rank has, for each leaf, the arrays of all ranks in order."""
    made: dict[Place, list[Made]] = {}
    for leaf, of_ranks in enumerate(num_bytes):
        end, parts = 0, []
        for rank, length in enumerate(of_ranks):
            parts.append(Made(end, end + length, COPYING, ((rank, leaf, 0, -end),)))
            end += length
        made |= {(rank, leaf, 0): parts for rank in range(len(of_ranks))}
    return _of_places(made)


def meaning_of_broadcast(num_bytes: Sequence[int], size: int, root: int) -> Meaning:
    """Defines a broadcast: every other rank has the arrays of the root."""
    return _of_places(
        {
            (rank, leaf, 0): [Made(0, length, COPYING, ((root, leaf, 0, 0),))]
            for leaf, length in enumerate(num_bytes)
            for rank in range(size)
            if rank != root
        }
    )


def meaning_of_all_to_all(
    num_bytes: Sequence[Sequence[Sequence[int]]], counts: Sequence[Sequence[int]]
) -> Meaning:
    """Defines an all-to-all: replica j has part j of replica 0, then part j of replica 1, and so on."""
    made: dict[Place, list[Made]] = {}
    for leaf, (lengths, of_ranks) in enumerate(zip(num_bytes, counts, strict=True)):
        replicas = _replicas(leaf, of_ranks)
        for number, owner in enumerate(replicas):
            end, parts = 0, []
            for source, of_source in zip(replicas, lengths, strict=True):
                length = of_source[number]
                parts.append(Made(end, end + length, COPYING, ((*source, sum(of_source[:number]) - end),)))
                end += length
            made[owner] = parts
    return _of_places(made)


def _replicas(leaf: int, counts: Sequence[int]) -> list[Place]:
    return [(rank, leaf, replica) for rank, count in enumerate(counts) for replica in range(count)]


def _of_places(made: Mapping[Place, Sequence[Made]]) -> Meaning:
    results: dict[int, list[Place]] = collections.defaultdict(list)
    for place in made:
        results[place[0]].append(place)
    return Meaning(
        [results[rank] for rank in range(max(results, default=-1) + 1)], lambda at: made.get(at, ())
    )


# ---------------------------------------------------------------- the proof


def check_tasks(plan: TaskPlan, meaning: Meaning) -> None:
    """Raises PlanError unless every element of every result is made once, from its contributions.

    A plan as one rank sees it is proved as far as that rank can: what the rank makes, for whomever, is
    right, and its own results are complete. What all ranks prove together is the whole plan.
    """
    written: dict[Place, list[Ref]] = collections.defaultdict(list)
    for task in plan.results:
        for ref in task.outputs:
            if ref.stop - ref.start != task.length:
                raise PlanError(f"ranges of {task} differ in length")
            written[_place_of(ref.buffer)].append(ref)
        if plan.seen_by in (None, task.worker):
            _check_task(plan, task, meaning)
    if plan.is_brought_to_all and plan.seen_by is None:
        for (rank, _), refs in (brought := plan.brought()).items():
            if any(brought.get((rank, peer), ()) != refs for peer in range(plan.size) if peer != rank):
                raise PlanError(
                    f"rank {rank} brings some ranks something else than others; expected the same"
                )
    own = meaning.results if plan.seen_by is None else meaning.results[plan.seen_by : plan.seen_by + 1]
    for place in itertools.chain.from_iterable(own):
        length = max([each.stop for each in meaning.made(place)], default=0)
        _check_cover(place, length, written.pop(place, []))
    for place in written:
        if plan.seen_by in (None, place[0]):
            raise PlanError(f"{_name(place)} is written, and there is no such result")


def _check_task(plan: TaskPlan, task: Task, meaning: Meaning) -> None:
    found = [each for ref in task.inputs for each in _contributions(plan, task, ref)]
    for ref in task.outputs:
        if ref.buffer.role != "result":
            raise PlanError(f"{task} writes to an {ref.buffer.role}")
        place, end = _place_of(ref.buffer), ref.start
        own = tuple([(*which, start - ref.start) for which, start in found])
        for due in meaning.made(place):
            if due.start <= end < min(due.stop, ref.stop):
                stop = min(due.stop, ref.stop)
                where = f"elements {end}:{stop} of {_name(place)}"
                if task.recipe != due.recipe:
                    raise PlanError(f"{where} are made by {task.recipe}; expected {due.recipe}")
                if own != due.contributions:
                    raise PlanError(
                        f"{where} are made of {_names(own)}; expected {_names(due.contributions)}"
                    )
                end = stop
        if end < ref.stop:
            raise PlanError(f"elements {end}:{ref.stop} are written to {_name(place)}, which is shorter")


def _contributions(plan: TaskPlan, task: Task, ref: Ref) -> Iterator[tuple[Place, int]]:
    """Yields the ranges of inputs that make up a range, and where they begin."""
    if not 0 <= ref.start <= ref.stop <= ref.buffer.length or ref.stop - ref.start != task.length:
        raise PlanError(f"{task} reads {ref}; expected {task.length} elements of {ref.buffer.length}")
    if ref.buffer.role == "input":
        yield _place_of(ref.buffer), ref.start
        return
    if ref.buffer not in plan.partials:
        raise PlanError(f"{ref} is read, and nothing makes it")
    maker = plan.making(ref)
    if maker.outputs != (ref,):
        raise PlanError(f"{ref} is read, and {maker} is what makes it")
    if maker.worker != ref.buffer.rank or any(each.buffer.rank != maker.worker for each in maker.inputs):
        raise PlanError(f"{maker} makes a partial of arrays of another rank")
    if maker.recipe != task.recipe._replace(divisor=None) or task.recipe.weights is not None:
        raise PlanError(f"{ref} is made by {maker.recipe}, and combined by {task.recipe}")
    for each in maker.inputs:
        if each.buffer.role != "input" or each.stop - each.start != task.length:
            raise PlanError(f"{maker} reads {each}; expected {task.length} elements of an input")
        yield _place_of(each.buffer), each.start


def _check_cover(place: Place, length: int, refs: Sequence[Ref]) -> None:
    end = 0
    for ref in sorted(refs, key=lambda each: each.start):
        if ref.start < end:
            raise PlanError(f"elements {ref.start}:{min(end, ref.stop)} of {_name(place)} are written twice")
        if ref.start > end:
            break
        end = ref.stop
    if end < length:
        raise PlanError(f"element {end} of {_name(place)} is never written")


def _place_of(buffer: Buffer) -> Place:
    return buffer.rank, buffer.leaf, buffer.replica


def _name(place: Place) -> str:
    rank, leaf, replica = place
    return f"result {replica} of leaf {leaf} on rank {rank}"


def _names(contributions: Sequence[Contribution]) -> str:
    first = ", ".join(
        f"rank {rank} leaf {leaf} replica {replica} from element {shift} on"
        for rank, leaf, replica, shift in contributions[:4]
    )
    return (
        f"{counted(len(contributions), 'contribution')} ({first}{', ...' if len(contributions) > 4 else ''})"
    )

"""Layouts do what their collectives mean, and nothing that differs from it is accepted."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdevice.errors import PlanError
from crossdevice.execution.processes.layouts.all_reduce import all_reduce
from crossdevice.execution.processes.layouts.all_to_all import all_to_all
from crossdevice.execution.processes.layouts.broadcast import broadcast
from crossdevice.execution.processes.layouts.gather import gather
from crossdevice.execution.processes.layouts.reduce_scatter import reduce_scatter
from crossdevice.plans import task_ledger
from crossdevice.plans.task_ledger import check_tasks
from crossdevice.plans.tasks import ReducedLeaf, TaskPlan
from crossdevice.values.recipe import COPYING, Recipe
from crossdevice.values.reduce_op import ReduceOp

COUNTS = st.lists(st.integers(1, 3), min_size=1, max_size=4).map(tuple)
LENGTHS = st.lists(st.sampled_from([0, 1, 3, 63, 64, 65, 200, 1000]), min_size=1, max_size=4)


def leaf_of(number, length, counts, partial=None):
    of_ranks = Recipe(ReduceOp.SUM, "accurate", sum(counts))
    of_replicas = of_ranks._replace(divisor=None)
    return ReducedLeaf(number, length, counts, "float32", partial, "float32", of_replicas, of_ranks)


def reduced(lengths, counts, partial, **how):
    leaves = [leaf_of(number, length, counts, partial) for number, length in enumerate(lengths)]
    meaning = task_ledger.meaning_of_all_reduce(
        {leaf.number: (leaf.length, counts, leaf.of_ranks) for leaf in leaves}
    )
    return meaning, lambda rank=None: all_reduce(leaves, seen_by=rank, **how)


def scattered(parts, counts, partial, workers=None):
    """`parts` has, for each leaf, the length of each replica's part."""
    leaves = [leaf_of(number, sum(each), counts, partial) for number, each in enumerate(parts)]
    edges = [list(itertools.accumulate(each, initial=0)) for each in parts]
    meaning = task_ledger.meaning_of_reduce_scatter(
        {leaf.number: (each, counts, leaf.of_ranks) for leaf, each in zip(leaves, parts, strict=True)}
    )
    return meaning, lambda rank=None: reduce_scatter(leaves, edges, workers, seen_by=rank)


def gathered(num_bytes):
    return task_ledger.meaning_of_gather(num_bytes), lambda rank=None: gather(num_bytes, seen_by=rank)


def copied(num_bytes, size, root):
    meaning = task_ledger.meaning_of_broadcast(num_bytes, size, root)
    return meaning, lambda rank=None: broadcast(num_bytes, size, root, seen_by=rank)


def exchanged(num_bytes, counts):
    meaning = task_ledger.meaning_of_all_to_all(num_bytes, counts)
    return meaning, lambda rank=None: all_to_all(num_bytes, counts, seen_by=rank)


@st.composite
def cases(draw):
    """A meaning, and the function that emits the tasks of the layout for it."""
    counts = draw(COUNTS)
    size, total = len(counts), sum(counts)
    partial = draw(st.sampled_from([None, "float64"]))
    some = st.integers(0, 70)
    lengths = draw(LENGTHS)
    match draw(
        st.sampled_from(
            ["reduce", "small", "even", "workers", "scatter", "gather", "broadcast", "all to all"]
        )
    ):
        case "reduce":
            return reduced(lengths, counts, partial)
        case "small":
            return reduced(lengths, counts, partial, is_small=True)
        case "even":
            return reduced(lengths, counts, partial, is_even=True)
        case "workers":
            return reduced(lengths, counts, partial, workers=sorted({0, size - 1}))
        case "scatter":
            parts = draw(st.lists(st.tuples(*[some] * total), min_size=1, max_size=3))
            workers = draw(st.sampled_from([None, [min(rank, max(size - 2, 0)) for rank in range(size)]]))
            return scattered(parts, counts, partial, workers)
        case "gather":
            return gathered(draw(st.lists(st.tuples(*[some] * size), min_size=1, max_size=3)))
        case "broadcast":
            return copied(lengths, size, draw(st.integers(0, size - 1)))
        case _:
            rows = st.tuples(*[st.tuples(*[some] * total)] * total)
            num_bytes = draw(st.lists(rows, min_size=1, max_size=2))
            return exchanged(num_bytes, [counts] * len(num_bytes))


@given(cases())
def test_layouts_do_what_their_collectives_mean(case):
    meaning, emit = case
    check_tasks(emit(), meaning)


@given(cases())
def test_a_rank_sees_of_the_whole_plan_what_concerns_it(case):
    meaning, emit = case
    whole = emit()
    for rank in range(whole.size):
        own = emit(rank)
        check_tasks(own, meaning)
        assert [task for task in own.results if task.worker == rank] == [
            task for task in whole.results if task.worker == rank
        ]
        for theirs, seen in ((whole.brought(), own.brought()), (whole.delivered(), own.delivered())):
            pairs = [pair for pair in theirs if rank in pair]
            assert set(pairs) == set(seen)
            refs = lambda each: [ref[1] if len(ref) == 2 else ref for ref in each]  # noqa: E731
            assert all(refs(theirs[pair]) == refs(seen[pair]) for pair in pairs)
        assert own.bytes_sent(rank) == whole.bytes_sent(rank)


@given(cases(), st.data())
def test_a_plan_that_does_anything_else_is_refused(case, data):
    """Tasks lost, done twice, done with other elements, in another order, or for another place."""
    meaning, emit = case
    plan = emit()
    if not plan.results:
        return
    number = data.draw(st.integers(0, len(plan.tasks) - 1))
    task = plan.tasks[number]
    before, after = plan.tasks[:number], plan.tasks[number + 1 :]
    broken = [
        (*before, *after),
        (
            *before,
            task._replace(inputs=tuple(ref.narrowed(1, ref.stop - ref.start + 1) for ref in task.inputs)),
            *after,
        ),
        (*before, task._replace(inputs=(*task.inputs, task.inputs[0])), *after),
        (*before, task._replace(inputs=task.inputs[1:]), *after),
        (*before, task._replace(recipe=Recipe(ReduceOp.MAX, "accurate")), *after),
    ]
    if task.stage:
        broken.append((*before, task, task, *after))
        broken.append((*before, task._replace(outputs=task.outputs[1:]), *after))
    if len(set(task.inputs)) > 1:
        broken.append((*before, task._replace(inputs=task.inputs[::-1]), *after))
    for tasks in broken:
        with pytest.raises(PlanError):
            check_tasks(TaskPlan(plan.size, tasks), meaning)


def test_a_wrong_root_slice_or_shard_is_refused():
    meaning, _ = copied([5], 3, root=1)
    with pytest.raises(
        PlanError, match=r"made of 1 contribution \(rank 0 leaf 0 replica 0 .*expected .*rank 1"
    ):
        check_tasks(broadcast([5], 3, root=0, seen_by=2), meaning)
    meaning, emit = gathered([[4, 4]])
    swapped = [
        task._replace(inputs=other.inputs)
        for pair in (emit().tasks[:2], emit().tasks[2:])
        for task, other in zip(pair, pair[::-1], strict=True)
    ]
    with pytest.raises(PlanError, match="elements 0:4 of result 0 of leaf 0 on rank 0 are made of"):
        check_tasks(TaskPlan(2, tuple(swapped)), meaning)
    meaning, _ = scattered([(3, 2)], (1, 1), None)
    _, of_other_parts = scattered([(2, 3)], (1, 1), None)
    with pytest.raises(PlanError, match="element 2 of result 0 of leaf 0 on rank 0 is never written"):
        check_tasks(of_other_parts(0), meaning)


@given(COUNTS, LENGTHS, st.booleans())
def test_tasks_run_one_by_one_make_what_numpy_makes(counts, lengths, is_small):
    _, emit = reduced(lengths, counts, None, is_small=is_small)
    rng = np.random.default_rng(0)
    arrays = {
        (rank, leaf, replica): rng.integers(-9, 9, length).astype(np.float64)
        for leaf, length in enumerate(lengths)
        for rank, count in enumerate(counts)
        for replica in range(count)
    }
    results = {
        (rank, leaf): np.empty(length) for leaf, length in enumerate(lengths) for rank in range(len(counts))
    }
    for task in emit().results:
        value = np.mean([arrays[ref.buffer[1:4]][ref.start : ref.stop] for ref in task.inputs], axis=0)
        for ref in task.outputs:
            results[ref.buffer.rank, ref.buffer.leaf][ref.start : ref.stop] = value
    for (_, leaf), result in results.items():
        whole = [array for (_, which, _), array in arrays.items() if which == leaf]
        assert np.array_equal(result, np.mean(whole, axis=0))


@given(LENGTHS, st.integers(1, 5))
def test_even_shards_are_as_long_as_each_other_but_the_last_ones(lengths, size):
    _, emit = reduced(lengths, (1,) * size, None, is_even=True)
    made = [sum(task.length for task in emit().results if task.worker == rank) for rank in range(size)]
    assert sum(made) == sum(lengths)
    assert made == sorted(made, reverse=True)
    assert len({length for length in made if length not in (0, min(filter(None, made), default=0))}) <= 1


def test_bytes_sent_are_counted_from_the_tasks():
    _, emit = reduced([1000], (1, 1, 1, 1), None)
    plan = emit()
    assert [plan.bytes_sent(rank) for rank in range(4)] == [
        4 * (744 + 768),
        4 * (744 + 768),
        4 * (744 + 768),
        4 * (768 + 3 * 232),
    ]
    assert emit(1).bytes_sent(1) == plan.bytes_sent(1)
    _, emit = reduced([8], (2, 2), "float64", is_small=True)
    assert emit().bytes_sent(0) == 64
    assert str(emit().tasks[0]) == "rank 0 sums input 0.0.0[0:8] input 0.0.1[0:8] to partial 0.0.0[0:8]"
    assert gathered([[1, 1]])[1]().tasks[0].recipe == COPYING

"""Calls of groups that were made before: nothing is read, checked or laid out again."""

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.errors import MismatchError, OutError
from crossdevice.testing import run_ranks
from entered_functions import num_of_rank_entered

REPLICAS = 2

MOST = {
    "reduce": 40,
    "reduce into out": 45,
    "weighted reduce": 80,
    "reduce a tree": 110,
    "reduce_scatter": 70,
    "weighted reduce_scatter": 140,
    "all_to_all": 105,
    "gather": 95,
    "gather into out": 145,
    "all_gather": 105,
    "bound reduce": 25,
    "bound weighted reduce": 60,
    "bound reduce_scatter": 70,
    "bound all_to_all": 105,
    "bound gather": 95,
    "bound gather into out": 145,
}
"""The most functions that a repeated call of two ranks of one host enters."""


def arrays_of(group):
    return [np.arange(64, dtype=np.float32) + 2 * group.rank + replica for replica in range(REPLICAS)]


def calls_of(group):
    """Every collective, and which of its bound calls; of arrays, and of a tree."""
    ops, value = cd.CollectiveAllReduce(group=group), cd.PerReplica(arrays_of(group))
    tree = cd.PerReplica([{"a": array, "b": array.reshape(8, 8)} for array in value.values])
    into = [np.empty_like(array) for array in value.values]
    whole = np.empty(64 * REPLICAS * group.size, np.float32)
    weights = [0.5, 0.25]
    return {
        "reduce": lambda: ops.reduce("sum", value, value),
        "reduce into out": lambda: ops.reduce("sum", value, value, out=into),
        "weighted reduce": lambda: ops.reduce("sum", value, value, weights=weights),
        "reduce a tree": lambda: ops.reduce("sum", tree, tree),
        "reduce_scatter": lambda: ops.reduce_scatter("sum", value),
        "weighted reduce_scatter": lambda: ops.reduce_scatter("sum", value, weights=weights),
        "all_to_all": lambda: ops.all_to_all(value),
        "gather": lambda: ops.gather(value, "cpu:0"),
        "gather into out": lambda: ops.gather(value, "cpu:0", out=whole),
        "all_gather": lambda: ops.all_gather(value),
        "bound reduce": ops.bound.reduce("sum", value, value),
        "bound weighted reduce": ops.bound.reduce("sum", value, value, weights=weights),
        "bound reduce_scatter": ops.bound.reduce_scatter("sum", value),
        "bound all_to_all": ops.bound.all_to_all(value),
        "bound gather": ops.bound.gather(value, "cpu:0"),
        "bound gather into out": ops.bound.gather(value, "cpu:0", out=whole),
    }


def functions_entered(group):
    found = {}
    for name, call in calls_of(group).items():
        for _ in range(2):
            call()
        found[name] = num_of_rank_entered(call)
    return found


def test_a_repeated_call_of_every_collective_enters_few_functions():
    for found in run_ranks(2, functions_entered, processes=True):
        assert found.keys() == MOST.keys()
        assert {name: number for name, number in found.items() if not 0 < number <= MOST[name]} == {}


def test_ranks_may_bring_other_lengths_to_a_gather_that_is_known():
    def program(group):
        ops, own = cd.CollectiveAllReduce(group=group), np.full(2, group.rank, np.float32)
        bound, found = ops.bound.gather(own, "cpu:0"), []
        for length in (2, 2, 5, 2):
            theirs = own if group.rank == 0 else np.full(length, group.rank, np.float32)
            found.append(ops.gather(theirs, "cpu:0").tolist())
        return found, bound().tolist(), ops._runner.known_calls.hits

    for rank, (found, bound, hits) in enumerate(run_ranks(2, program)):
        assert found == [[0, 0] + [1] * length for length in (2, 2, 5, 2)]
        assert bound == [0, 0, 1, 1]
        assert hits == (3 if rank == 0 else 2)


def test_memory_that_lengths_of_others_make_too_small_is_refused_when_these_have_their_results():
    def program(group):
        ops, out, found = cd.CollectiveAllReduce(group=group), np.empty(4), []
        bound = ops.bound.gather(np.zeros(2), "cpu:0", out=out)
        assert bound() is out
        for length in (2, 2, 5, 2):
            own = np.full(2 if group.rank == 0 else length, float(group.rank))
            try:
                found.append(len(ops.gather(own, "cpu:0", out=out if group.rank == 0 else None)))
            except OutError as error:
                found.append(str(error))
        return found, bound() is out

    (first, is_out), (second, _) = run_ranks(2, program)
    assert (first[:2], first[3], second, is_out) == ([4, 4], 4, [4, 4, 7, 4], True)
    assert "has shape (4,); expected (7,)" in first[2]


@pytest.mark.parametrize("call", ["reduce", "reduce_scatter"])
def test_weights_of_one_rank_may_all_be_0_in_calls_that_are_known_and_bound(call):
    def program(group):
        ops, value = cd.CollectiveAllReduce(group=group), cd.PerReplica(arrays_of(group))
        weights = [0.0, 0.0] if group.rank == 0 else [1.0, 3.0]
        arguments = ("mean", value, "cpu:0") if call == "reduce" else ("mean", value)
        make, bind = getattr(ops, call), getattr(ops.bound, call)
        plain = [make(*arguments, weights=weights) for _ in range(2)]
        found = [*plain, bind(*arguments, weights=weights)()]
        with pytest.raises(MismatchError, match="all 0"):
            make(*arguments, weights=[0.0, 0.0])
        parts = [np.concatenate([*(each.values if call == "reduce_scatter" else [each])]) for each in found]
        return [part.tolist() for part in parts], ops._runner.known_calls.hits

    whole = (np.arange(64) + 2.75).tolist()
    (first, hits), (second, _) = run_ranks(2, program)
    assert hits == 2
    expected = [whole, whole] if call == "reduce" else [whole[:32], whole[32:]]
    assert [first, second] == [[each] * 3 for each in expected]


def test_new_weights_count_in_a_call_that_is_known():
    def program(group):
        ops, value = cd.CollectiveAllReduce(group=group), cd.PerReplica(arrays_of(group))
        return [
            ops.reduce("sum", value, "cpu:0", weights=[factor, 0.0])[0].item()
            for factor in (1.0, 2.0, 2.0, 5.0)
        ]

    assert run_ranks(2, program) == [[2.0, 4.0, 4.0, 10.0]] * 2

"""With weights, replicas count by them, and every other law holds: the same bits from every algorithm."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

import crossdevice as cd
from conformance.oracle import NUMPY_DTYPES, weighted
from conformance.rows import (
    ALGORITHM_ROWS,
    BACKEND_ROWS,
    LOWERINGS,
    NUMPY,
    bits_of,
    plain_and_wild_arrays,
    wild_arrays,
    with_gaps,
)
from crossdevice.errors import OptionError, ReduceOpError

FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64")
OWN_HOOKS = "users_own"
WEIGHTS = {
    "MEAN": ((3.0, 1.0, 0.0, 80.0), (0.1, 0.2, 0.3, 0.7), (1e-3, 1.0, 7.0, 1e20)),
    "SUM": ((1.0, -1.0, 0.5, 0.1), (0.1, 1e-20, -3e15, 0.7)),
}
CASES = [(op, weights) for op, sets in WEIGHTS.items() for weights in sets]


@pytest.mark.parametrize("dtype", [*FLOATS, "int16", "int64"])
@pytest.mark.parametrize("precision", ["accurate", "exact"])
def test_every_algorithm_gives_what_the_weights_say(dtype, precision):
    arrays = plain_and_wild_arrays(dtype, 4, 25, 7)
    for number, (op, weights) in enumerate(CASES):
        right = NUMPY.bits(weighted(op, arrays, weights, dtype, precision))
        rows = ALGORITHM_ROWS if number == 1 else ALGORITHM_ROWS[number : number + 1]
        for row, lowering in itertools.product(rows, LOWERINGS):
            if row.name == OWN_HOOKS:
                continue
            options = cd.CommunicationOptions(precision=precision, lowering=lowering)
            assert bits_of(row.make(), op, arrays, options, weights=weights) == right, (
                op,
                weights,
                row.name,
                lowering,
            )


@pytest.mark.parametrize("backend", with_gaps(BACKEND_ROWS[:4]))
def test_every_library_has_the_same_bits(backend):
    if not backend.is_installed:
        pytest.skip(f"{backend.name} is not installed")
    for dtype, precision in itertools.product(
        ("bfloat16", "float32", "float64"), ("fast", "accurate", "exact")
    ):
        if dtype not in backend.dtypes:
            continue
        arrays = wild_arrays(dtype, 4, 25, 3)
        for lowering in LOWERINGS:
            options = cd.CommunicationOptions(precision=precision, lowering=lowering)
            found = bits_of(cd.TreeAllReduce(), "mean", arrays, options, backend, WEIGHTS["MEAN"][1])
            exactness = "exact" if precision == "exact" else "accurate"
            right = weighted("MEAN", arrays, WEIGHTS["MEAN"][1], dtype, exactness)
            assert found == NUMPY.bits(right), (dtype, precision, lowering)


def test_exact_weighted_results_do_not_depend_on_the_order_of_replicas():
    options = cd.CommunicationOptions(precision="exact")
    for dtype, (op, weights) in itertools.product(FLOATS, CASES):
        arrays = wild_arrays(dtype, 4, 50, 11)
        pairs = list(zip(arrays, weights, strict=True))
        found = set()
        for seed in range(5):
            random.Random(seed).shuffle(pairs)
            shuffled, own = map(list, zip(*pairs, strict=True))
            found.add(bits_of(cd.DirectAllReduce(), op, shuffled, options, weights=own))
        assert len(found) == 1, (dtype, op, weights)


def test_weights_of_one_have_the_bits_of_the_plain_mean():
    for dtype, precision in itertools.product((*FLOATS, "int8", "int32", "int64"), ("accurate", "exact")):
        arrays = plain_and_wild_arrays(dtype, 5, 200, 1)
        options = cd.CommunicationOptions(precision=precision)
        plain = cd.reduce(arrays, "mean", options=options)
        assert NUMPY.bits(cd.reduce(arrays, "mean", options=options, weights=[1] * 5)) == NUMPY.bits(plain)


def test_equal_arrays_are_their_own_mean_whatever_the_weights():
    array = wild_arrays("float32", 1, 1000, 5)[0]
    options = cd.CommunicationOptions(precision="exact")
    for weights in WEIGHTS["MEAN"]:
        assert NUMPY.bits(cd.reduce([array] * 4, "mean", options=options, weights=weights)) == NUMPY.bits(
            array
        )


def test_every_call_takes_weights_and_trees():
    trees = [{"w": np.float32([k, 2 * k]), "n": np.array(k)} for k in (1, 5)]
    weights, right = np.array([3, 1]), {"w": [2.0, 4.0], "n": 2.0}
    value, ops = cd.PerReplica(trees), cd.RingAllReduce()
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    for result in (
        cd.reduce(trees, "mean", weights=weights),
        cd.all_reduce(trees, "mean", weights=weights)[1],
        cd.bind(trees, "mean", "cpu:0", weights=weights)(),
        ops.reduce("mean", value, value, weights=weights).values[1],
        ops.batch_reduce("mean", [(value, "cpu:0")], weights=weights)[0],
        ops.bind("mean", [(value, "cpu:0")], weights=weights)()[0],
        strategy.reduce("mean", value, axis=None, weights=weights),
        strategy.extended.batch_reduce_to("mean", [(value, "cpu:0")], weights=weights)[0],
        cd.reduce(trees, "mean", weights=cd.PerReplica([3.0, 1.0])),
    ):
        assert {"w": result["w"].tolist(), "n": float(result["n"])} == right
        assert result["w"].dtype == np.float32


def test_a_known_call_takes_new_weights_without_preparing_again():
    ops, value = cd.DirectAllReduce(), cd.PerReplica([np.float32([1]), np.float32([2])])
    found = [float(ops.reduce("sum", value, "cpu:0", weights=[w, 1])[0]) for w in (1, 2, 3)]
    assert found == [3.0, 4.0, 5.0]
    assert ops._runner.known_calls.hits == 2
    assert len(ops._runner.planner._prepared) == 1
    assert float(ops.reduce("sum", value, "cpu:0")[0]) == 3.0
    assert ops._runner.known_calls.hits == 2


def test_rows_of_sparse_values_are_multiplied():
    rows = [cd.IndexedSlices(np.float32([[k], [10 * k]]), np.array([0, k]), (3, 1)) for k in (1, 2)]
    result = cd.reduce(rows, "mean", weights=[3, 1])
    assert cd.to_dense(result).ravel().tolist() == [1.25, 7.5, 5.0]
    mixed = cd.reduce([rows[0], np.ones((3, 1), np.float32)], "sum", weights=[2, 0.5])
    assert mixed.ravel().tolist() == [2.5, 20.5, 0.5]


REFUSED = (
    ([1], OptionError, "weights has 1 number for 2 replicas"),
    ([1, float("nan")], OptionError, r"weights\[1\] is nan"),
    ([float("inf"), 1], OptionError, r"weights\[0\] is inf"),
    ([10**400, 1], OptionError, r"weights\[0\] is 1000"),
    ([1, 1j], OptionError, r"weights\[1\] is 1j, a complex"),
    ([True, 1], OptionError, r"weights\[0\] is True, a bool"),
    ([1, "2"], OptionError, r"weights\[1\] is '2', a str"),
    ([1, None], OptionError, r"weights\[1\] is None"),
    ([1, 1e-70], OptionError, "expected 0 or a magnitude from 6e-61 to 2e\\+60"),
    ([0, 0.0], OptionError, "weights of a mean are all 0"),
    ([1, -1], OptionError, r"weights\[1\] is -1; .* use SUM"),
    (2.0, OptionError, "weights is a float; expected a list with one number per replica"),
)


@pytest.mark.parametrize(("weights", "error", "message"), REFUSED)
def test_bad_weights_are_refused_by_name(weights, error, message):
    arrays = [np.float32([1]), np.float32([2])]
    value = cd.PerReplica(arrays)
    for call in (
        lambda: cd.reduce(arrays, "mean", weights=weights),
        lambda: cd.bind(arrays, "mean", weights=weights),
        lambda: cd.DirectAllReduce().batch_reduce("mean", [(value, value)], weights=weights),
        lambda: cd.MirroredStrategy(["cpu:0", "cpu:1"]).reduce("mean", value, None, weights=weights),
    ):
        with pytest.raises(error, match=message):
            call()


def test_weights_are_refused_where_they_have_no_meaning():
    arrays = [np.float32([1]), np.float32([2])]
    value = cd.PerReplica(arrays)
    (own,) = [row.make() for row in ALGORITHM_ROWS if row.name == OWN_HOOKS]
    with pytest.raises(ReduceOpError, match="MAX takes no weights"):
        cd.reduce(arrays, "max", weights=[1, 1])
    with pytest.raises(OptionError, match="OnlyReduces, which overrides reduce_implementation"):
        own.reduce("sum", value, value, weights=[1, 1])
    with pytest.raises(OptionError, match="has an accumulation_fn"):
        cd.ReductionToOneDevice(accumulation_fn=sum).reduce("sum", value, "cpu:0", weights=[1, 1])
    with pytest.raises(OptionError, match="weights with an axis"):
        cd.MirroredStrategy(["cpu:0", "cpu:1"]).reduce("mean", value, 0, weights=[1, 1])
    with pytest.raises(OptionError, match="without a strategy"):
        cd.get_strategy().reduce("mean", 1.0, None, weights=[1])


def test_infinities_and_nan_follow_ieee():
    arrays = [
        NUMPY_DTYPES["float32"].type([np.inf, np.inf, np.nan, -0.0])[...],
        np.float32([1, -np.inf, 1, -0.0]),
    ]
    for precision in ("accurate", "exact"):
        options = cd.CommunicationOptions(precision=precision)
        result = cd.reduce(arrays, "sum", weights=[2, 1], options=options)
        assert repr(result.tolist()) == "[inf, nan, nan, -0.0]"
        flipped = cd.reduce(arrays, "sum", weights=[0, -1], options=options)
        assert repr(flipped.tolist()) == "[nan, nan, nan, 0.0]"

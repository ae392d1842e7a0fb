"""Fast results follow the plan to the bit: lowering a plan to one pass does not change them."""

from __future__ import annotations

import itertools

import pytest

import crossdevice as cd
from conformance.oracle import elementwise, in_two_halves, left_to_right
from conformance.rows import (
    COUNTS,
    FLOATS,
    LOWERINGS,
    NUMPY,
    WITH_PACKS,
    components_of,
    each_algorithm,
    each_backend,
    placed,
    wild_arrays,
)

FAST = {lowering: cd.CommunicationOptions(precision="fast", lowering=lowering) for lowering in LOWERINGS}
SIZES = (7, 1, 12, 3)


def check_lowered_is_stepwise(ops, backend, batch, op, target=None):
    pairs = [(value, target or value) for value in map(backend.per_replica, batch)]
    lowered, stepwise = (ops.batch_reduce(op, pairs, FAST[lowering]) for lowering in LOWERINGS)
    for left, right in zip(lowered, stepwise, strict=True):
        bits = [backend.bits(array) for array in (*components_of(left), *components_of(right))]
        assert len(set(bits)) == 1, (op, len(batch[0]))


@each_backend("fast")
@pytest.mark.parametrize("algorithm", WITH_PACKS, ids=lambda algorithm: algorithm.__name__)
def test_fast_bits_are_the_same_lowered_and_stepwise_for_every_packing(algorithm, backend):
    algorithms = list(map(algorithm, backend.pack_counts))
    for dtype, (count, op) in backend.product(backend.floats, [(3, "MEAN"), (8, "SUM")]):
        batch = [wild_arrays(dtype, count, size, seed) for seed, size in enumerate(SIZES)]
        for ops in algorithms:
            check_lowered_is_stepwise(ops, backend, batch, op)


@each_algorithm("fast")
@each_backend("fast")
def test_fast_bits_are_the_same_lowered_and_stepwise_for_every_algorithm(row, backend):
    ops = row.make()
    for dtype, count, op in backend.product((*backend.floats, "complex64"), COUNTS, ("SUM", "PROD")):
        batch = [wild_arrays(dtype, count, size, seed) for seed, size in enumerate(SIZES[:2])]
        check_lowered_is_stepwise(ops, backend, batch, op)
        if dtype == "float32":
            check_lowered_is_stepwise(ops, backend, batch, op, target=placed("cpu:1", "cpu:12"))


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_fast_one_device_sums_go_left_to_right_and_round_every_time(op, lowering):
    for dtype, count in itertools.product(FLOATS, COUNTS):
        arrays = wild_arrays(dtype, count, 24, seed=4)
        right = elementwise(left_to_right, arrays, dtype, count if op == "MEAN" else None)
        result = cd.ReductionToOneDevice().reduce(op, NUMPY.per_replica(arrays), "cpu:0", FAST[lowering])
        assert NUMPY.bits(result) == NUMPY.bits(right), (dtype, count)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_fast_hierarchical_sums_are_two_half_sums_and_one_addition(op, lowering):
    for dtype, count in itertools.product(FLOATS, COUNTS):
        arrays = wild_arrays(dtype, count, 24, seed=5)
        right = elementwise(in_two_halves, arrays, dtype, count if op == "MEAN" else None)
        value = NUMPY.per_replica(arrays)
        result = cd.HierarchicalCopyAllReduce().reduce(op, value, value, FAST[lowering])
        assert {NUMPY.bits(array) for array in components_of(result)} == {NUMPY.bits(right)}, (dtype, count)

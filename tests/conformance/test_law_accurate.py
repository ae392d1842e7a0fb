"""Accurate results depend on the values alone: not on algorithm, packing, lowering, batching or library."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import crossdevice as cd
from conformance.oracle import expected
from conformance.rows import (
    ALGORITHM_ROWS,
    LOWERINGS,
    NUMPY,
    PRECISIONS,
    TORCH,
    WITH_PACKS,
    adversarial_arrays,
    components_of,
    each_backend,
    wild_arrays,
)
from drawn_examples import examples

SIZES = (7, 1, 12, 3)
"""Values of one batch, so that packs begin and end inside of them."""


@functools.cache
def made_algorithms():
    """One of each, which know the plans of earlier calls."""
    return [row.make() for row in ALGORITHM_ROWS]


def right_bits(op, batch, dtype):
    return [NUMPY.bits(expected(op, arrays, dtype, "accurate")) for arrays in batch]


def wild_batch(dtype, count):
    return [wild_arrays(dtype, count, size, seed) for seed, size in enumerate(SIZES)]


def check_batch(ops, backend, batch, op, options, right):
    pairs = [(value, value) for value in map(backend.per_replica, batch)]
    for result, bits in zip(ops.batch_reduce(op, pairs, options), right, strict=True):
        assert {backend.bits(array) for array in components_of(result)} == {bits}


@each_backend("accurate")
@pytest.mark.parametrize("algorithm", WITH_PACKS, ids=lambda algorithm: algorithm.__name__)
def test_accurate_bits_do_not_depend_on_the_number_of_packs(algorithm, backend):
    algorithms = list(map(algorithm, backend.pack_counts))
    for dtype, (count, op) in backend.product(backend.floats, [(3, "MEAN"), (8, "SUM")]):
        batch = wild_batch(dtype, count)
        right = right_bits(op, batch, dtype)
        for ops, lowering in itertools.product(algorithms, LOWERINGS):
            check_batch(ops, backend, batch, op, cd.CommunicationOptions(lowering=lowering), right)


@each_backend("accurate")
@pytest.mark.parametrize("bytes_per_pack", [1, 24, 10_000])
def test_accurate_bits_do_not_depend_on_the_size_of_packs(bytes_per_pack, backend):
    for dtype, count, ops in backend.product(backend.floats, (2, 5), made_algorithms()):
        batch = wild_batch(dtype, count)
        right = right_bits("SUM", batch, dtype)
        for lowering in LOWERINGS:
            options = cd.CommunicationOptions(bytes_per_pack=bytes_per_pack, lowering=lowering)
            check_batch(ops, backend, batch, "SUM", options, right)


@each_backend("accurate")
@pytest.mark.parametrize(("max_bytes", "max_group"), [(5, 10), (1000, 2), (1000, 10)])
def test_accurate_bits_do_not_depend_on_groups_of_small_values(max_bytes, max_group, backend):
    for dtype, count, name in backend.product(backend.floats, (2, 5), ("ring", "hierarchical_copy")):
        batch = wild_batch(dtype, count)
        right = right_bits("MEAN", batch, dtype)
        for lowering in LOWERINGS:
            ops = cd.AllReduceCrossDeviceOps(name, 0, max_bytes, max_group)
            check_batch(ops, backend, batch, "MEAN", cd.CommunicationOptions(lowering=lowering), right)


@examples(40)
@given(adversarial_arrays(), st.sampled_from((NUMPY, TORCH)))
def test_accurate_bits_are_those_of_wide_sums_in_replica_order(drawn, backend):
    dtype, arrays = drawn
    value = backend.per_replica(arrays)
    for op in ("SUM", "MEAN", "PROD"):
        right = NUMPY.bits(expected(op, arrays, dtype, "accurate"))
        for ops, lowering in itertools.product(made_algorithms(), LOWERINGS):
            result = ops.reduce(op, value, value, cd.CommunicationOptions(lowering=lowering))
            assert {backend.bits(array) for array in components_of(result)} == {right}, (op, ops)


def test_accurate_complex_bits_are_the_same_for_all_algorithms_and_libraries():
    for count, op in itertools.product((2, 5, 9), ("SUM", "MEAN", "PROD")):
        arrays = wild_arrays("complex64", count, 13, seed=1)
        found = set()
        for ops, lowering, backend in itertools.product(made_algorithms(), LOWERINGS, (NUMPY, TORCH)):
            value = backend.per_replica(arrays)
            result = ops.reduce(op, value, value, cd.CommunicationOptions(lowering=lowering))
            found |= {backend.bits(array) for array in components_of(result)}
        assert len(found) == 1, (op, count)


def test_accurate_bits_do_not_depend_on_where_results_go():
    arrays = wild_arrays("float32", 4, 9, seed=2)
    right = NUMPY.bits(expected("MEAN", arrays, "float32", "accurate"))
    targets = ["cpu:0", "cpu:9", cd.PerReplica([0.0] * 3, ["cpu:3", "cpu:9", "cpu:1"])]
    for row, lowering, target in itertools.product(ALGORITHM_ROWS, LOWERINGS, targets):
        value = NUMPY.per_replica(arrays)
        result = row.make().reduce("MEAN", value, target, cd.CommunicationOptions(lowering=lowering))
        assert {NUMPY.bits(array) for array in components_of(result)} == {right}


@each_backend("accurate")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_bits_do_not_depend_on_the_length_of_an_array(backend, precision):
    options = cd.CommunicationOptions(precision=precision)
    for dtype, op in backend.product((*backend.floats, "complex64"), ("SUM", "MEAN")):
        arrays = wild_arrays(dtype, 5, 70_001, seed=7)
        whole = cd.ReductionToOneDevice().reduce(op, backend.per_replica(arrays), "cpu:0", options)
        for start, stop in ((0, 1), (1, 1000), (32_767, 32_770), (65_533, 69_001), (69_998, 70_001)):
            part = backend.per_replica([array[start:stop] for array in arrays])
            alone = cd.ReductionToOneDevice().reduce(op, part, "cpu:0", options)
            assert backend.bits(whole[start:stop]) == backend.bits(alone), (dtype, op, start)

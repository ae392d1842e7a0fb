"""Exact results are the true ones rounded once, so the order of the replicas cannot show."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import crossdevice as cd
from conformance.oracle import expected, rounded
from conformance.rows import (
    ALGORITHM_ROWS,
    LOWERINGS,
    NUMPY,
    TORCH,
    adversarial_arrays,
    components_of,
    wild_arrays,
)
from drawn_examples import examples

EXACT = {lowering: cd.CommunicationOptions(precision="exact", lowering=lowering) for lowering in LOWERINGS}


def exact_bits(op, arrays, row=None, lowering="auto", backend=NUMPY):
    """The bits every destination got, which must be the same."""
    ops = cd.ReductionToOneDevice() if row is None else row.make()
    value = backend.per_replica(arrays)
    (bits,) = {backend.bits(a) for a in components_of(ops.reduce(op, value, value, EXACT[lowering]))}
    return bits


@examples(40)
@given(adversarial_arrays(), st.sampled_from((NUMPY, TORCH)))
def test_exact_results_are_correctly_rounded_for_every_algorithm(drawn, backend):
    dtype, arrays = drawn
    for op in ("SUM", "MEAN", "PROD"):
        right = NUMPY.bits(expected(op, arrays, dtype, "exact"))
        for row, lowering in itertools.product(ALGORITHM_ROWS, LOWERINGS):
            assert exact_bits(op, arrays, row, lowering, backend) == right, (op, row.name)


@examples(40)
@given(adversarial_arrays(), st.randoms(use_true_random=False))
def test_exact_results_are_the_same_for_every_order_of_replicas(drawn, random):
    dtype, arrays = drawn
    shuffled = random.sample(arrays, len(arrays))
    for op in ("SUM", "MEAN", "PROD", "MIN", "MAX"):
        right = exact_bits(op, arrays)
        for row, lowering in itertools.product(ALGORITHM_ROWS, LOWERINGS):
            assert exact_bits(op, shuffled, row, lowering) == right, (dtype, op, row.name)


PARTS = st.sampled_from([0.0, -0.0, 1.0, -2.0, 3e38, -1e-45, float("inf"), -float("inf"), float("nan")])
COMPLEX_ARRAYS = st.integers(2, 4).flatmap(
    lambda count: st.lists(
        st.builds(lambda real, imaginary: np.array([complex(real, imaginary)], np.complex64), PARTS, PARTS),
        min_size=count,
        max_size=count,
    )
)
"""One complex64 number per replica; few kinds of number, so that infinities and zeros meet."""


@given(COMPLEX_ARRAYS)
def test_exact_complex_sums_are_the_same_for_every_order_of_replicas(arrays):
    for op, order in itertools.product(("SUM", "MEAN"), itertools.permutations(arrays)):
        assert exact_bits(op, order) == exact_bits(op, arrays, lowering="off"), op


@given(COMPLEX_ARRAYS)
def test_exact_complex_products_are_the_same_for_every_order_of_replicas(arrays):
    for order in itertools.permutations(arrays):
        assert exact_bits("PROD", order) == exact_bits("PROD", arrays, lowering="off")


def test_exact_complex_products_round_each_part_once():
    for count in range(1, 10):
        arrays = wild_arrays("complex64", count, 5, seed=3)
        parts = []
        for column in zip(*(array.tolist() for array in arrays), strict=True):
            real, imaginary = Fraction(1), Fraction(0)
            for number in column:
                a, b = Fraction(number.real), Fraction(number.imag)
                real, imaginary = real * a - imaginary * b, real * b + imaginary * a
            parts.append(complex(rounded(real, "float32"), rounded(imaginary, "float32")))
        right = NUMPY.bits(np.array(parts, np.complex64))
        for lowering in LOWERINGS:
            assert exact_bits("PROD", arrays, lowering=lowering) == right


def test_exact_sums_survive_overflow_on_the_way():
    arrays = [np.array([x]) for x in (1e308, 1e308, -1e308, 1e-300, -1e308)]
    for row, lowering in itertools.product(ALGORITHM_ROWS, LOWERINGS):
        assert exact_bits("SUM", arrays, row, lowering) == NUMPY.bits(np.array([1e-300]))

"""Sums of small numbers next to a large one, which narrow arithmetic loses: they are not lost."""

from __future__ import annotations

import numpy as np
import pytest

import crossdevice as cd
from conformance.oracle import NUMPY_DTYPES
from conformance.rows import LOWERINGS, components_of, each_algorithm, each_backend


@each_backend("small_next_to_large")
@each_algorithm("small_next_to_large")
@pytest.mark.parametrize(("dtype", "large", "total"), [("bfloat16", 256, 264), ("float16", 2048, 2056)])
def test_seven_ones_next_to_a_large_number_are_not_lost(row, backend, dtype, large, total):
    if dtype not in backend.dtypes:
        pytest.skip(f"{backend.name} has no {dtype}")
    ops = row.make()
    every_options = [None, *(cd.CommunicationOptions(lowering=lowering) for lowering in LOWERINGS)]
    for position in range(8):
        numbers = [1] * 8
        numbers[position] = large
        value = backend.per_replica([np.full(3, number, NUMPY_DTYPES[dtype]) for number in numbers])
        # 263 and 2055 are halfway between neighbours of their dtypes: rounded once, to even.
        for options in every_options:
            for component in components_of(ops.reduce("sum", value, value, options)):
                assert backend.lists(component) == [total] * 3


def test_in_native_arithmetic_all_seven_are_lost():
    for dtype, large in (("bfloat16", 256), ("float16", 2048)):
        value = cd.PerReplica([np.array(number, NUMPY_DTYPES[dtype]) for number in [large] + [1] * 7])
        options = cd.CommunicationOptions(precision="fast")
        assert float(cd.ReductionToOneDevice().reduce("sum", value, "cpu:0", options)) == large

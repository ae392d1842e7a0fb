"""Calls of replicas in functions that JAX traces; tests/parity has those of TensorFlow."""

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.errors import ContextError

pytestmark = pytest.mark.more("JAX")


def test_calls_inside_jit_are_refused_and_do_not_wait_for_ever():
    jax = pytest.importorskip("jax")
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])

    def step():
        return cd.get_replica_context().all_reduce("sum", np.float32([1]))

    with pytest.raises(ContextError, match="all_reduce was called inside jit"):
        strategy.run(jax.jit(step))
    assert [value.tolist() for value in strategy.run(step).values] == [[2.0], [2.0]]

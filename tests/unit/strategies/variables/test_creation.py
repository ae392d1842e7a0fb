"""How variables are made: by a strategy, in its scope, in its replicas, and on one device."""

from __future__ import annotations

import contextlib
import copy
import pickle

import numpy as np
import pytest
import torch

import crossdevice as cd
from crossdevice.errors import (
    ContextError,
    ConversionError,
    MismatchError,
    OptionError,
    ShapeMismatchError,
)
from unit.strategies.variables.making import copies, each_library, on_read, own_replica

Aggregation, Synchronization = cd.VariableAggregation, cd.VariableSynchronization


@each_library
def test_each_device_gets_its_own_copy_and_name(strategy, make):
    initial = make([1.0, 2.0])
    variable = strategy.create_variable(initial, name="weights")
    assert isinstance(variable, (cd.MirroredVariable, cd.Mirrored, cd.DistributedValues))
    assert [copy.name for copy in variable.values] == ["weights", "weights/replica_1"]
    assert [str(device) for device in variable.devices] == ["cpu:0", "cpu:1"]
    assert variable.shape == (2,)
    assert variable.trainable
    assert variable.name == "weights"
    assert variable.synchronization is Synchronization.ON_WRITE
    assert variable.distribute_strategy is strategy
    initial[0] = 9
    assert copies(variable) == [[1, 2], [1, 2]]


def test_initial_values_may_be_numbers_lists_and_functions(strategy):
    calls = []
    assert strategy.create_variable(1.5).dtype == np.float32
    assert strategy.create_variable([1, 2]).dtype == np.int32
    assert strategy.create_variable(1, dtype="float64").dtype == np.float64
    assert strategy.create_variable(1, dtype=np.float16).dtype == np.float16
    assert strategy.create_variable(torch.ones(1), dtype=torch.bfloat16).dtype == torch.bfloat16
    made = strategy.create_variable(lambda: calls.append(1) or np.ones(2))
    assert copies(made) == [[1, 1], [1, 1]]
    assert calls == [1]


def test_creation_works_in_a_scope_and_outside(strategy):
    with strategy.scope():
        assert isinstance(strategy.create_variable(1.0), cd.MirroredVariable)
    other = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(ContextError, match="in a replica of"):
        strategy.run(lambda: other.create_variable(1.0))


def test_in_a_scope_a_variable_without_a_device_is_one_of_the_strategy(strategy):
    with strategy.scope():
        variable = cd.Variable(np.float32([1.0]), name="weights", aggregation=Aggregation.SUM)
        counter = cd.Variable(0.0, synchronization=Synchronization.ON_READ, aggregation=Aggregation.SUM)
        elsewhere = cd.Variable(np.float32([1.0]), device="cpu:5")
    assert isinstance(variable, cd.MirroredVariable)
    assert (variable.name, variable.aggregation) == ("weights", Aggregation.SUM)
    strategy.run(lambda: variable.assign_add(np.float32([1.0])))
    assert copies(variable) == [[3.0], [3.0]]
    assert isinstance(counter, cd.SyncOnReadVariable)
    for plain in (elsewhere, cd.Variable(np.float32([1.0]))):
        assert type(plain) is cd.Variable


@pytest.mark.parametrize("make", ["Variable", "create_variable"])
def test_in_replica_functions_all_replicas_make_one_variable_of_the_firsts_value(strategy, make):
    calls = []

    def step():
        kind = cd.Variable if make == "Variable" else strategy.create_variable
        own = float(own_replica())
        variable = kind(lambda: calls.append(own) or [own + 1], name="w", aggregation="sum")
        variable.assign_add(np.float32([own + 10]))
        return variable

    variable = strategy.run(step)
    assert isinstance(variable, cd.MirroredVariable)
    assert copies(variable) == [[22.0], [22.0]]
    assert calls == [0.0]
    named = strategy.run(lambda: cd.Variable(1.0, name=f"w{own_replica()}"))
    assert [copy.name for copy in named.values] == ["w0", "w0/replica_1"]
    with pytest.raises(MismatchError, match="Variable"):
        strategy.run(lambda: cd.Variable(1.0, aggregation=("sum", "mean")[own_replica()]))
    merged = strategy.run(lambda: cd.get_replica_context().merge_call(lambda _: cd.Variable([1.0])))
    assert isinstance(merged, cd.MirroredVariable), "a merge function speaks for all replicas"


def test_settings_of_variables_are_names_in_any_case_and_anything_else_is_refused_at_once(strategy):
    with strategy.scope():
        counter = cd.Variable(1.0, synchronization="on_read", aggregation="Sum")
        assert isinstance(counter, cd.SyncOnReadVariable)
        assert counter.aggregation is Aggregation.SUM
    for make in (cd.Variable, strategy.create_variable):
        for wrong in ("READ", 1):
            with pytest.raises(OptionError, match="is not a synchronization of variables; expected one of"):
                make(1.0, synchronization=wrong)
            with pytest.raises(OptionError, match="is not an aggregation of variables; expected one of"):
                make(1.0, aggregation=wrong)
        with pytest.raises(OptionError, match="is not a synchronization of variables; expected one of"):
            make(1.0, synchronization=None)
        assert make(1.0, aggregation=None).aggregation is Aggregation.NONE
        with pytest.raises(OptionError, match="trainable of variable"):
            make(1.0, trainable="cpu:0")


def test_a_variable_takes_the_arguments_of_tensorflows_and_names_itself_in_errors(strategy):
    for place in (contextlib.nullcontext(), strategy.scope()):
        with place:
            made = cd.Variable(initial_value=[1, 2], trainable=False, dtype="float64", name=None, shape=(2,))
            assert (made.name, str(made.dtype), made.shape) == ("Variable", "float64", (2,))
            assert not made.trainable
            assert cd.Variable(1.0, False).trainable is False
            with pytest.raises(TypeError, match=r"Variable.*'colour'"):
                cd.Variable(1.0, colour="red")
            with pytest.raises(ShapeMismatchError, match=r"shape \(3,\)"):
                cd.Variable([1.0], shape=(3,))


def test_a_variable_that_is_copied_or_pickled_in_a_scope_stays_what_it_is(strategy):
    variable = cd.Variable(np.float32([1.0]), name="weights")
    with strategy.scope():
        for again in (copy.deepcopy(variable), pickle.loads(pickle.dumps(variable))):
            assert (type(again), again.name, again.value().tolist()) == (cd.Variable, "weights", [1.0])


def test_bad_combinations_are_refused(strategy):
    with pytest.raises(ValueError, match="synchronization NONE"):
        strategy.create_variable(1.0, synchronization=Synchronization.NONE)
    with pytest.raises(ValueError, match="aggregation MEAN"):
        strategy.create_variable(1, aggregation=Aggregation.MEAN)
    with pytest.raises(OptionError, match="trainable"):
        on_read(strategy, 1.0, Aggregation.SUM, trainable="yes")
    assert not on_read(strategy, 1.0, Aggregation.SUM).trainable
    assert on_read(strategy, 1.0, Aggregation.SUM, trainable=True).trainable
    for value in ("text", object(), cd.PerReplica([1.0, 1.0])):
        with pytest.raises(ConversionError):
            strategy.create_variable(value)

"""Variables with a copy on each device: mirrored on every write, or brought together on every read."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch

import crossdevice as cd
from crossdevice.errors import (
    ContextError,
    ConversionError,
    DtypeMismatchError,
    LibraryMismatchError,
    MismatchError,
    ReduceOpError,
    ShapeMismatchError,
)
from unit.strategies.variables.making import (
    LIBRARIES,
    copies,
    each_aggregation,
    each_library,
    on_read,
    own_replica,
)

Aggregation, Synchronization = cd.VariableAggregation, cd.VariableSynchronization


# -------------------------------------------------------------------- mirrored, outside of replicas


@each_library
@each_aggregation
def test_a_write_outside_of_replicas_goes_to_every_copy(strategy, make, aggregation):
    variable = strategy.create_variable(make([1.0, 2.0]), aggregation=aggregation)
    given = make([3.0, 4.0])
    result = variable.assign(given)
    assert isinstance(result, cd.Mirrored)
    assert [array.tolist() for array in result.values] == copies(variable) == [[3, 4], [3, 4]]
    variable.assign_add(make([1.0, 1.0]))
    variable.assign_sub(0.5)
    given[0] = 99
    assert copies(variable) == [[3.5, 4.5], [3.5, 4.5]]
    assert result.values[0].tolist() == [3, 4]  # what was read does not change


def test_values_are_converted_to_the_dtype_and_library_of_the_variable(strategy):
    variable = strategy.create_variable(np.float32([1.0]))
    variable.assign([2])
    variable.assign(np.float64([2.5]))
    variable.assign_add(strategy.create_variable(np.float32([1.0])))
    variable.assign_add(cd.Variable(np.float32([1.0])))
    variable.assign_add(cd.Mirrored([np.float32([1.0])] * 2))
    assert copies(variable) == [[5.5], [5.5]]
    assert variable.dtype == np.float32
    tensors = strategy.create_variable(torch.ones(1))
    tensors.assign(np.array([2.0]))
    assert copies(tensors) == [[2], [2]]
    assert tensors.dtype == torch.float32


def test_values_that_do_not_fit_are_refused_and_nothing_is_written(strategy):
    variable = strategy.create_variable(np.int32([1]), name="counts")
    with pytest.raises(DtypeMismatchError, match="'counts' is int32; it was given float64"):
        variable.assign([1.5])
    with pytest.raises(DtypeMismatchError):
        strategy.create_variable(1.0).assign(1j)
    with pytest.raises(ShapeMismatchError, match="'counts' has shape"):
        variable.assign([1, 2])
    with pytest.raises(LibraryMismatchError, match="numpy"):
        variable.assign(torch.ones(1, dtype=torch.int32))
    for thing in ("text", None, object()):
        with pytest.raises(ConversionError, match="'counts' was given a"):
            variable.assign(thing)
    assert copies(variable) == [[1], [1]]


@each_library
def test_a_variable_computes_like_its_array(strategy, make):
    variable = strategy.create_variable(make([1.0, 2.0]))
    assert (variable + 1).tolist() == (1 + variable).tolist() == [2, 3]
    assert (variable * variable).tolist() == [1, 4]
    assert (make([1.0, 1.0]) - variable).tolist() == [0, -1]
    assert (variable < 2).tolist() == [True, False]
    assert (-variable)[1] == -2
    assert variable.sum() == 3
    assert np.asarray(variable).tolist() == [1, 2]
    assert variable.value().tolist() == variable.read_value().tolist() == [1, 2]


def test_a_variable_is_a_destination_and_is_not_written_by_that(strategy):
    variable = strategy.create_variable([1.0])
    value = cd.PerReplica([np.float32([2.0]), np.float32([4.0])])
    result = cd.RingAllReduce().reduce("mean", value, variable)
    assert [array.tolist() for array in result.values] == [[3], [3]]
    assert copies(variable) == [[1], [1]]
    assert float(cd.RingAllReduce().reduce("sum", variable, "cpu:0")[0]) == 2  # as a value: its copies


# -------------------------------------------------------------------- mirrored, in replicas


@each_library
@pytest.mark.parametrize(
    ("aggregation", "right"),
    [
        (Aggregation.NONE, [[11], [12]]),
        (Aggregation.SUM, [[13], [13]]),
        (Aggregation.MEAN, [[11.5], [11.5]]),
        (Aggregation.ONLY_FIRST_REPLICA, [[11], [11]]),
    ],
    ids=lambda row: getattr(row, "name", ""),
)
def test_a_write_in_replicas_follows_the_aggregation(strategy, make, aggregation, right):
    variable = strategy.create_variable(make([10.0]), aggregation=aggregation)

    def step():
        own = variable.assign_add(make([1.0 + own_replica()]))
        assert own.tolist() == variable.value().tolist()
        return own

    result = strategy.run(step)
    assert copies(variable) == right
    assert [array.tolist() for array in result.values] == right
    strategy.run(lambda: variable.assign(make([1.0 + own_replica()])))
    assert copies(variable) == [[value[0] - 10] for value in right]
    assert all(component is not variable.values[0].value() for component in result.values)


def test_a_sum_of_plain_numbers_is_refused_and_a_mean_is_the_number(strategy):
    summed = strategy.create_variable(0.0, aggregation=Aggregation.SUM)
    with pytest.raises(ValueError, match=r"got the number 3\.0"):
        strategy.run(lambda: summed.assign(3.0))
    averaged = strategy.create_variable(0.0, aggregation=Aggregation.MEAN)
    strategy.run(lambda: averaged.assign(3.0))
    assert copies(averaged) == [3, 3]


def test_replicas_read_their_own_copies(strategy):
    variable = strategy.create_variable([0.0])
    strategy.run(lambda: variable.assign([float(own_replica())]))
    assert strategy.run(lambda: float(variable[0])).values == (0, 1)
    assert strategy.run(lambda v: float((v * 2)[0]), args=(variable,)).values == (0, 2)
    assert strategy.run(lambda: variable) is variable
    shares = cd.PerReplica([np.float32([5.0]), np.float32([6.0])])
    strategy.run(lambda: variable.assign(shares))
    assert copies(variable) == [[5], [6]]


def test_writes_of_different_variables_at_one_meeting_are_named(strategy):
    one = strategy.create_variable([0.0], "one", aggregation=Aggregation.SUM)
    two = strategy.create_variable([0.0], "two", aggregation=Aggregation.SUM)
    with pytest.raises(MismatchError, match=r"two.assign\(\).*one.assign\(\)|one.assign\(\).*two.assign\(\)"):
        strategy.run(lambda: (two if own_replica() else one).assign([1.0]))


def test_another_strategys_replicas_cannot_use_it(strategy):
    variable = strategy.create_variable([0.0])
    other = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(ContextError, match="belongs to"):
        other.run(lambda: variable.assign([1.0]))
    with pytest.raises(ContextError, match="belongs to"):
        other.run(variable.value)


# -------------------------------------------------------------------- scatter

SLICES = {"numpy": lambda rows, indices: cd.IndexedSlices(np.float32(rows), np.array(indices))}
SLICES["torch"] = lambda rows, indices: cd.IndexedSlices(torch.tensor(rows), torch.tensor(indices))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("method", "right"),
    [
        ("scatter_add", [2, 9, 8]),
        ("scatter_sub", [2, -5, 8]),
        ("scatter_mul", [2, 24, 8]),
        ("scatter_div", [2, 2 / 12, 8]),
        ("scatter_min", [2, 2, 8]),
        ("scatter_max", [2, 4, 8]),
        ("scatter_update", [2, 4, 8]),
    ],
)
def test_rows_are_scattered_to_every_copy_and_repeated_indices_all_count(strategy, library, method, right):
    initial = LIBRARIES[library]([[2.0], [2.0], [8.0]])
    variable = strategy.create_variable(initial, dtype="float32")
    getattr(variable, method)(SLICES[library]([[3.0], [4.0]], [1, 1]))
    for array in copies(variable):
        assert np.allclose(np.ravel(array), right)


def test_scatter_in_replicas_follows_the_aggregation(strategy):
    def scattered(aggregation, method="scatter_add"):
        variable = strategy.create_variable(np.zeros((2, 1), np.float32), aggregation=aggregation)
        strategy.run(
            lambda: getattr(variable, method)(SLICES["numpy"]([[2.0 + own_replica()]], [own_replica()]))
        )
        return [np.ravel(array).tolist() for array in copies(variable)]

    assert scattered(Aggregation.NONE) == [[2, 0], [0, 3]]
    assert scattered(Aggregation.SUM) == [[2, 3]] * 2
    assert scattered(Aggregation.MEAN) == [[1, 1.5]] * 2
    assert scattered(Aggregation.ONLY_FIRST_REPLICA) == [[2, 0]] * 2
    assert scattered(Aggregation.ONLY_FIRST_REPLICA, "scatter_max") == [[2, 0]] * 2


@pytest.mark.parametrize("aggregation", [Aggregation.SUM, Aggregation.MEAN])
@pytest.mark.parametrize("method", ["scatter_min", "scatter_max", "scatter_update"])
def test_rows_of_several_replicas_have_no_common_minimum(strategy, aggregation, method):
    variable = strategy.create_variable([[1.0]], aggregation=aggregation)
    with pytest.raises(NotImplementedError, match="ONLY_FIRST_REPLICA"):
        getattr(variable, method)(SLICES["numpy"]([[1.0]], [0]))


def test_bad_slices_are_refused(strategy):
    variable = strategy.create_variable([[1.0]])
    for index in (1, -1):
        with pytest.raises(MismatchError, match="outside of its 1 row"):
            variable.scatter_add(SLICES["numpy"]([[1.0]], [index]))
    with pytest.raises(ConversionError, match="takes IndexedSlices"):
        variable.scatter_add(np.ones((1, 1)))
    with pytest.raises(NotImplementedError, match="has no scatter"):
        on_read(strategy, [[1.0]], Aggregation.SUM).scatter_add(SLICES["numpy"]([[1.0]], [0]))


# -------------------------------------------------------------------- synchronized on reading


@each_library
@pytest.mark.parametrize(
    ("aggregation", "right"),
    [(Aggregation.SUM, 13.0), (Aggregation.MEAN, 6.5), (Aggregation.ONLY_FIRST_REPLICA, 6.0)],
    ids=lambda row: getattr(row, "name", ""),
)
def test_replicas_write_their_own_and_a_read_brings_them_together(strategy, make, aggregation, right):
    variable = on_read(strategy, make([5.0]), aggregation)
    assert isinstance(variable, cd.SyncOnReadVariable)
    own = strategy.run(lambda: variable.assign_add(make([1.0 + own_replica()])))
    assert [array.tolist() for array in own.values] == copies(variable) == [[6], [7]]
    assert strategy.run(lambda: float(variable.value()[0])).values == (6, 7)
    assert variable.read_value().tolist() == [right]
    assert (variable + 1).tolist() == [right + 1]
    assert np.asarray(variable).tolist() == [right]


def test_copies_without_an_aggregation_have_no_common_value(strategy):
    variable = on_read(strategy, [5.0], Aggregation.NONE)
    for use in (variable.read_value, lambda: variable.assign([1.0]), lambda: variable.assign_add([1.0])):
        with pytest.raises(ValueError, match="no common value"):
            use()
    assert variable.shape == (1,)
    assert variable.dtype == np.float32
    assert strategy.run(lambda: float(variable.value()[0])).values == (5, 5)


def test_assigning_a_sum_shares_it_among_the_copies(strategy):
    variable = on_read(strategy, [0.0], Aggregation.SUM)
    variable.assign([7.0])
    assert copies(variable) == [[3.5], [3.5]]
    assert variable.value().tolist() == [7]
    whole = on_read(strategy, [0], Aggregation.SUM)
    whole.assign([7])
    assert copies(whole) == [[3], [3]]
    for method in ("assign_add", "assign_sub"):
        with pytest.raises(ReduceOpError, match="how much belongs to each copy"):
            getattr(variable, method)([1.0])


@pytest.mark.parametrize("aggregation", [Aggregation.MEAN, Aggregation.ONLY_FIRST_REPLICA])
def test_assigning_anything_else_goes_to_each_copy(strategy, aggregation):
    variable = on_read(strategy, [0.0], aggregation)
    variable.assign([7.0])
    assert variable.assign_add([1.0]).tolist() == [8]
    variable.assign_sub([2.0])
    assert copies(variable) == [[6], [6]]
    with pytest.raises(ValueError, match="PerReplica"):
        variable.assign(cd.PerReplica([1.0, 2.0]))


# -------------------------------------------------------------------- lives


@pytest.mark.parametrize("kind", [Synchronization.AUTO, Synchronization.ON_READ])
def test_a_variable_is_copied_anywhere_but_in_the_scope_of_another_strategy(strategy, kind):
    variable = strategy.create_variable([1.0], synchronization=kind, aggregation=Aggregation.SUM)
    with (
        cd.OneDeviceStrategy("cpu:0").scope(),
        pytest.raises(RuntimeError, match="cannot be copied in the scope"),
    ):
        copy.deepcopy(variable)
    with strategy.scope():
        copy.deepcopy(variable)
    made = copy.deepcopy([variable, variable])
    assert made[0] is made[1] is not variable
    variable.assign([5.0])
    assert copies(made[0]) == [[1], [1]]
    assert type(made[0]) is type(variable)
    assert made[0].aggregation is Aggregation.SUM


def test_a_variable_is_collected_when_nobody_holds_it(strategy):
    variable = strategy.create_variable([1.0])
    alive = weakref.ref(variable)
    strategy.run(variable.value)
    del variable
    gc.collect()
    assert alive() is None


def test_one_replica_has_variables_too():
    strategy = cd.MirroredStrategy(["cpu:0"])
    variable = strategy.create_variable([1.0], aggregation=Aggregation.SUM)
    assert variable.assign([2.0]).tolist() == [2]
    assert strategy.run(lambda: variable.assign_add(np.float32([1.0]))).tolist() == [3]
    counter = on_read(strategy, [1.0], Aggregation.SUM)
    counter.assign([4.0])
    assert counter.value().tolist() == [4]
    assert "MirroredVariable('Variable', SUM" in repr(variable)


@pytest.mark.parametrize("kind", ["mirrored", "on read"])
def test_a_variable_that_cannot_be_pickled_says_what_to_do(strategy, kind):
    if kind == "mirrored":
        variable = strategy.create_variable(1.0, "w")
    else:
        variable = on_read(strategy, 1.0, cd.VariableAggregation.SUM, name="w")
    for copied in (pickle.dumps, copy.copy):
        with pytest.raises(ConversionError, match=r"variable 'w' cannot be pickled.*numpy\(\)"):
            copied(variable)

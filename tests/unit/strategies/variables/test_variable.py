"""A variable computes as its array does, keeps its dtype and shape, and hands out no memory of its own."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

import crossdevice as cd
from crossdevice.errors import (
    ConversionError,
    CrossDeviceError,
    DtypeMismatchError,
    LibraryMismatchError,
    OptionError,
    ShapeMismatchError,
)
from crossdevice.values.distributed import components_of

LIBRARIES = {"numpy": lambda x: np.array(x, np.float32), "torch": torch.tensor}
KINDS = {
    "plain": lambda value: cd.Variable(value, device="cpu:1"),
    "mirrored": lambda value: strategy().create_variable(value),
    "on read": lambda value: strategy().create_variable(value, synchronization="ON_READ", aggregation="MEAN"),
    "copy": lambda value: KEPT.append(strategy().create_variable(value)) or KEPT[-1].values[1],
}
KEPT: list = []  # copies do not keep the variables alive that they belong to

each_library = pytest.mark.parametrize("make", LIBRARIES.values(), ids=LIBRARIES)
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def strategy():
    return cd.MirroredStrategy(["cpu:0", "cpu:1"])


@each_library
@each_kind
def test_it_computes_as_its_array_does(make, kind):
    variable = kind(make([1.0, 2.0]))
    assert (variable * 0.5 + make([1.0, 1.0])).tolist() == [1.5, 2]
    assert (1 - variable).tolist() == [0, -1]
    assert (make([3.0, 3.0]) / variable).tolist() == [3, 1.5]
    assert (variable @ variable) == 5
    assert (variable >= 2).tolist() == [False, True]
    assert [(-variable)[1], (+variable)[1], abs(variable)[1], variable[1]] == [-2, 2, 2, 2]
    assert variable.sum() == 3
    assert variable.shape == (2,)
    assert str(variable.dtype).endswith("float32")
    assert np.asarray(variable).tolist() == variable.numpy().tolist() == [1, 2]
    assert type(variable.numpy()) is np.ndarray
    assert torch.from_dlpack(variable).tolist() == np.from_dlpack(variable).tolist() == [1, 2]
    assert [float(kind(make(2.0))), int(kind(make(2.0))), bool(kind(make(0.0)))] == [2, 2, False]


@each_library
@each_kind
def test_nothing_that_it_hands_out_can_be_used_to_write_to_it(make, kind):
    given = make([1.0, 2.0])
    variable = kind(given)
    given[0] = 99
    readers = [
        lambda: variable.value(),
        lambda: variable.read_value(),
        lambda: variable[:],
        lambda: +variable,
        lambda: np.asarray(variable),
        lambda: variable.numpy(),
        lambda: torch.from_dlpack(variable),
        lambda: None if isinstance(variable, cd.DistributedValues) else variable.assign([1.0, 2.0]).value(),
        lambda: (
            components_of(variable.assign([1.0, 2.0]))[-1]
            if isinstance(variable, cd.DistributedValues)
            else None
        ),
    ]
    for read in readers:
        seen = read()
        with contextlib.suppress(ValueError, TypeError):  # a read-only view; or None
            seen[0] = 1234
        assert variable.numpy().tolist() == [1, 2]
    later = make([3.0, 4.0])
    variable.assign(later)
    later[0] = 99
    assert variable.numpy().tolist() == [3, 4]


@each_library
def test_updates_write_what_was_computed_of_a_copy(make):
    owner = strategy()
    variable = owner.create_variable(make([1.0, 2.0]))
    owner.extended.update(variable, lambda v, g: v.assign(v * 0.5 + g), args=(make([1.0, 1.0]),))
    assert [copy.numpy().tolist() for copy in variable.values] == [[1.5, 2]] * 2


def test_a_plain_variable_keeps_its_dtype_and_shape():
    for value in (1, 1.5, [1, 2], lambda: [1.0], np.float64(2), np.ones(2, np.int8), True):
        variable = cd.Variable(value)
        before = variable.dtype, variable.shape
        variable.assign(variable.numpy())
        if variable.dtype != bool:
            variable.assign_add(1)
            variable.assign_sub(np.ones(variable.shape, np.int8))
        assert (variable.dtype, variable.shape) == before
    counts = cd.Variable([1, 2], name="counts")
    with pytest.raises(DtypeMismatchError, match="'counts' is int32"):
        counts.assign([1.5, 2.5])
    with pytest.raises(ShapeMismatchError, match="'counts' has shape"):
        counts.assign([1, 2, 3])
    with pytest.raises(ShapeMismatchError, match="'counts' has shape"):
        counts.assign_add([[1, 2]])
    with pytest.raises(LibraryMismatchError, match="numpy"):
        counts.assign(torch.ones(2, dtype=torch.int32))
    with pytest.raises(ConversionError):
        counts.assign("text")
    assert counts.numpy().tolist() == [1, 2]
    for value in ("text", object(), None):
        with pytest.raises(ConversionError, match="expected an array or a number"):
            cd.Variable(value)


def rows(values, indices, shape=None):
    return cd.IndexedSlices(np.float32(values), np.array(indices), shape)


@each_library
@each_kind
def test_a_sparse_value_is_written_as_the_whole_array_it_stands_for(make, kind):
    variable = kind(make([[1.0], [2.0], [3.0]]))
    numbers = {np.ndarray: np.array, torch.Tensor: torch.tensor}[type(make([1.0]))]
    slices = cd.IndexedSlices(make([[5.0], [6.0], [7.0]]), numbers([2, 0, 2]), (3, 1))
    variable.assign(slices)
    assert np.ravel(variable.numpy()).tolist() == [6, 0, 12]
    variable.assign_add(slices)
    variable.assign_sub(cd.IndexedSlices(make([[1.0]]), numbers([1]), (3, 1)))
    assert np.ravel(variable.numpy()).tolist() == [12, -1, 24]


def test_rows_may_be_given_by_lists_of_indices_and_as_one_number_for_all():
    variable = cd.Variable([[1.0, 2.0], [3.0, 4.0]])
    variable.scatter_add(cd.IndexedSlices([[5.0, 6.0]], [1]))
    variable.scatter_sub(cd.IndexedSlices(np.float32(1), 0))
    assert variable.numpy().tolist() == [[0, 1], [8, 10]]


WRONG_WRITES = {
    "larger than the variable": (
        "assign_add",
        np.ones((3, 2)),
        ShapeMismatchError,
        r"\(2, 2\); got .* \(3, 2\)",
    ),
    "with more axes": (
        "assign_sub",
        np.ones((1, 2, 2)),
        ShapeMismatchError,
        r"got a value of shape \(1, 2, 2\)",
    ),
    "of no elements": ("assign_add", [], ShapeMismatchError, r"got a value of shape \(0,\)"),
    "of objects": ("assign", np.array([[object(), 1]] * 2), DtypeMismatchError, "it was given object"),
    "sparse without a shape": ("assign", rows([[1, 1]], [0]), ConversionError, "no dense_shape"),
    "sparse of another shape": ("assign", rows([[1, 1]], [0], (9, 2)), ShapeMismatchError, r"shape \(9, 2\)"),
    "rows of another shape": (
        "scatter_add",
        rows([[1, 1, 1]], [0]),
        ShapeMismatchError,
        r"expected \(1, 2\)",
    ),
    "rows without indices": (
        "scatter_update",
        rows([[1, 1]] * 2, [0]),
        ShapeMismatchError,
        r"\(2, 2\); expected",
    ),
    "rows to be repeated": ("scatter_add", rows([[1]], [0]), ShapeMismatchError, "or one number for all"),
    "rows by fractions": (
        "scatter_min",
        rows([[1, 1]], [0.5]),
        DtypeMismatchError,
        "takes rows by integers; got indices that are float64",
    ),
    "rows by words": (
        "scatter_max",
        cd.IndexedSlices(np.float32([[1, 1]]), ["a"]),
        DtypeMismatchError,
        "takes rows by integers",
    ),
    "rows outside": ("scatter_add", rows([[1, 1]], [2]), CrossDeviceError, "outside of its 2 rows"),
}


@pytest.mark.parametrize("wrong", WRONG_WRITES)
@pytest.mark.parametrize("kind", ["plain", "mirrored", "copy"])
def test_a_wrong_write_is_refused_in_words_of_the_variable_and_changes_nothing(kind, wrong):
    method, value, error, words = WRONG_WRITES[wrong]
    variable = KINDS[kind](np.ones((2, 2), np.float32))
    with pytest.raises(error, match=words):
        getattr(variable, method)(value)
    assert variable.numpy().tolist() == [[1, 1], [1, 1]]


@each_library
def test_words_and_objects_are_refused_and_huge_numbers_are_floats(make):
    variable = cd.Variable(make([1.0]))
    for value in (np.array(["2"]), np.array([object()]), np.array(["2020-01-01"], "datetime64[D]")):
        with pytest.raises(DtypeMismatchError, match="is float32; it was given"):
            variable.assign(value)
    assert float(variable.assign_add(2**70)[0]) == 2.0**70
    with pytest.raises(DtypeMismatchError, match="which would lose part"):
        cd.Variable(1).assign(2**70)


def test_a_scalar_has_no_rows():
    with pytest.raises(ShapeMismatchError, match="it is a scalar, which has no rows; use assign"):
        cd.Variable(1.0).scatter_add(rows([1], [0]))


@pytest.mark.parametrize(
    "make", [cd.Variable, lambda *args, **named: strategy().create_variable(*args, **named)]
)
def test_names_are_strings_and_shapes_are_tuples_of_numbers(make):
    with pytest.raises(OptionError, match="must be a string or None, got an ndarray"):
        make([1.0, 2.0], name=np.ones(2))
    for shape in (2, 2.0, np.ones(1), "2"):
        with pytest.raises(OptionError, match="must be a tuple of whole numbers"):
            make([1.0, 2.0], shape=shape)
    assert make([1.0, 2.0], shape=np.array([2])).shape == (2,)

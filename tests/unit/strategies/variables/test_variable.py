"""A variable computes as its array does, keeps its dtype and shape, and hands out no memory of its own."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch

import crossdevice as cd
from crossdevice.errors import ConversionError, DtypeMismatchError, LibraryMismatchError, ShapeMismatchError
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

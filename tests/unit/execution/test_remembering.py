"""Calls that look like one made before skip all checks, and calls that do not are read anew."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.backends.registry import backend_of_type
from crossdevice.errors import ShapeMismatchError
from crossdevice.execution.remembering import RememberedBatch

torch = pytest.importorskip("torch")
torch_backend = pytest.importorskip("crossdevice.backends.torch_backend")

LIBRARIES = {"numpy": np.array, "torch": lambda array: torch.from_numpy(np.array(array))}


@pytest.fixture(params=LIBRARIES)
def make(request):
    return LIBRARIES[request.param]


@pytest.fixture
def made_again(monkeypatch):
    """Counts calls that skipped the checks."""
    calls = []
    run = RememberedBatch.__call__

    def counted(self, columns):
        calls.append(columns)
        return run(self, columns)

    monkeypatch.setattr(RememberedBatch, "__call__", counted)
    return calls


def batch(make, sizes=(3, 5, 1), dtype=np.float32, count=2, devices=None, start=1):
    return [
        cd.PerReplica([make(np.full(size, start + replica, dtype)) for replica in range(count)], devices)
        for size in sizes
    ]


def to_itself(values):
    return [(value, value) for value in values]


def first_numbers(results):
    values = [result.values if isinstance(result, cd.Mirrored) else (result,) for result in results]
    return [[float(component.reshape(-1)[0]) for component in components] for components in values]


def test_a_batch_that_looks_the_same_is_not_checked_again(make, made_again):
    ops = cd.DirectAllReduce()
    for start in range(1, 5):
        results = ops.batch_reduce("sum", to_itself(batch(make, start=start)))
        assert first_numbers(results) == [[2 * start + 1] * 2] * 3
        assert [result.values[0].shape for result in results] == [(3,), (5,), (1,)]
    assert len(made_again) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": (3, 4, 1)},
        {"dtype": np.float64},
        {"count": 3},
        {"devices": ["cpu:4", "cpu:7"]},
        {"sizes": (3, 5, 1, 1)},
    ],
    ids=str,
)
def test_a_batch_that_looks_different_is(make, made_again, change):
    ops = cd.DirectAllReduce()
    for _ in range(2):
        ops.batch_reduce("sum", to_itself(batch(make)))
    assert len(made_again) == 1
    values = batch(make, **change)
    results = ops.batch_reduce("sum", to_itself(values))
    assert len(made_again) == 1
    for value, result in zip(values, results, strict=True):
        assert (result.devices, len(result.values)) == (value.devices, len(value.values))
        assert result.values[0].dtype == value.values[0].dtype
        assert result.values[0].shape == value.values[0].shape


def test_destinations_are_part_of_what_is_the_same(make, made_again):
    ops, values = cd.DirectAllReduce(), batch(make)
    others = cd.PerReplica([0.0], ["cpu:3"])
    for target in ("cpu:1", others, "cpu:2", values[0].values[0], "cpu:1"):
        for _ in range(2):
            results = ops.batch_reduce("sum", [(value, target) for value in values])
            assert first_numbers(results) == [[3.0]] * 3
    assert len(made_again) == 4
    ops.batch_reduce("sum", to_itself(values))
    assert len(made_again) == 4


def test_values_with_devices_are_told_from_those_without(make, made_again):
    ops = cd.DirectAllReduce()
    for devices in (None, ["cpu:0", "cpu:1"], ["cpu:1", "cpu:0"], ["cpu:1", "cpu:0"], None):
        results = ops.batch_reduce("sum", to_itself(batch(make, devices=devices)))
        expected = tuple(map(cd.Device.parse, devices or ["cpu:0", "cpu:1"]))
        assert {result.devices for result in results} == {expected}
    assert len(made_again) == 2


def test_mistakes_are_found_after_calls_without_any(make):
    ops = cd.DirectAllReduce()
    for _ in range(2):
        ops.batch_reduce("sum", to_itself(batch(make)))
    values = batch(make)
    values[1] = cd.PerReplica([make(np.ones(5, np.float32)), make(np.ones(4, np.float32))])
    with pytest.raises(ShapeMismatchError, match=r"replica 1 .* has shape \(4,\)"):
        ops.batch_reduce("sum", to_itself(values))


def test_numbers_structures_and_slices_are_read_every_time(make, made_again):
    ops = cd.DirectAllReduce()
    slices = cd.IndexedSlices(make(np.ones((1, 2), np.float32)), make(np.array([1])), (3, 2))
    variables = [cd.Variable(make(np.ones(2, np.float32)), device=f"cpu:{k}") for k in range(2)]
    for value in (
        cd.PerReplica([1.0, 2.0]),
        cd.PerReplica(variables),
        cd.PerReplica([{"a": make(np.ones(2, np.float32))}] * 2),
        cd.PerReplica([slices, slices]),
        cd.PerReplica([{}, {}]),
    ):
        for _ in range(2):
            assert len(ops.batch_reduce("sum", to_itself([*batch(make), value, *batch(make)]))) == 7
    assert not made_again


def test_settings_that_change_make_an_object_forget(make, made_again):
    ops = cd.ReductionToOneDevice()
    for _ in range(2):
        ops.batch_reduce("sum", to_itself(batch(make)))
    ops.accumulation_fn = lambda arrays: arrays[0]
    results = ops.batch_reduce("sum", to_itself(batch(make)))
    assert first_numbers(results) == [[1.0, 1.0]] * 3
    assert len(made_again) == 1


def test_a_variable_beside_an_array_is_read_in_every_call(make):
    ops = cd.DirectAllReduce()
    variable = cd.Variable(make(np.zeros(3, np.float32)), device="cpu:1")
    for expected in range(1, 4):
        variable.assign_add(make(np.ones(3, np.float32)))
        value = cd.PerReplica([make(np.zeros(3, np.float32)), variable], ["cpu:0", "cpu:1"])
        assert first_numbers([ops.reduce("sum", value, value)]) == [[expected, expected]]


def test_a_look_at_more_arrays_does_not_fit(make):
    arrays = [make(np.ones(3, np.float32)) for _ in range(3)]
    look = backend_of_type(type(arrays[0])).look_of(arrays)
    assert look.fits([array + 1 for array in arrays])
    assert not look.fits(arrays[:2])
    assert not look.fits([*arrays, arrays[0]])


def test_a_look_does_not_keep_arrays(make):
    array = make(np.ones(3, np.float32))
    look = backend_of_type(type(array)).look_of([array])
    gone = weakref.ref(array)
    del array
    assert gone() is None
    assert look.fits([make(np.ones(3, np.float32))])


@pytest.mark.parametrize("guards", [None, lambda *tensors: tensors], ids=["gone", "called in another way"])
def test_tensors_are_compared_by_signature_where_pytorch_does_not_do_it(monkeypatch, made_again, guards):
    monkeypatch.setattr(torch_backend, "_TensorGuards", guards)
    ops = cd.DirectAllReduce()
    for start in range(1, 4):
        results = ops.batch_reduce("sum", to_itself(batch(LIBRARIES["torch"], start=start)))
        assert first_numbers(results) == [[2 * start + 1] * 2] * 3
    assert len(made_again) == 2


def test_settings_that_are_deleted_make_an_object_forget():
    ops, values = cd.DirectAllReduce(), batch(np.array)
    ops.uses_engine = True
    for _ in range(2):
        ops.reduce("sum", values[0], values[0])
        ops.batch_reduce("sum", to_itself(values))
    assert {"_kept", "_memory"} <= ops.__dict__.keys()
    del ops.uses_engine
    assert not {"_kept", "_memory"} & ops.__dict__.keys()

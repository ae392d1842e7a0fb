"""Calls that look like one made before skip all checks, and calls that do not are read anew."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.errors import MismatchError, OutError, ShapeMismatchError
from crossdevice.execution.local import batch as batch_module
from crossdevice.kernels.host import fused_pass as fused_pass_module
from crossdevice.kernels.host.fixed_arrays import compiled_are_alike
from crossdevice.kernels.host.fused_pass import SmallPass, fused_pass
from crossdevice.kernels.host.work_list import TUPLE_HEADER_BYTES
from crossdevice.process_groups.thread_group import run_ranks

torch = pytest.importorskip("torch")
torch_backend = pytest.importorskip("crossdevice.backends.torch_backend")

LIBRARIES = {"numpy": np.array, "torch": lambda array: torch.from_numpy(np.array(array))}


@pytest.fixture(params=LIBRARIES)
def make(request):
    return LIBRARIES[request.param]


def hits(ops):
    """How many calls were known."""
    return ops._known_calls.hits


def batch(make, sizes=(3, 5, 1), dtype=np.float32, count=2, devices=None, start=1):
    return [
        cd.PerReplica([make(np.full(size, start + replica, dtype)) for replica in range(count)], devices)
        for size in sizes
    ]


def to_itself(values):
    return [(value, value) for value in values]


def numbers(array):
    return np.asarray(array).reshape(-1).tolist()


def first_numbers(results):
    values = [result.values if isinstance(result, cd.Mirrored) else (result,) for result in results]
    return [[float(component.reshape(-1)[0]) for component in components] for components in values]


def test_a_batch_that_looks_the_same_is_not_checked_again(make):
    ops = cd.DirectAllReduce()
    for start in range(1, 5):
        results = ops.batch_reduce("sum", to_itself(batch(make, start=start)))
        assert first_numbers(results) == [[2 * start + 1] * 2] * 3
        assert [result.values[0].shape for result in results] == [(3,), (5,), (1,)]
    assert hits(ops) == 3


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
def test_a_batch_that_looks_different_is(make, change):
    ops = cd.DirectAllReduce()
    for _ in range(2):
        ops.batch_reduce("sum", to_itself(batch(make)))
    assert hits(ops) == 1
    values = batch(make, **change)
    results = ops.batch_reduce("sum", to_itself(values))
    assert hits(ops) == 1
    for value, result in zip(values, results, strict=True):
        assert (result.devices, len(result.values)) == (value.devices, len(value.values))
        assert result.values[0].dtype == value.values[0].dtype
        assert result.values[0].shape == value.values[0].shape


def test_destinations_are_part_of_what_is_the_same(make):
    ops, values = cd.DirectAllReduce(), batch(make)
    others = cd.PerReplica([0.0], ["cpu:3"])
    for target in ("cpu:1", others, "cpu:2", values[0].values[0], "cpu:1"):
        for _ in range(2):
            results = ops.batch_reduce("sum", [(value, target) for value in values])
            assert first_numbers(results) == [[3.0]] * 3
    assert hits(ops) == 5
    ops.batch_reduce("sum", to_itself(values))
    assert hits(ops) == 5


def test_values_with_devices_are_told_from_those_without(make):
    ops = cd.DirectAllReduce()
    for devices in (None, ["cpu:0", "cpu:1"], ["cpu:1", "cpu:0"], ["cpu:1", "cpu:0"], None):
        results = ops.batch_reduce("sum", to_itself(batch(make, devices=devices)))
        expected = tuple(map(cd.Device.parse, devices or ["cpu:0", "cpu:1"]))
        assert {result.devices for result in results} == {expected}
    assert hits(ops) == 2


def test_mistakes_are_found_after_calls_without_any(make):
    ops = cd.DirectAllReduce()
    for _ in range(2):
        ops.batch_reduce("sum", to_itself(batch(make)))
    values = batch(make)
    values[1] = cd.PerReplica([make(np.ones(5, np.float32)), make(np.ones(4, np.float32))])
    with pytest.raises(ShapeMismatchError, match=r"replica 1 .* has shape \(4,\)"):
        ops.batch_reduce("sum", to_itself(values))


def test_memory_for_results_is_looked_at_after_calls_in_which_it_was_good(make):
    ops, memory = cd.ReductionToOneDevice(), make(np.zeros(8, np.float32))
    value, out = memory[:4], make(np.zeros(4, np.float32))
    for _ in range(3):
        assert ops.reduce("sum", value, "cpu:0", out=out) is out
    assert ops.reduce("sum", out, "cpu:0", out=out) is out
    with pytest.raises(OutError, match="overlaps replica 0"):
        ops.reduce("sum", value, "cpu:0", out=memory[2:6])
    for wrong in (make(np.zeros(5, np.float32)), make(np.zeros(8, np.float32))[::2], [0.0] * 4):
        with pytest.raises(OutError):
            ops.reduce("sum", value, "cpu:0", out=wrong)
    if make is np.array:
        out.flags.writeable = False
        with pytest.raises(OutError, match="is read-only"):
            ops.reduce("sum", value, "cpu:0", out=out)


def test_numbers_structures_and_slices_are_read_every_time(make):
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
    assert hits(ops) == 0


def test_settings_that_change_make_an_object_forget(make):
    ops = cd.ReductionToOneDevice()
    for _ in range(2):
        ops.batch_reduce("sum", to_itself(batch(make)))
    ops.accumulation_fn = lambda arrays: arrays[0]
    assert hits(ops) == 0, "the new setting has made it forget"
    results = ops.batch_reduce("sum", to_itself(batch(make)))
    assert first_numbers(results) == [[1.0, 1.0]] * 3
    assert hits(ops) == 0


def test_a_variable_beside_an_array_is_read_in_every_call(make):
    ops = cd.DirectAllReduce()
    variable = cd.Variable(make(np.zeros(3, np.float32)), device="cpu:1")
    for expected in range(1, 4):
        variable.assign_add(make(np.ones(3, np.float32)))
        value = cd.PerReplica([make(np.zeros(3, np.float32)), variable], ["cpu:0", "cpu:1"])
        assert first_numbers([ops.reduce("sum", value, value)]) == [[expected, expected]]


def test_settings_that_are_deleted_make_an_object_forget():
    ops, values = cd.DirectAllReduce(), batch(np.array)
    ops.uses_engine = True
    for _ in range(2):
        ops.reduce("sum", values[0], values[0])
        ops.batch_reduce("sum", to_itself(values))
    assert {"_planner", "_known_calls"} <= ops.__dict__.keys()
    del ops.uses_engine
    assert not {"_planner", "_known_calls"} & ops.__dict__.keys()


def test_one_value_is_known_when_it_comes_again_whatever_says_where(make):
    ops = cd.DirectAllReduce()
    value = batch(make, sizes=(3,))[0]
    for number, target in enumerate((value, "cpu:1", cd.Device("cpu", 2), cd.PerReplica([0, 0]))):
        for _ in range(2):
            ops.reduce("sum", value, target)
        assert hits(ops) == number + 1


def test_a_strategy_makes_known_calls_too(make):
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    value = batch(make, sizes=(3,))[0]
    for _ in range(3):
        assert numbers(strategy.reduce("sum", value, axis=None)) == [3.0] * 3
    assert hits(strategy.extended.cross_device_ops) == 2


def test_between_processes_calls_are_known_too_and_made_by_all(make):
    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        totals = []
        for start in range(3):
            value = make(np.full(3, start + group.rank, np.float32))
            totals += [ops.reduce("sum", value, "cpu:0"), ops.reduce("sum", cd.PerReplica([value]), "cpu:0")]
            into = make(np.zeros(3, np.float32))
            assert ops.reduce("sum", value, "cpu:0", out=into) is into
            totals.append(into)
        return [numbers(total) for total in totals], hits(ops)

    assert run_ranks(2, program) == [([[2.0 * s + 1] * 3 for s in range(3) for _ in range(3)], 7)] * 2


def test_a_known_call_between_processes_is_compared_by_its_signature():
    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        for size in (3, 4):
            ops.reduce("sum", np.ones(size, np.float32), "cpu:0")
        with pytest.raises(MismatchError, match=r"calls reduce SUM \(accurate\) of float32 \([34],\)"):
            ops.reduce("sum", np.ones(3 + group.rank, np.float32), "cpu:0")
        return hits(ops)

    assert run_ranks(2, program) == [1, 1]


def test_a_first_call_reads_its_value_once(monkeypatch):
    read = []
    read_value = batch_module.read_value
    monkeypatch.setattr(batch_module, "read_value", lambda value: read.append(value) or read_value(value))
    ops, value = cd.DirectAllReduce(), cd.PerReplica([np.float32([1]), np.float32([2])])
    ops.reduce("sum", value, value)
    ops.reduce("sum", value, value)
    assert len(read) == 1


def frames_to_the_kernels(call):
    """How many Python functions a call enters, one inside the other, up to the entry of the kernels."""
    depths, entries = [], {fused_pass.__code__, SmallPass.__call__.__code__}

    def profile(frame, event, argument):
        if event == "call" and frame.f_code in entries:
            depth = 0
            while frame is not None and frame.f_code is not call.__code__:
                depth, frame = depth + 1, frame.f_back
            depths.append(depth)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return depths[0]


def test_it_is_a_short_walk_to_the_kernels():
    value = cd.PerReplica([np.float32([1]), np.float32([2])])
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    assert frames_to_the_kernels(lambda: strategy.reduce("sum", value, axis=None)) <= 8
    ops = cd.DirectAllReduce()
    ops.reduce("sum", value, value)
    assert frames_to_the_kernels(lambda: ops.reduce("sum", value, value)) <= 5


def test_between_processes_the_walk_is_hardly_longer():
    def program(group):
        ops, value, out = cd.CollectiveAllReduce(group=group), np.float32([1]), np.empty(1, np.float32)
        ops.reduce("sum", value, "cpu:0", out=out)
        return frames_to_the_kernels(lambda: ops.reduce("sum", value, "cpu:0", out=out))

    assert max(run_ranks(2, program)) <= 8


@pytest.mark.parametrize("shape", [(), (3, 50)])
def test_known_arrays_of_any_shape_have_the_results_of_a_first_call(shape):
    chosen = np.random.default_rng(0)
    wide = [chosen.standard_normal(shape) * 10.0 ** chosen.integers(-200, 200, shape) for _ in range(3)]
    exact = cd.CommunicationOptions(precision="exact")
    for arrays, op, options in (
        (wide, "median", None),
        (wide, "mean", exact),  # of which kernels leave some elements to NumPy
        ([np.asarray(array + 1j * array) for array in wide], "sum", exact),
        ([np.asarray(array + 1j * array) for array in wide], "prod", None),
        ([np.asarray(chosen.integers(-(2**62), 2**62, shape)) for _ in range(3)], "mean", None),
    ):
        ops, value = cd.DirectAllReduce(), cd.PerReplica([np.asarray(array) for array in arrays])
        first, second = (ops.reduce(op, value, "cpu:0", options) for _ in range(2))
        assert ops._known_calls.hits == 1
        assert first.shape == second.shape == shape
        assert first.tobytes() == second.tobytes(), (op, options)


class OwnArray(np.ndarray):
    """An array of another type."""


UNLIKE = {
    "shape": np.ones((3, 2), np.float32),
    "dimensions": np.ones((2, 3, 1), np.float32),
    "dtype": np.ones((2, 3), np.float64),
    "byte order": np.ones((2, 3), ">f4"),
    "order of axes": np.ones((3, 2), np.float32).T,
    "gaps": np.ones((2, 6), np.float32)[:, ::2],
    "type": np.ones((2, 3), np.float32).view(OwnArray),
    "a number": np.float32(1),
    "no array": None,
}


def test_arrays_are_alike_if_checks_see_no_difference():
    are_alike = compiled_are_alike()
    first, equal = np.ones((2, 3), np.float32), np.zeros((4, 3), np.float32)[1:3]
    for name, other in {"nothing": equal, **UNLIKE}.items():
        items = (first, equal, other)
        assert are_alike(id(items) + TUPLE_HEADER_BYTES, 3) is (name == "nothing"), name


@pytest.mark.parametrize("name", ["byte order", "order of axes", "gaps", "type"])
def test_a_known_call_does_not_stand_for_one_with_an_array_that_differs(name):
    ops, other = cd.DirectAllReduce(), UNLIKE[name]
    for second in (np.ones((2, 3), np.float32), other, np.ones((2, 3), np.float32), other):
        result = ops.reduce("sum", cd.PerReplica([np.full((2, 3), 2, np.float32), second]), "cpu:0")
        assert result.tolist() == [[3] * 3] * 2
    assert hits(ops) == 2


def test_known_calls_use_the_kernels_that_were_selected_last(monkeypatch):
    ops, value = cd.DirectAllReduce(), batch(np.array)[0]
    for _ in range(2):
        expected = first_numbers([ops.reduce("sum", value, value)])
    passes, numpy_pass = [], fused_pass_module.numpy_pass
    monkeypatch.setattr(
        fused_pass_module, "numpy_pass", lambda *call: passes.append(call) or numpy_pass(*call)
    )
    fused_pass_module.select_kernels("numpy")
    try:
        assert first_numbers([ops.reduce("sum", value, value)]) == expected
    finally:
        fused_pass_module.select_kernels(None)
    assert (len(passes), hits(ops)) == (1, 2)

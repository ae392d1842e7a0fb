"""Calls that look like one made before skip all checks, and calls that do not are read anew."""

from __future__ import annotations

import operator
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.errors import ConversionError, MismatchError, OutError, ShapeMismatchError
from crossdevice.execution import runner as runner_module
from crossdevice.kernels.host import fused_pass as fused_pass_module
from crossdevice.kernels.host.fixed_arrays import Separation, Signature
from crossdevice.kernels.host.fused_pass import RepeatedPasses, SmallPass, fused_pass, place_of
from crossdevice.process_groups.engines.thread_engine import run_ranks
from entered_functions import num_entered

torch = pytest.importorskip("torch")
torch_backend = pytest.importorskip("crossdevice.backends.torch_backend")

LIBRARIES = {"numpy": np.array, "torch": lambda array: torch.from_numpy(np.array(array))}


@pytest.fixture(params=LIBRARIES)
def make(request):
    return LIBRARIES[request.param]


def hits(ops):
    """How many calls were known."""
    return ops._runner.known_calls.hits


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


def test_numbers_variables_and_slices_are_read_every_time(make):
    ops = cd.DirectAllReduce()
    slices = cd.IndexedSlices(make(np.ones((1, 2), np.float32)), make(np.array([1])), (3, 2))
    variables = [cd.Variable(make(np.ones(2, np.float32)), device=f"cpu:{k}") for k in range(2)]
    for value in (
        cd.PerReplica([1.0, 2.0]),
        cd.PerReplica(variables),
        cd.PerReplica([{"a": 1.0}] * 2),
        cd.PerReplica([{"a": variables[0]}, {"a": variables[1]}]),
        cd.PerReplica([slices, slices]),
    ):
        for _ in range(2):
            assert len(ops.batch_reduce("sum", to_itself([*batch(make), value, *batch(make)]))) == 7
    assert hits(ops) == 0


def trees_of(make, start=1, count=2, size=2):
    return [
        {"w": make(np.full((3, size), start + k, np.float32)), "b": [make(np.float64(start + k)), (), None]}
        for k in range(count)
    ]


def numbers_of(tree):
    assert (list(tree), tree["b"][1:]) == (["w", "b"], [(), None])
    return [*numbers(tree["w"]), *numbers(tree["b"][0])]


def test_trees_are_known_by_their_structure_and_their_arrays(make):
    ops = cd.DirectAllReduce()
    for number, (size, expected) in enumerate(((2, 0), (2, 1), (5, 1), (2, 2), (5, 3))):
        value = cd.PerReplica(trees_of(make, number, size=size))
        result = ops.reduce("sum", value, value)
        assert isinstance(result, cd.Mirrored)
        for tree in result.values:
            assert numbers_of(tree) == [2 * number + 1] * (3 * size + 1)
            assert tree["b"][0].dtype == value.values[0]["b"][0].dtype
        assert hits(ops) == expected
    for target in ("cpu:0", "cpu:1"):
        for _ in range(2):
            assert numbers_of(ops.reduce("mean", value, target)) == [4.5] * 16
    assert hits(ops) == 5


def test_the_structure_of_a_known_tree_is_that_of_the_call(make):
    ops, array = cd.DirectAllReduce(), make(np.ones(2, np.float32))
    for keys in ("ab", "ba"):
        value = cd.PerReplica([dict.fromkeys(keys, array)] * 2)
        assert list(ops.reduce("sum", value, "cpu:0")) == list(keys)
    assert hits(ops) == 1


def test_structures_of_distributed_values_are_known(make):
    ops = cd.DirectAllReduce()
    for start in range(3):
        first, second, third = batch(make, start=start)
        value = {"a": first, "b": [second, third]}
        result = ops.reduce("sum", value, value)
        assert first_numbers([result["a"], *result["b"]]) == [[2 * start + 1] * 2] * 3
        assert first_numbers(ops.reduce("sum", value, "cpu:0")["b"]) == [[2 * start + 1]] * 2
    assert hits(ops) == 4


def test_trees_are_written_into_trees(make):
    ops, outs = cd.DirectAllReduce(), trees_of(make, 9)
    for start in range(3):
        value = cd.PerReplica(trees_of(make, start))
        result = ops.reduce("sum", value, value, out=outs)
        for tree, out in zip(result.values, outs, strict=True):
            assert (tree["w"] is out["w"], tree["b"][0] is out["b"][0]) == (True, True)
            assert numbers_of(tree) == [2 * start + 1] * 7
    assert hits(ops) == 2
    for number in range(2):  # in place is a call of its own
        value = cd.PerReplica(trees_of(make))
        ops.reduce("sum", value, value, out=value)
        assert numbers_of(value.values[1]) == [3] * 7
        assert hits(ops) == 2 + number


def test_results_in_given_trees_are_these_trees(make):
    ops, outs = cd.DirectAllReduce(), trees_of(make, 9)
    bound = ops.bind("sum", (value := cd.PerReplica(trees_of(make))), value, out=outs)
    for result in (
        *(ops.reduce("sum", value, value, out=given) for given in (outs, outs, cd.Mirrored(outs))),
        ops.batch_reduce("sum", [(value, value)], out=[outs])[0],
        bound(),
    ):
        assert all(map(operator.is_, result.values, outs))
        assert result.devices == value.devices
    for _ in range(2):
        assert ops.reduce("sum", value, "cpu:0", out=outs[0]) is outs[0]
        assert numbers_of(outs[0]) == [3] * 7


def test_a_tensor_that_is_recorded_beside_known_ones_is_noticed():
    ops, plain = cd.DirectAllReduce(), torch.ones(3)
    for _ in range(2):
        ops.reduce("sum", cd.PerReplica([plain, plain]), "cpu:0")
    recorded = torch.ones(3, requires_grad=True)
    value = cd.PerReplica([plain, recorded])
    ops.reduce("sum", value, "cpu:0").sum().backward()
    assert recorded.grad.tolist() == [1] * 3
    with torch.no_grad():
        for _ in range(2):
            assert not ops.reduce("sum", value, "cpu:0").requires_grad
    assert ops.reduce("sum", value, "cpu:0").requires_grad


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_views_that_negate_or_conjugate_are_told_from_known_tensors(dtype):
    ops, plain = cd.DirectAllReduce(), torch.ones(3, dtype=getattr(torch, dtype))
    lazy = torch.full((3,), 2j).conj() if dtype == "complex64" else torch._neg_view(torch.full((3,), 2.0))
    for other in (plain, plain, lazy, lazy, plain):
        expected = (plain + other).resolve_conj().tolist()
        assert ops.reduce("sum", cd.PerReplica([plain, other]), "cpu:0").tolist() == expected
    assert hits(ops) == 3


@pytest.mark.parametrize("is_out", [False, True])
def test_known_tensors_whose_memory_was_freed_are_refused(is_out):
    ops, tensors = cd.DirectAllReduce(), [torch.ones(100_000) for _ in range(3)]
    value, out = cd.PerReplica(tensors[:2]), tensors[2] if is_out else None

    def reduce():
        return ops.reduce("sum", value, "cpu:0", out=out)

    for _ in range(2):
        assert (reduce() == 2).all()
    assert hits(ops) == 1
    tensors[2 if is_out else 1].untyped_storage().resize_(0)
    with pytest.raises(ConversionError, match=r"without memory of its own"):
        reduce()


def test_trees_that_differ_from_known_ones_are_refused(make):
    ops, good = cd.DirectAllReduce(), trees_of(make)
    for _ in range(2):
        ops.reduce("sum", cd.PerReplica(good), "cpu:0", out=trees_of(make)[0])
    wrong = make(np.ones((2, 3), np.float32))
    for other, error, message in (
        ({**good[1], "w": wrong}, ShapeMismatchError, r"replica 1 .* \(2, 3\) at value\['w'\]"),
        ({**good[1], "v": wrong}, MismatchError, "structure"),
        ({**good[1], "w": {"x": wrong}}, MismatchError, "structure"),
    ):
        with pytest.raises(error, match=message):
            ops.reduce("sum", cd.PerReplica([good[0], other]), "cpu:0")
    for out, message in (
        ({**good[0], "w": wrong}, r"out\[0\] .* at value\['w'\] has shape"),
        ({"w": good[0]["w"]}, "another structure"),
        ({**good[0], "b": [good[0]["w"], (), None]}, "has shape"),
        (
            {**good[0], "b": [trees_of(make)[0]["b"][0], (), None], "w": good[1]["w"][:3]},
            "overlaps|in memory",
        ),
    ):
        if message == "overlaps|in memory":
            whole = make(np.zeros((4, 2), np.float32))
            good = [{**good[0], "w": whole[:3]}, good[1]]
            out = {**out, "w": whole[1:]}
        with pytest.raises(OutError, match=message):
            ops.reduce("sum", cd.PerReplica(good), "cpu:0", out=out)


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
    assert "_runner" in ops.__dict__
    del ops.uses_engine
    assert "_runner" not in ops.__dict__


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


def test_gathers_between_processes_are_known_whatever_lengths_others_bring(make):
    def program(group):
        ops, found = cd.CollectiveAllReduce(group=group), []
        for step in range(3):
            own = make(np.full(2 + group.rank * step, step, np.float32))
            found.append(numbers(ops.gather({"w": own, "b": [own]}, "cpu:0")["b"][0]))
        out = make(np.zeros(6, np.float32))
        assert ops.gather(own, "cpu:0", out=out) is out
        with pytest.raises(OutError):
            ops.gather(own, "cpu:0", out=make(np.zeros(3, np.float32)))
        return hits(ops), found

    right = [[step] * (4 + step) for step in range(3)]
    assert run_ranks(2, program) == [(2, right), (0, right)]


def test_a_first_call_reads_its_value_once(monkeypatch):
    read = []
    read_value = runner_module.read_value
    monkeypatch.setattr(runner_module, "read_value", lambda value: read.append(value) or read_value(value))
    ops, value = cd.DirectAllReduce(), cd.PerReplica([np.float32([1]), np.float32([2])])
    ops.reduce("sum", value, value)
    ops.reduce("sum", value, value)
    assert len(read) == 1


ENTRIES = fused_pass, SmallPass.__call__, RepeatedPasses.__call__


def frames_to_the_kernels(call):
    """How many Python functions a call enters, one inside the other, up to the entry of the kernels."""
    depths, entries = [], {function.__code__ for function in ENTRIES}

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


def test_a_call_that_is_found_after_many_like_it_comes_first_from_then_on():
    ops = cd.DirectAllReduce()

    def trees(length):
        return cd.PerReplica([{"a": np.float32([1]), "b": np.ones(length, np.float32)}] * 2)

    for length in range(1, 31):
        ops.reduce("sum", trees(length), "cpu:0")
    value = trees(30)
    first, second = (num_entered(lambda: ops.reduce("sum", value, "cpu:0")) for _ in range(2))
    assert second < first
    assert ops.reduce("sum", value, "cpu:0")["b"].tolist() == [2] * 30


def test_as_many_calls_are_known_as_are_kept(monkeypatch):
    ops = cd.DirectAllReduce()
    monkeypatch.setattr(ops._runner.known_calls._calls, "_most", 3)
    for number in range(7):
        value = cd.PerReplica([{str(number): np.ones(1)}] * 2)
        for _ in range(2):
            ops.reduce("sum", value, "cpu:0")
        assert ops._runner.known_calls.hits == number + 1
    assert len(ops._runner.known_calls._calls) == 1


FIRST_EXAMPLE = """
import collections.abc, sys
import numpy as np, crossdevice as cd
sys.path.insert(0, sys.argv[1])
from entered_functions import num_entered
more = {str(leaf): np.float32([leaf]) for leaf in range(int(sys.argv[2]) - 2)}
gradients = [
    {"w": np.float32([1, 2]), "b": np.float32(0.5), **more},
    {"w": np.float32([3, 4]), "b": np.float32(1.5), **more},
]
means = cd.all_reduce(gradients, "mean")
cd.all_reduce(gradients, "mean")
collections.abc.Sized.register(type("Other", (), {}))  # empties what Python keeps of abstract classes
print(num_entered(lambda: cd.all_reduce(gradients, "mean")))
cd.all_reduce(gradients, "mean", out=means)
print(num_entered(lambda: cd.all_reduce(gradients, "mean", out=means)))
assert means[1]["w"].tolist() == [2, 3] and float(means[0]["b"]) == 1
"""
"""In a process of its own, which has reduced no other trees."""


@pytest.mark.parametrize("num_leaves", [2, 161])
def test_the_first_example_of_the_readme_enters_few_functions_once_it_is_known(num_leaves):
    command = [sys.executable, "-c", FIRST_EXAMPLE, str(Path(__file__).parents[2]), str(num_leaves)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    new, given = map(int, ended.stdout.split())
    assert new <= 35
    assert given <= 37


@pytest.mark.parametrize(
    ("call", "most"),
    [
        (lambda ops, value: ops.gather(value, "cpu:0"), 30),
        (lambda ops, value: ops.all_gather(value), 45),
        (lambda ops, value: ops.broadcast(value.values[0], value), 45),
        (lambda ops, value: ops.reduce_scatter("sum", value), 55),
        (lambda ops, value: ops.all_to_all(value), 125),
    ],
)
def test_the_second_call_of_every_collective_enters_few_functions(call, most):
    ops = cd.DirectAllReduce()
    value = cd.PerReplica([np.full(64, replica, np.float32) for replica in range(8)])
    call(ops, value)
    assert 0 < num_entered(lambda: call(ops, value)) <= most


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 0), (0, 3, 0, 4)])
def test_arrays_without_elements_are_known_too(make, sizes):
    ops = cd.DirectAllReduce()
    for _ in range(2):
        results = ops.batch_reduce("sum", to_itself(batch(make, sizes=sizes)))
        assert [numbers(result.values[1]) for result in results] == [[3] * size for size in sizes]
    assert hits(ops) == 1


def test_results_of_one_call_have_memory_of_their_own(make):
    trees = trees_of(make, count=3)
    for _ in range(2):
        results = cd.all_reduce(trees, "sum")
        arrays = [array for tree in results for array in (tree["w"], tree["b"][0])]
        for number, array in enumerate(arrays):
            array[...] = number
        assert [float(array.reshape(-1)[0]) for array in arrays] == list(range(6))


def test_between_processes_the_walk_is_hardly_longer():
    def program(group):
        ops, value, out = cd.CollectiveAllReduce(group=group), np.float32([1]), np.empty(1, np.float32)
        for _ in range(2):
            ops.reduce("sum", value, "cpu:0", out=out)
        return frames_to_the_kernels(lambda: ops.reduce("sum", value, "cpu:0", out=out))

    assert max(run_ranks(2, program)) <= 9


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
        assert ops._runner.known_calls.hits == 1
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
    first, equal = np.ones((2, 3), np.float32), np.zeros((4, 3), np.float32)[1:3]
    signature = Signature((first, first))
    for name, other in {"nothing": equal, **UNLIKE}.items():
        assert signature.fits((first, other)) is (name == "nothing"), name
        if isinstance(other, np.ndarray) or name == "a number":
            assert Signature((first, other)).fits((first, other)), name
            assert Signature((first, other)).fits((first, equal)) is (name == "nothing"), name
    assert not signature.fits((first,))
    equal.flags.writeable = False
    assert signature.fits((first, equal))
    assert not Signature((first, first), first_written=0).fits((first, equal))


def test_outputs_are_apart_unless_they_overlap():
    chosen = np.random.default_rng(5)
    memory = np.zeros(400, np.int8)
    for _ in range(300):
        leaves, inputs, outputs = [], [], []
        for _ in range(chosen.integers(1, 5)):
            size = int(chosen.integers(0, 9))
            own = [[int(start) for start in chosen.integers(0, 390, chosen.integers(1, 4))] for _ in range(2)]
            if chosen.random() < 0.5:
                own[1] = own[0][:1]
            leaves.append((size, *own))
            inputs += [memory[start : start + size] for start in own[0]]
            outputs += [memory[start : start + size] for start in own[1]]
        are_apart = True
        for leaf, (size, _, written) in enumerate(leaves):
            for place, start in enumerate(written):
                for other, (length, read, also_written) in enumerate(leaves):
                    overlaps = [
                        begin for number, begin in enumerate(also_written) if (other, number) != (leaf, place)
                    ]
                    overlaps += [begin for begin in read if (other, begin) != (leaf, start)]
                    are_apart &= not any(
                        size and length and begin < start + size and start < begin + length
                        for begin in overlaps
                    )
        table = [(len(read), size, len(written), size) for size, read, written in leaves]
        places = place_of(tuple(inputs)), place_of(tuple(outputs))
        kept = tuple(inputs), tuple(outputs)
        places = place_of(kept[0]), place_of(kept[1])
        separation = Separation(table)
        assert separation.holds(*places) is are_apart


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

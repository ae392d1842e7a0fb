"""Reduce-scatter, all-gather and all-to-all: every replica gets its part of everyone, with the right bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import crossdevice as cd
from conformance.rows import (
    DTYPES,
    INSTALLED_ROWS,
    NUMPY,
    OPS,
    components_of,
    each_algorithm,
    each_backend,
    each_option,
    group_of_one,
    is_defined,
    plain_arrays,
    plain_result,
    same_numbers,
    wild_arrays,
)
from crossdevice.plans.ledger import check_plan

COUNTS = (1, 2, 3, 5, 7)


def check_parts(result, rights, backend, value):
    """Each replica has its part, on its device, in memory of its own."""
    if len(rights) == 1:
        assert not isinstance(result, cd.DistributedValues)
    else:
        assert isinstance(result, cd.DistributedValues)
        assert result.devices == value.devices
    parts = components_of(result)
    for part, right in zip(parts, rights, strict=True):
        assert same_numbers(backend.memory(part), right), (part, right)
    assert backend.keeps_apart(parts, value.values)


@each_algorithm("shards")
def test_each_replica_gets_its_part_of_the_reduction(row):
    ops = row.make()
    cases = itertools.product(DTYPES, COUNTS, OPS, each_option())
    for number, (dtype, count, op, options) in enumerate(cases):
        if not is_defined(op, dtype) or number % 31:  # every entry of every column, not every combination
            continue
        value = NUMPY.per_replica(plain_arrays(dtype, count, op))
        before = [NUMPY.bits(array) for array in value.values]
        right = plain_result(dtype, count, op, options.precision)
        result = ops.reduce_scatter(op, value, 0, options)
        check_parts(result, np.array_split(right, count), NUMPY, value)
        assert [NUMPY.bits(array) for array in value.values] == before


@each_backend("shards")
def test_every_library_has_all_three_calls_in_all_dtypes(backend):
    ops = cd.DirectAllReduce()
    for dtype, count in zip(backend.dtypes, itertools.cycle((3, 1, 2, 5)), strict=False):
        arrays = plain_arrays(dtype, count)
        value = backend.per_replica(arrays)
        right = plain_result(dtype, count, "SUM", "accurate")
        check_parts(ops.reduce_scatter("sum", value), np.array_split(right, count), backend, value)
        check_parts(ops.all_gather(value), [np.concatenate(arrays)] * count, backend, value)
        columns = zip(*(np.array_split(array, count) for array in arrays), strict=True)
        check_parts(ops.all_to_all(value), list(map(np.concatenate, columns)), backend, value)


@each_algorithm("shards")
def test_a_part_has_the_bits_that_reduce_gives_it(row):
    for dtype, count, options in itertools.product(
        ("float16", "bfloat16", "float32", "float64", "complex64"), (3, 5), each_option(("accurate", "exact"))
    ):
        value = NUMPY.per_replica(wild_arrays(dtype, count, 101, seed=7))
        ops = row.make()
        whole = ops.reduce("mean", value, "cpu:0", options)
        parts = ops.reduce_scatter("mean", value, 0, options)
        assert same_numbers(np.concatenate(parts.values), whole)
        assert all(same_numbers(each, whole) for each in ops.all_gather(parts).values)


@each_algorithm("shards")
def test_any_axis_is_cut(row):
    arrays = [array.reshape(4, 5, 7) for array in wild_arrays("float32", 3, 4 * 5 * 7, seed=1)]
    value, ops = cd.PerReplica(arrays), row.make()
    whole = ops.reduce("sum", value, "cpu:0")
    for axis in (0, 1, 2, -1, -2):
        check_parts(ops.reduce_scatter("sum", value, axis), np.array_split(whole, 3, axis), NUMPY, value)
        check_parts(ops.all_gather(value, axis), [np.concatenate(arrays, axis)] * 3, NUMPY, value)
        columns = zip(*(np.array_split(array, 3, axis) for array in arrays), strict=True)
        rights = [np.concatenate(column, axis) for column in columns]
        check_parts(ops.all_to_all(value, axis), rights, NUMPY, value)


@each_algorithm("shards")
def test_parts_have_the_sizes_that_are_given(row):
    arrays = [np.arange(10, dtype=np.float32) + 100 * replica for replica in range(3)]
    value, ops = cd.PerReplica(arrays), row.make()
    parts = ops.reduce_scatter("max", value, sizes=[0, 7, 3]).values
    assert [part.tolist() for part in parts] == [[], list(range(200, 207)), [207, 208, 209]]
    sizes = [[1, 2, 7], [10, 0, 0], [0, 4, 6]]
    moved = ops.all_to_all(value, sizes=sizes)
    assert [part.tolist() for part in moved.values] == [
        [0, *range(100, 110)],
        [1, 2, *range(200, 204)],
        [*range(3, 10), *range(204, 210)],
    ]
    # Transposed sizes bring every part back to where it came from.
    back = ops.all_to_all(moved, sizes=list(zip(*sizes, strict=True)))
    check_parts(back, arrays, NUMPY, moved)
    check_parts(ops.all_to_all(value, sizes=(2, 5, 3)), _moved(arrays, [0, 2, 7, 10]), NUMPY, value)


def _moved(arrays, edges):
    return [
        np.concatenate([array[start:stop] for array in arrays]) for start, stop in itertools.pairwise(edges)
    ]


def test_nested_values_keep_their_structure_in_all_three_calls():
    trees = [{"a": np.arange(3.0) + replica, "b": [np.ones((4, 2), np.float32)]} for replica in range(2)]
    for ops in (cd.DirectAllReduce(), cd.RingAllReduce(num_packs=3)):
        for value in (cd.PerReplica(trees), {"x": cd.PerReplica(trees)}):
            inside = (lambda result: result["x"]) if isinstance(value, dict) else (lambda result: result)
            parts = inside(ops.reduce_scatter("sum", value)).values
            assert [part["a"].tolist() for part in parts] == [[1, 3], [5]]
            assert [part["b"][0].shape for part in parts] == [(2, 2), (2, 2)]
            wholes = inside(ops.all_gather(value)).values
            assert [whole["a"].tolist() for whole in wholes] == [[0, 1, 2, 1, 2, 3]] * 2
            moved = inside(ops.all_to_all(value)).values
            assert [part["a"].tolist() for part in moved] == [[0, 1, 1, 2], [2, 3]]
            assert [part["b"][0].shape for part in moved] == [(4, 2), (4, 2)]


@each_backend("out")
@pytest.mark.parametrize("ops", [cd.DirectAllReduce(), cd.CollectiveAllReduce(group=group_of_one())])
def test_results_are_written_to_out(ops, backend):
    value = backend.per_replica([np.float32([1, 2, 3]), np.float32([10, 20, 30])])

    def room(*lengths):
        return backend.per_replica([np.zeros(length, np.float32) for length in lengths])

    for call, out in (
        (lambda out: ops.reduce_scatter("sum", value, out=out), room(2, 1)),
        (lambda out: ops.all_gather(value, out=out), room(6, 6)),
        (lambda out: ops.all_to_all(value, out=out), room(4, 2)),
    ):
        fresh = [backend.lists(part) for part in call(None).values]
        result = call(out)
        assert all(map(lambda one, other: one is other, result.values, out.values))
        assert [backend.lists(part) for part in result.values] == fresh
        with pytest.raises(cd.errors.OutError, match=r"has shape \(9,\)"):
            call(room(9, 9))
    same = room(6).values[0]
    with pytest.raises(cd.errors.OutError, match="overlap"):
        ops.all_gather(value, out=[same, same])


def test_a_reduce_scatter_may_be_in_place_and_a_gather_may_overlap():
    arrays = [np.float32([1, 2, 3, 4]), np.float32([10, 20, 30, 40])]
    parts = [arrays[0][:2], arrays[1][2:]]
    cd.reduce_scatter(arrays, out=parts)
    assert [array.tolist() for array in arrays] == [[11, 22, 3, 4], [10, 20, 33, 44]]
    cd.all_gather(parts, out=arrays)
    assert [array.tolist() for array in arrays] == [[11, 22, 33, 44]] * 2


@each_backend("shards")
def test_large_values_are_joined_like_small_ones(backend):
    source = np.random.default_rng(5)
    for dtype in ("float32", "bool", "complex64"):
        arrays = [source.integers(0, 2, (number, 3)).astype(dtype) for number in (50_001, 40_000)]
        value = backend.per_replica(arrays)
        rights = [np.concatenate(each) for each in zip(*(np.array_split(a, 2) for a in arrays), strict=True)]
        check_parts(cd.DirectAllReduce().all_gather(value), [np.concatenate(arrays)] * 2, backend, value)
        check_parts(cd.DirectAllReduce().all_to_all(value), rights, backend, value)
        if not backend.is_immutable:
            whole = backend.per_replica([np.zeros((90_001, 3), dtype)] * 2)
            assert cd.all_gather(value, out=whole)[1] is whole.values[1]
            check_parts(whole, [np.concatenate(arrays)] * 2, backend, value)


def test_large_values_may_be_moved_in_their_own_memory():
    arrays = [np.arange(100_000.0) + 1e6 * replica for replica in range(2)]
    rights = [
        np.concatenate([array[place] for array in arrays]) for place in (slice(50_000), slice(50_000, None))
    ]
    cd.all_to_all(arrays, out=arrays)
    assert [array.tolist() for array in arrays] == [right.tolist() for right in rights]


def test_wrong_arguments_are_refused_before_anything_is_done():
    value = cd.PerReplica([np.zeros((4, 2)), np.zeros((4, 2))])
    for call in (cd.reduce_scatter, cd.all_to_all):
        for sizes, message in (
            ([1, 2], r"sizes \[1, 2\] add up to 3.*; the axis has length 4"),
            ([4], "sizes has 1 length; expected 2, one for each replica"),
            ([5, -1], "sizes must be lengths, 0 or more"),
            ([2.0, 2.0], "sizes must be lengths, 0 or more"),
        ):
            with pytest.raises(cd.errors.OptionError, match=message):
                call(value, sizes=sizes)
        with pytest.raises(cd.errors.ConversionError, match="axis 2 is out of range for 2 dimensions"):
            call(value, axis=2)
        with pytest.raises(cd.errors.ConversionError, match="needs at least one dimension"):
            call([1.0, 2.0])
    with pytest.raises(cd.errors.OptionError, match="sizes has 3 lists; expected 2"):
        cd.all_to_all(value, sizes=[[2, 2]] * 3)
    with pytest.raises(
        cd.errors.ShapeMismatchError, match=r"replica 1 \(cpu:1\) has shape \(2,\) at value\['a'\]"
    ):
        cd.reduce_scatter([{"a": np.zeros(n)} for n in (3, 2, 3)])
    slices = cd.IndexedSlices(np.ones((1, 2)), np.array([0]), (4, 2))
    with pytest.raises(cd.errors.ConversionError, match="takes arrays, and there are IndexedSlices"):
        cd.reduce_scatter([slices, slices])


def test_lengths_are_those_of_array_split_also_with_fewer_rows_than_replicas():
    for length, count in itertools.product((0, 1, 2, 6, 7), COUNTS):
        arrays = [np.arange(length * 2, dtype=np.int64).reshape(length, 2)] * count
        rights = [part.tolist() for part in np.array_split(arrays[0] * count, count)]
        assert [part.tolist() for part in cd.reduce_scatter(arrays)] == rights
        moved = [np.concatenate([part] * count).tolist() for part in np.array_split(arrays[0], count)]
        assert [part.tolist() for part in cd.all_to_all(arrays)] == moved


def test_weights_count_as_in_reduce():
    arrays, weights = wild_arrays("float32", 3, 20, seed=3), [2, 0.5, 1]
    for op, options in itertools.product(("sum", "mean"), each_option()):
        whole = cd.reduce(arrays, op, options=options, weights=weights)
        parts = cd.reduce_scatter(arrays, op, options=options, weights=weights)
        assert same_numbers(np.concatenate(parts), whole)
    with pytest.raises(cd.errors.OptionError, match="weights has 2 numbers for 3 replicas"):
        cd.reduce_scatter(arrays, weights=[1, 2])


def test_several_replicas_may_share_a_device():
    arrays = [np.float32([1, 2, 3]), np.float32([10, 20, 30]), np.float32([100, 200, 300])]
    value = cd.PerReplica(arrays, ["cpu:1", "cpu:0", "cpu:1"])
    for options in each_option():
        result = cd.RingAllReduce().reduce_scatter("sum", value, 0, options)
        check_parts(result, np.split(np.float32([111, 222, 333]), 3), NUMPY, value)


def test_each_part_has_a_plan_of_its_own_that_was_proved(monkeypatch):
    proved = []
    monkeypatch.setattr(
        "crossdevice.plans.ledger.check_plan",
        lambda plan: (check_plan(plan), proved.append(tuple(buffer.device for buffer in plan.outputs))),
    )
    value = cd.PerReplica([np.arange(5.0)] * 3)
    cd.TreeAllReduce().reduce_scatter("sum", value)
    assert proved == [(device,) for device in value.devices]


def test_an_algorithm_that_loses_a_replica_is_refused():
    class Loses(cd.CrossDeviceOps):
        def plan_sum(self, build, destinations):
            return [build.add(build.inputs[1:], at=device) for device in destinations]

    with pytest.raises(cd.errors.PlanError, match=r"replica 0 \(cpu:0\) missing"):
        Loses().reduce_scatter("sum", cd.PerReplica([np.ones(4)] * 3))


def test_booleans_are_moved_in_every_library():
    for backend in INSTALLED_ROWS:
        value = backend.per_replica([np.array([True, False]), np.array([False, True])])
        assert [backend.lists(part) for part in cd.all_to_all(value)] == [[True, False], [False, True]]


def test_functions_take_lists_and_return_lists():
    arrays = [np.float32([1, 2, 3]), np.float32([4, 5, 6])]
    mean = cd.reduce_scatter(arrays, "mean", algorithm="ring")
    assert [part.tolist() for part in mean] == [[2.5, 3.5], [4.5]]
    for call in (cd.reduce_scatter, cd.all_gather, cd.all_to_all):
        (alone,) = call(arrays[:1], out=[np.zeros(3, np.float32)])
        assert alone.tolist() == [1, 2, 3]
        with pytest.raises(cd.errors.ConversionError, match="expected a list with one value per replica"):
            call(arrays[0])

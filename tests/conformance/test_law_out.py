"""`out=` is where results go, the inputs' own memory included; what does not fit is refused untouched."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import crossdevice as cd
from conformance.oracle import NUMPY_DTYPES, result_dtype
from conformance.rows import (
    OPS,
    components_of,
    each_algorithm,
    each_backend,
    each_option,
    is_defined,
    placed,
    plain_arrays,
    plain_result,
    same_numbers,
)
from crossdevice.errors import OutError

COUNTS = (1, 5)
OPTIONS = list(each_option(("fast", "accurate")))


def right_for(backend, array, dtype, count, op, precision):
    found, right = backend.memory(array), plain_result(dtype, count, op, precision)
    return np.array_equal(found, right) if right.dtype.kind == "c" else same_numbers(found, right)


@each_backend("out")
@each_algorithm("out")
def test_out_takes_the_results_and_is_returned(row, backend):
    ops = row.make()
    for dtype, count, op in backend.product(backend.dtypes, COUNTS, OPS):
        if not is_defined(op, dtype):
            continue
        value = backend.per_replica(plain_arrays(dtype, count, op))
        before = [backend.bits(array) for array in value.values]
        empty = np.full(value.values[0].shape, 9, NUMPY_DTYPES[result_dtype(dtype, op)])
        for options in OPTIONS:
            out = backend.arrays([empty] * count)
            result = ops.reduce(op, value, value, options, out=out if count > 1 else out[0])
            assert all(a is b for a, b in zip(components_of(result), out, strict=True))
            for array in out:
                assert right_for(backend, array, dtype, count, op, options.precision)
        assert [backend.bits(array) for array in value.values] == before


@each_backend("out")
@each_algorithm("out")
def test_a_value_is_reduced_in_place(row, backend):
    ops = row.make()
    for dtype, count, op in backend.product(backend.dtypes, COUNTS, OPS):
        if not is_defined(op, dtype) or result_dtype(dtype, op) != dtype:
            continue
        for options in OPTIONS:
            value = backend.per_replica(plain_arrays(dtype, count, op))
            result = ops.reduce(op, value, value, options, out=value)
            assert all(a is b for a, b in zip(components_of(result), value.values, strict=True))
            for array in value.values:
                assert right_for(backend, array, dtype, count, op, options.precision), (dtype, count, op)


@each_backend("out")
@each_algorithm("out")
def test_out_may_be_any_container_and_mix_inputs_with_new_memory(row, backend):
    ops = row.make()
    arrays, zeros = [np.float32([1, 2]), np.float32([3, 4]), np.float32([5, 6])], np.zeros(2, np.float32)
    for options in OPTIONS:
        for wrap in (list, tuple, cd.PerReplica, cd.Mirrored):
            value, new = backend.per_replica(arrays), backend.make(zeros)
            out = (value.values[2], new, value.values[0])
            result = ops.reduce("sum", value, value, options, out=wrap(out))
            assert all(a is b for a, b in zip(result.values, out, strict=True))
            assert [backend.lists(array) for array in out] == [[9, 12]] * 3
            assert backend.lists(value.values[1]) == [3, 4]


@each_backend("out")
@each_algorithm("out")
def test_a_batch_takes_an_out_for_some_of_its_pairs(row, backend):
    ops = row.make()
    for options in OPTIONS:
        values = [
            backend.per_replica([np.full(size, size + r, np.float32) for r in range(3)])
            for size in (1, 4, 0, 6)
        ]
        new = backend.arrays([np.zeros(4, np.float32)] * 3)
        bare = backend.make(np.zeros(6, np.float32))
        pairs = [(values[0], values[0]), (values[1], values[1]), (values[2], values[2]), (values[3], "cpu:1")]
        results = ops.batch_reduce("sum", pairs, options, out=[None, new, values[2], bare])
        assert all(a is b for a, b in zip(results[1].values, new, strict=True))
        assert all(a is b for a, b in zip(results[2].values, values[2].values, strict=True))
        assert results[3] is bare
        for size, result in zip((1, 4, 0, 6), results, strict=True):
            for component in components_of(result):
                assert backend.lists(component) == [3 * size + 3] * size
        assert [backend.lists(array) for array in values[0].values] == [[1], [2], [3]]


@each_backend("out")
@each_algorithm("out")
def test_broadcast_writes_to_out(row, backend):
    ops, source = row.make(), backend.make(np.float32([1, 2]))
    out = backend.arrays([np.zeros(2, np.float32)] * 3)
    result = ops.broadcast(source, placed("cpu:0", "cpu:5", "cpu:1"), out=out)
    assert all(a is b for a, b in zip(result.values, out, strict=True))
    assert [backend.lists(array) for array in out] == [[1, 2]] * 3
    bare = backend.make(np.zeros(2, np.float32))
    assert ops.broadcast(source, "cpu:2", out=bare) is bare
    assert backend.lists(bare) == [1, 2]
    onto_itself = ops.broadcast(source, placed("cpu:0", "cpu:1"), out=(source, bare))
    assert onto_itself.values[0] is source
    assert backend.lists(source) == backend.lists(bare) == [1, 2]


@each_backend("out")
@each_algorithm("out")
def test_scalars_and_empty_arrays_are_written_in_place(row, backend):
    ops = row.make()
    for shape, options in itertools.product([(), (0,), (0, 3)], OPTIONS):
        value = backend.per_replica([np.full(shape, r + 1, np.float32) for r in range(3)])
        result = ops.reduce("sum", value, value, options, out=value)
        for component, array in zip(result.values, value.values, strict=True):
            assert component is array
            assert same_numbers(backend.memory(array), np.full(shape, 6, np.float32))


def unfitting(make):
    """What `out` must not be for two float32 arrays of two elements, with what the refusal says."""
    good = make(np.zeros(2, np.float32))
    longer = make(np.zeros(3, np.float32))
    return [
        ((good, longer), r"out\[1\] \(cpu:1\) has shape \(3,\); expected \(2,\)"),
        ((make(np.zeros((2, 1), np.float32)), good), r"out\[0\].*\(2, 1\)"),
        ((good, make(np.zeros(2))), r"out\[1\].*float64; expected float32"),
        ((good,), "1 component; expected 2"),
        ((good, make(np.zeros(2, np.float32)), longer), "3 components; expected 2"),
        ((good, good), "overlap"),
        ((longer[:2], longer[1:]), "overlap"),
        ((good, make(np.zeros(4, np.float32))[::2]), r"out\[1\].*not contiguous"),
        ((good, [0.0, 0.0]), r"out\[1\].*list; expected an array"),
        (good, "1 component; expected 2"),
    ]


@each_backend("out")
@each_algorithm("out")
def test_an_out_that_does_not_fit_is_refused(row, backend):
    ops = row.make()
    for options, (out, message) in itertools.product(OPTIONS, unfitting(backend.make)):
        value = backend.per_replica([np.float32([1, 2]), np.float32([3, 4])])
        outs = [array for array in (out if isinstance(out, tuple) else (out,)) if hasattr(array, "dtype")]
        before = [backend.bits(array) for array in (*value.values, *outs)]
        with pytest.raises(OutError, match=message):
            ops.reduce("sum", value, value, options, out=out)
        with pytest.raises(OutError, match=message):
            ops.batch_reduce("sum", [(value, value)], options, out=[out])
        with pytest.raises(OutError, match=message):
            ops.broadcast(value.values[0], value, out=out)
        assert [backend.bits(array) for array in (*value.values, *outs)] == before


def check_overlap_is_refused(row, backend, read, written):
    for options in OPTIONS:
        memory = backend.make(np.arange(5, dtype=np.float32))
        value = cd.PerReplica([memory[read], backend.make(np.zeros(3, np.float32))])
        with pytest.raises(OutError, match=r"out\[0\] overlaps replica 0"):
            row.make().reduce("sum", value, "cpu:0", options, out=memory[written])
        with pytest.raises(OutError, match="overlaps"):
            row.make().broadcast(memory[read], "cpu:0", out=memory[written])
        assert backend.lists(memory) == [0, 1, 2, 3, 4]


@each_backend("out")
@each_algorithm("out")
def test_an_out_that_overlaps_an_input_without_being_it_is_refused(row, backend):
    check_overlap_is_refused(row, backend, read=slice(0, 3), written=slice(1, 4))
    check_overlap_is_refused(row, backend, read=slice(1, 4), written=slice(0, 3))


@each_backend("out")
@each_algorithm("out")
def test_an_out_that_overlaps_a_strided_input_is_refused(row, backend):
    check_overlap_is_refused(row, backend, read=slice(0, 5, 2), written=slice(1, 4))
    check_overlap_is_refused(row, backend, read=slice(0, 5, 2), written=slice(0, 3))


@each_backend("out")
@each_algorithm("out")
def test_an_out_that_is_an_input_of_another_pair_is_refused(row, backend):
    ops = row.make()
    values = [backend.per_replica([np.float32([n]), np.float32([n + 1])]) for n in (1, 5)]
    pairs = [(value, value) for value in values]
    for options in OPTIONS:
        with pytest.raises(OutError, match="overlaps"):
            ops.batch_reduce("sum", pairs, options, out=[values[1], None])
        assert [backend.lists(a) for value in values for a in value.values] == [[1], [2], [5], [6]]


@each_algorithm("out")
def test_read_only_and_foreign_byte_order_outs_are_refused(row):
    ops = row.make()
    read_only = np.zeros(2, np.float32)
    read_only.flags.writeable = False
    for options, out in itertools.product(OPTIONS, (read_only, np.zeros(2, ">f4"))):
        value = cd.PerReplica([np.float32([1, 2]), np.float32([3, 4])])
        with pytest.raises(OutError, match=r"is read-only|is not native"):
            ops.reduce("sum", value, "cpu:0", options, out=out)
        with pytest.raises(OutError, match=r"is read-only|is not native"):
            ops.broadcast(value.values[0], "cpu:0", out=out)
        assert out.tolist() == [0, 0]


@each_backend("out")
@each_algorithm("out")
def test_a_mean_of_integers_needs_a_float_out(row, backend):
    value = backend.per_replica([np.int32([1, 2]), np.int32([2, 4])])
    with pytest.raises(OutError, match="int32; expected float64"):
        row.make().reduce("mean", value, value, out=value)
    assert [backend.lists(array) for array in value.values] == [[1, 2], [2, 4]]
    out = backend.make(np.zeros(2))
    assert row.make().reduce("mean", value, "cpu:0", out=out) is out
    assert backend.lists(out) == [1.5, 3.0]


@each_backend("out")
def test_functions_write_to_lists_of_outs_for_one_and_for_several(backend):
    for count in (1, 2, 3):
        values = backend.arrays([np.float32([1, 2])] * count)
        out = backend.arrays([np.zeros(2, np.float32)] * count)
        results = cd.all_reduce(values, out=out)
        assert all(a is b for a, b in zip(results, out, strict=True))
        assert [backend.lists(array) for array in out] == [[count, 2 * count]] * count
        devices = [f"cpu:{number}" for number in range(count)]
        results = cd.reduce(values, "max", devices, out=out)
        assert all(a is b for a, b in zip(results, out, strict=True))
        assert [backend.lists(array) for array in out] == [[1, 2]] * count
        cd.all_reduce(values, "sum", out=values)
        assert [backend.lists(array) for array in values] == [[count, 2 * count]] * count

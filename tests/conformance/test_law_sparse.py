"""Sparse values reduce to all rows in replica order, duplicates kept; beside dense ones they become dense."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import crossdevice as cd
from conformance.oracle import MEAN_OF_INTEGERS, NUMPY_DTYPES
from conformance.rows import components_of, each_algorithm, each_backend, each_option, placed
from crossdevice.errors import (
    ConversionError,
    DtypeMismatchError,
    MismatchError,
    OutError,
    ReduceOpError,
    ShapeMismatchError,
)

OPTIONS = list(each_option(("fast", "accurate")))


def slices_of(backend, rows, indices, dense_shape=(6, 2), dtype="float32", index_dtype="int64"):
    values = np.array(rows).reshape(-1, 2).astype(NUMPY_DTYPES[dtype])
    return cd.IndexedSlices(backend.make(values), backend.make(np.array(indices, index_dtype)), dense_shape)


def as_lists(backend, slices):
    return backend.memory(slices.values).astype(complex).tolist(), backend.lists(slices.indices)


@each_backend("sparse")
@each_algorithm("sparse")
def test_slices_are_concatenated_in_replica_order_with_duplicates_kept(row, backend):
    ops = row.make()
    for dtype, count, options in backend.product(backend.dtypes, (1, 2, 5, 9), OPTIONS):
        parts = [[[replica, 1], [2, replica]] for replica in range(count)]
        value = cd.PerReplica([slices_of(backend, part, [3, 0], dtype=dtype) for part in parts])
        rows = [each for part in parts for each in part]
        for op, target in itertools.product(("sum", "mean"), (value, "cpu:4")):
            divisor = count if op == "mean" else 1
            expected_dtype = MEAN_OF_INTEGERS.get(dtype, dtype) if op == "mean" else dtype
            result = ops.reduce(op, value, target, options)
            assert type(result) is (cd.Mirrored if target is value and count > 1 else cd.IndexedSlices)
            for slices in components_of(result):
                values = backend.memory(slices.values)
                right = (np.array(rows, np.float64) / divisor).astype(values.dtype)
                assert values.dtype == NUMPY_DTYPES[expected_dtype]
                assert np.array_equal(values, right)
                assert backend.lists(slices.indices) == [3, 0] * count
                assert slices.dense_shape == (6, 2)


@each_backend("sparse")
@each_algorithm("sparse")
def test_sparse_results_have_memory_of_their_own(row, backend):
    ops = row.make()
    for count, options in itertools.product((1, 3), OPTIONS):
        value = cd.PerReplica([slices_of(backend, [[1, 2]], [0]) for _ in range(count)])
        before = [as_lists(backend, slices) for slices in value.values]
        result = ops.reduce("sum", value, placed("cpu:0", "cpu:1"), options)
        results, inputs = (
            [part for each in group.values for part in (each.values, each.indices)]
            for group in (result, value)
        )
        assert backend.keeps_apart(results, inputs)
        assert [as_lists(backend, slices) for slices in value.values] == before


@each_backend("sparse")
@each_algorithm("sparse")
def test_replicas_may_have_different_numbers_of_rows_and_none(row, backend):
    ops = row.make()
    value = cd.PerReplica(
        [
            slices_of(backend, [], []),
            slices_of(backend, [[1, 2], [3, 4]], [5, 5]),
            slices_of(backend, [[5, 6]], [1], index_dtype="int32"),
        ]
    )
    for options in OPTIONS:
        result = ops.reduce("sum", value, "cpu:0", options)
        assert as_lists(backend, result) == ([[1, 2], [3, 4], [5, 6]], [5, 5, 1])
        assert backend.memory(result.indices).dtype == np.int64


@each_backend("sparse")
@each_algorithm("sparse")
def test_a_mix_of_sparse_and_dense_becomes_dense(row, backend):
    ops = row.make()
    dense = backend.make(np.arange(12, dtype=np.float32).reshape(6, 2))
    for options, shape in itertools.product(OPTIONS, [(6, 2), None]):
        sparse = slices_of(backend, [[10, 20], [30, 40]], [1, 1], shape)
        value = cd.PerReplica([sparse, dense, dense])
        right = 2 * np.arange(12, dtype=np.float32).reshape(6, 2)
        right[1] += [40, 60]
        for op, divisor in (("sum", 1), ("mean", 3)):
            for component in components_of(ops.reduce(op, value, value, options)):
                assert type(component) is backend.array_type
                assert np.array_equal(backend.memory(component), right / np.float32(divisor))


@each_backend("sparse")
@each_algorithm("sparse")
def test_sparse_and_dense_values_share_a_batch(row, backend):
    ops = row.make()
    for options in OPTIONS:
        sparse = cd.PerReplica([slices_of(backend, [[1, 2]], [0]), slices_of(backend, [[3, 4]], [2])])
        dense = backend.per_replica([np.float32([1]), np.float32([2])])
        results = ops.batch_reduce(
            "sum", [(dense, dense), (sparse, sparse), (dense, "cpu:0"), (sparse, "cpu:0")], options
        )
        assert [backend.lists(component) for component in results[0].values] == [[3], [3]]
        assert as_lists(backend, results[1].values[1]) == ([[1, 2], [3, 4]], [0, 2])
        assert backend.lists(results[2]) == [3]
        assert as_lists(backend, results[3]) == ([[1, 2], [3, 4]], [0, 2])


@each_backend("sparse")
@each_algorithm("sparse")
def test_dense_shapes_that_are_given_must_agree(row, backend):
    ops = row.make()

    def value_of(*shapes):
        return cd.PerReplica([slices_of(backend, [[1, 2]], [0], shape) for shape in shapes])

    for shapes, right in [((None, None), None), ((None, (6, 2), (6, 2)), (6, 2)), (((6, 2), None), (6, 2))]:
        result = ops.reduce("sum", value_of(*shapes), "cpu:0")
        assert result.dense_shape == right
    for shapes, message in [
        (((6, 2), (6, 2), (7, 2)), r"replica 2 \(cpu:\d\) has dense_shape \(7, 2\); the other 2 have"),
        ((None, (6, 2), (6, 2), (7, 2)), r"replica 3 \(cpu:\d\) has dense_shape \(7, 2\)"),
        ((None, (6, 2), (7, 2)), r"replica 2 \(cpu:\d\) .*\(7, 2\); replica 1 \(cpu:\d\) has \(6, 2\)"),
    ]:
        with pytest.raises(ShapeMismatchError, match=message):
            ops.reduce("sum", value_of(*shapes), "cpu:0")


@each_backend("sparse")
@each_algorithm("sparse")
def test_slices_that_do_not_fit_together_are_refused(row, backend):
    ops = row.make()
    good = slices_of(backend, [[1, 2]], [0])
    wide = cd.IndexedSlices(backend.make(np.float32([[1, 2, 3]])), good.indices, None)
    many = cd.IndexedSlices(good.values, backend.make(np.int64([0, 1])), None)
    other = slices_of(backend, [[1, 2]], [0], dtype="float64")
    real = cd.IndexedSlices(good.values, backend.make(np.float32([0])), None)
    far = slices_of(backend, [[1, 2]], [6])
    dense = backend.make(np.zeros((6, 2), np.float32))
    for values, error, message in [
        ((good, good, wide), ShapeMismatchError, r"replica 2 \(cpu:\d\) has rows of shape \(3,\)"),
        ((good, many), ShapeMismatchError, r"replica 1 \(cpu:\d\).*indices of shape \(2,\)"),
        ((good, good, other), DtypeMismatchError, r"replica 2 \(cpu:\d\) has dtype float64; the other 2"),
        ((good, real), ConversionError, r"replica 1 \(cpu:\d\) has indices of dtype float32"),
        ((dense, far), MismatchError, r"replica 1 \(cpu:\d\) has an index outside of its 6 rows"),
        ((dense, slices_of(backend, [[1, 2]], [-1])), MismatchError, "outside of its 6 rows"),
        ((dense, slices_of(backend, [[1, 2]], [0], (7, 2))), ShapeMismatchError, r"\(7, 2\)"),
    ]:
        with pytest.raises(error, match=message):
            ops.reduce("sum", cd.PerReplica(values), "cpu:0")
    for op in ("min", "max", "prod"):
        with pytest.raises(ReduceOpError, match=f"{op.upper()} is not defined for IndexedSlices"):
            ops.reduce(op, cd.PerReplica([good, good]), "cpu:0")
    with pytest.raises(NotImplementedError, match="gather of IndexedSlices"):
        ops.gather(cd.PerReplica([good, good]), "cpu:0")


@each_backend("sparse")
@each_algorithm("sparse")
def test_slices_cannot_be_written_to_an_out(row, backend):
    good = slices_of(backend, [[1, 2]], [0])
    with pytest.raises(OutError, match="IndexedSlices"):
        row.make().reduce("sum", cd.PerReplica([good, good]), "cpu:0", out=good)
    with pytest.raises(OutError, match="IndexedSlices"):
        row.make().broadcast(good, "cpu:0", out=good)


@each_backend("sparse")
def test_slices_become_dense_by_adding_rows_of_one_index(backend):
    slices = slices_of(backend, [[1, 2], [3, 4], [5, 6]], [1, 0, 1], (3, 2))
    assert backend.lists(cd.to_dense(slices)) == [[3, 4], [6, 8], [0, 0]]
    with pytest.raises(ConversionError, match="no dense_shape"):
        cd.to_dense(cd.IndexedSlices(slices.values, slices.indices))


@each_backend("sparse")
def test_beside_dense_values_repeated_rows_add_up_in_any_order(backend):
    column, number = [[2048.0, -0.0], *[[1.0, -0.0]] * 4], 3
    for order in itertools.islice(itertools.permutations(range(5)), 0, 120, 17):
        rows, indices = [column[k] for k in order] * 2 + [[5.0, 6.0]], [0] * 5 + [3] * 5 + [4]
        sparse = slices_of(backend, rows, indices, dtype=number_dtype(backend))
        dense = backend.make(np.zeros((6, 2), NUMPY_DTYPES[number_dtype(backend)]))
        for precision in ("accurate", "exact"):
            options = cd.CommunicationOptions(precision=precision)
            result = cd.reduce([sparse] + [dense] * number, options=options)
            expected = np.zeros((6, 2))
            expected[[0, 3], 0], expected[4] = 2052, (5, 6)
            assert backend.memory(result).astype(float).tolist() == expected.tolist()


def number_dtype(backend):
    """The narrowest float there is."""
    return "float16" if "float16" in backend.dtypes else "float32"


def test_repeated_rows_beside_dense_ones_are_refused_for_minima_and_outside_of_the_array():
    sparse, dense = cd.IndexedSlices(np.ones((1, 2)), np.array([0]), (3, 2)), np.ones((3, 2))
    for op in ("min", "max", "prod"):
        for values in ([sparse, dense], [dense, sparse], [sparse, sparse]):
            with pytest.raises(ReduceOpError, match="is not defined for IndexedSlices"):
                cd.reduce(values, op)
    far = cd.IndexedSlices(np.ones((1, 2)), np.array([3]), (3, 2))
    with pytest.raises(MismatchError, match=r"replica 1 \(cpu:1\) has an index outside of its 3 rows: 3"):
        cd.reduce([sparse, far])

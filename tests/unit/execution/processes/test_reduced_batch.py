"""What crosses between processes has the bits of the whole, and is no more than it must be."""

import itertools

import pytest

from crossdevice.execution.processes.reduced_batch import partial_dtype
from crossdevice.plans.tasks import LINE_ELEMENTS, shard_edges
from crossdevice.values.dtypes import COMPLEXES, INTEGERS, ITEM_BYTES
from crossdevice.values.options import PRECISIONS
from crossdevice.values.reduce_op import ReduceOp


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("op", ReduceOp)
@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES.keys() - {"bool"}))
def test_a_process_never_sends_more_than_its_arrays(dtype, op, precision):
    for most_replicas in range(1, 10):
        partial = partial_dtype(dtype, op, precision, most_replicas)
        if partial is not None:
            assert ITEM_BYTES[partial] < most_replicas * ITEM_BYTES[dtype]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", *COMPLEXES])
def test_exact_sums_and_products_have_no_partial_results(dtype):
    for op, most_replicas in itertools.product((ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PROD), range(1, 10)):
        assert partial_dtype(dtype, op, "exact", most_replicas) is None


@pytest.mark.parametrize("dtype", INTEGERS)
def test_true_means_of_integers_have_no_partial_results(dtype):
    assert partial_dtype(dtype, ReduceOp.MEAN, "accurate", 8) is None
    assert partial_dtype(dtype, ReduceOp.SUM, "accurate", 8) == dtype


def test_weighted_values_and_medians_have_no_partial_results():
    assert partial_dtype("float32", ReduceOp.SUM, "accurate", 8, is_weighted=True) is None
    assert partial_dtype("float32", ReduceOp.MEDIAN, "accurate", 8) is None
    assert partial_dtype("float32", ReduceOp.SUM, "accurate", 8) == "float64"


def test_shards_cover_everything_once_on_whole_lines():
    for length, number in itertools.product((0, 1, 63, 64, 65, 1000, 12_345), range(1, 10)):
        edges = shard_edges(length, number)
        assert (edges[0], edges[-1], len(edges)) == (0, length, number + 1)
        assert edges == sorted(edges)
        assert all(edge % LINE_ELEMENTS == 0 or edge == length for edge in edges)
        longest = max(stop - start for start, stop in itertools.pairwise(edges))
        assert longest <= -(-length // number) + LINE_ELEMENTS

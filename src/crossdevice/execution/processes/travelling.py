"""What crosses from one process to another: its replicas' arrays, or one partial result for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from crossdevice.backends.protocol import Array
from crossdevice.values.dtypes import COMPLEXES, INTEGERS, ITEM_BYTES
from crossdevice.values.options import Precision
from crossdevice.values.reduce_op import ReduceOp

Delivery: TypeAlias = Callable[[], list[tuple[Array, ...]]]
"""Puts what has come on its destinations, also into `out`; for when no other rank is waited for any more."""

_WIDE = {
    "float16": "float64",
    "bfloat16": "float64",
    "float32": "float64",
    "complex64": "complex128",
}


def partial_dtype(dtype: str, op: ReduceOp, precision: Precision, most_replicas: int) -> str | None:
    """The dtype of one partial result per process; None if its replicas' arrays travel themselves.

    They do whenever a partial result would not have the bits of the whole: under `exact`, and for true
    means of integers. Under `accurate`, partial sums are as wide as the accumulator, and travel only if that
    is fewer bytes than the arrays, so that one replica per process sends what a ring would.

    >>> partial_dtype("float32", ReduceOp.SUM, "accurate", most_replicas=4)
    'float64'
    >>> partial_dtype("float32", ReduceOp.SUM, "accurate", most_replicas=2) is None
    True
    """
    if most_replicas == 1:
        return None
    if precision == "fast" or op in (ReduceOp.MIN, ReduceOp.MAX):
        return dtype
    if dtype in INTEGERS:
        return None if op is ReduceOp.MEAN else dtype
    wide = _WIDE.get(dtype)
    if wide is None or precision == "exact" or (op is ReduceOp.PROD and dtype in COMPLEXES):
        return None
    return wide if ITEM_BYTES[wide] < most_replicas * ITEM_BYTES[dtype] else None


def shard_edges(num_elements: int, num_shards: int) -> list[int]:
    """Where shards of nearly equal length begin and end, on whole cache lines of any dtype.

    >>> shard_edges(200, 3)
    [0, 128, 192, 200]
    """
    lines = -(-num_elements // LINE_ELEMENTS)
    return [
        min(-(-lines * shard // num_shards) * LINE_ELEMENTS, num_elements) for shard in range(num_shards + 1)
    ]


LINE_ELEMENTS = 64
"""As many elements fill one or more cache lines, whatever their dtype."""

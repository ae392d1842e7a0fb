"""Numbers to reduce, the same in every process, and the count of results that are wrong.

Arrays repeat a random pattern of prime length: so they are made at the speed of a copy, what is expected
is computed for one period only, and a range in the wrong place is still found.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import dtype_named
from crossdevice.cli.bench.workload import Workload
from crossdevice.values.dtypes import FLOATS

PERIOD = 65521
"""The largest prime below 2^16: no range that an algorithm cuts is a multiple of it."""

NUM_PATTERNS = 7
"""Neighbours among a replica's arrays differ; a batch of hundreds needs no more memory than that."""

POISON = 77
"""Element of memory for results before a checked call; no result of ours is that large for few replicas."""

Arrays = list[NDArray[Any]]

_WIDE: dict[str, Any] = {"SUM": np.sum, "MEAN": np.sum, "MIN": np.min, "MAX": np.max, "PROD": np.prod}


def replica_arrays(work: Workload, replica: int) -> Arrays:
    """Makes one replica's flat arrays, one for each shape of the work."""
    return [
        np.resize(_pattern(work, replica, number % NUM_PATTERNS), math.prod(shape))
        for number, shape in enumerate(work.shapes)
    ]


def all_arrays(work: Workload) -> list[Arrays]:
    """Makes the flat arrays of all replicas with inputs."""
    return [replica_arrays(work, replica) for replica in range(work.num_inputs)]


def num_wrong(work: Workload, results: Sequence[Arrays], *, rounds_once: bool) -> int:
    """Counts wrong elements in the flat arrays of all destinations.

    Integers, minima, maxima and copies must be equal. Sums, means and products of floats are compared
    with a wide computation: within half a unit for a competitor that rounds once, otherwise within what
    rounding after every step may lose.
    """
    return sum(
        _num_beyond(segment, *expected)
        for arrays in results
        for number, array in enumerate(arrays)
        for segment, expected in _segments(work, number % NUM_PATTERNS, array, rounds_once)
    )


_Expected: TypeAlias = tuple[NDArray[Any], NDArray[Any] | float]
"""One period of the wide result, and how far from it a result may be."""


def _pattern(work: Workload, replica: int, number: int) -> NDArray[Any]:
    return _period_of(work.dtype, work.op, replica, number, work.is_spread)


@functools.lru_cache(maxsize=512)
def _period_of(dtype: str, op: str, replica: int, number: int, is_spread: bool) -> NDArray[Any]:
    random = np.random.default_rng((replica, number))
    if dtype in FLOATS:
        low, high = (0.75, 1.25) if op == "PROD" else (-1.0, 1.0)
        values = random.uniform(low, high, PERIOD)
        if is_spread:
            # float16 holds no more than 10^10 without infinities.
            lowest, highest = (-7, 4) if dtype == "float16" else (-6, 6)
            values *= 10.0 ** random.integers(lowest, highest, PERIOD)
        return values.astype(dtype_named(dtype))
    low, high = (1, 2) if op == "PROD" else (0 if dtype.startswith("u") else -8, 8)
    return random.integers(low, high, PERIOD, dtype, endpoint=True)


def _segments(
    work: Workload, number: int, array: NDArray[Any], rounds_once: bool
) -> Iterator[tuple[NDArray[Any], _Expected]]:
    """Splits a result at the starts of the pattern."""
    if work.reduces:
        yield array, _expected_reduction(work, number, rounds_once)
        return
    for replica, part in enumerate(np.split(array, work.num_inputs)):
        pattern = _pattern(work, replica, number)
        yield part, (pattern.astype(_wide_dtype(work.dtype)), 0.0)


@functools.lru_cache(maxsize=16)
def _expected_reduction(work: Workload, number: int, rounds_once: bool) -> _Expected:
    patterns = [_pattern(work, replica, number) for replica in range(work.num_devices)]
    wide_dtype = _wide_dtype(work.dtype)
    wide = np.stack([pattern.astype(wide_dtype) for pattern in patterns])
    center = _WIDE[work.op](wide, axis=0)
    if work.result_dtype not in FLOATS:
        # Integers wrap, whatever the order.
        center = center.astype(work.result_dtype).astype(wide_dtype)
    magnitude = np.abs(center) if work.op == "PROD" else np.abs(wide).sum(axis=0)
    if work.op == "MEAN":
        center, magnitude = center / work.num_devices, magnitude / work.num_devices
    if work.result_dtype not in FLOATS or work.op in ("MIN", "MAX"):
        return center, 0.0
    unit = float(ml_dtypes.finfo(dtype_named(work.result_dtype)).eps)
    if not rounds_once:
        return center, work.num_devices * unit * magnitude
    wide_unit = float(np.finfo(wide_dtype).eps) if work.dtype in FLOATS else 2.0**-52
    return center, (unit / 2) * np.abs(center) + (work.num_devices + 1) * wide_unit * magnitude


def _num_beyond(result: NDArray[Any], center: NDArray[Any], allowed: NDArray[Any] | float) -> int:
    allowed = np.broadcast_to(allowed, center.shape)
    wrong = 0
    for start in range(0, result.size, PERIOD):
        piece = result[start : start + PERIOD].astype(center.dtype)
        error = np.abs(piece - center[: piece.size])
        wrong += int(np.count_nonzero(~(error <= allowed[: piece.size])))  # NaN is wrong
    return wrong


def _wide_dtype(dtype: str) -> np.dtype[Any]:
    if dtype in FLOATS:
        return np.dtype(np.longdouble if dtype == "float64" else np.float64)
    return np.dtype(np.int64)

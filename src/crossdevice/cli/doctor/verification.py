"""`crossdevice doctor --verify`: reductions on this machine, compared with their true results.

These come from Python's integers and fractions: no kernel and no array arithmetic.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from crossdevice.algorithms.collective_all_reduce import CollectiveAllReduce
from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.backends.protocol import Backend, dtype_named
from crossdevice.backends.registry import backend_named
from crossdevice.cli.doctor.diagnosis import Finding, Gpus
from crossdevice.process_groups.cluster import cluster_from_env
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.values.device import Device, host_device
from crossdevice.values.distributed import PerReplica
from crossdevice.values.dtypes import COMPLEXES, FLOATS, INTEGERS, PARTS, result_dtype
from crossdevice.values.options import LOWERINGS, PRECISIONS, CommunicationOptions, Precision
from crossdevice.values.quantities import counted
from crossdevice.values.reduce_op import ReduceOp


class FloatFormat(NamedTuple):
    """Bits of precision, the least exponent of a normal number, and the greatest finite number."""

    precision: int
    least_exponent: int
    greatest: Fraction

    @classmethod
    @functools.cache
    def of(cls, dtype: str) -> FloatFormat:
        """Returns the format of a dtype."""
        info = ml_dtypes.finfo(dtype_named(dtype))
        return cls(int(info.nmant) + 1, int(info.minexp), Fraction(float(info.max)))

    def unit_at(self, number: Fraction) -> Fraction:
        """Returns the distance between neighbouring numbers of this format, near a non-zero number."""
        exponent = number.numerator.bit_length() - number.denominator.bit_length()
        if abs(number) < Fraction(2) ** exponent:
            exponent -= 1
        return Fraction(2) ** (max(exponent, self.least_exponent) - self.precision + 1)

    def rounded(self, number: Fraction) -> float:
        """Rounds to the nearest number of this format, ties to even."""
        unit = self.unit_at(number) if number else Fraction(1)
        near = round(number / unit) * unit
        return math.copysign(math.inf, near) if abs(near) > self.greatest else float(near)


def random_replicas(
    random: np.random.Generator, dtype: str, op: ReduceOp, precision: Precision, count: int, size: int
) -> list[NDArray[Any]]:
    """Makes flat arrays with exact wide sums and products, so that `accurate` leaves one rounding.

    Those for `exact` are further apart.
    """
    return [_array(random, dtype, op, precision, size) for _ in range(count)]


def _array(
    random: np.random.Generator, dtype: str, op: ReduceOp, precision: Precision, size: int
) -> NDArray[Any]:
    if dtype in PARTS:
        if op is ReduceOp.PROD:  # all products are small whole numbers
            return (random.integers(-1, 2, size) + 1j * random.integers(-1, 2, size)).astype(dtype)
        return _array(random, PARTS[dtype], op, precision, 2 * size).view(dtype)
    if dtype in INTEGERS:
        info = np.iinfo(dtype)
        low, high = (0, 10) if op is ReduceOp.MEAN and precision == "fast" else (info.min, info.max)
        return random.integers(low, high, size, dtype=np.dtype(dtype), endpoint=True)
    if dtype not in FLOATS:
        return random.integers(0, 2, size).astype(dtype_named(dtype))
    if op is ReduceOp.PROD:
        return random.choice([0.5, 1.0, -1.0, 1.5, -1.5, -2.0], size).astype(dtype_named(dtype))
    form = FloatFormat.of(dtype)
    bits, reach = (40, 4) if dtype == "float64" and precision != "exact" else (form.precision, 8)
    if precision == "exact" and form.least_exponent < -64:
        reach = 40
    whole = random.integers(-(1 << bits), 1 << bits, size, endpoint=True)
    numbers = whole * 2.0 ** (random.integers(-reach, reach, size, endpoint=True) - bits)
    # Some below the least normal number, which processors can be told to take for 0.
    numbers[:4] = random.integers(-9, 9, min(size, 4)) * 2.0 ** (form.least_exponent - form.precision + 1)
    return numbers.astype(dtype_named(dtype))


Range: TypeAlias = "tuple[Any, Any]"
"""Bounds of an element; mostly both are one number."""


def right_ranges(op: ReduceOp, replicas: Sequence[NDArray[Any]], precision: Precision) -> list[Range]:
    """Computes the range of each element; complex numbers by their parts, except for products."""
    dtype = replicas[0].dtype.name
    if dtype in PARTS and op is ReduceOp.PROD:
        return [(math.prod(each),) * 2 for each in zip(*(array.tolist() for array in replicas), strict=True)]
    into = result_dtype(PARTS.get(dtype, dtype), op)
    is_bounded = precision == "fast" and op not in (ReduceOp.MIN, ReduceOp.MAX)
    form = FloatFormat.of(into) if into in FLOATS else None
    ranges: list[Range] = []
    for column in zip(*map(_numbers, replicas), strict=True):
        true = _true_value(op, column)
        if form is None:
            ranges.append((_wrapped(int(true), into),) * 2)
            continue
        scale = max(abs(true), sum(map(abs, map(Fraction, column)))) if is_bounded else Fraction(0)
        bound = 2 * len(column) * form.unit_at(scale) if scale else None
        ranges.append((form.rounded(true),) * 2 if bound is None else (true - bound, true + bound))
    return ranges


def first_wrong(ranges: Sequence[Range], found: NDArray[Any], dtype: str) -> str | None:
    """Returns the first element of a result that is out of bounds; None if there is none."""
    if found.dtype.name != dtype:
        return f"the dtype is {found.dtype.name}, expected {dtype}"
    numbers = found.tolist() if isinstance(ranges[0][0], complex) else _numbers(found)
    for number, ((low, high), got) in enumerate(zip(ranges, numbers, strict=True)):
        if got != low and not (low != high and low <= got <= high):
            expected = repr(low) if low == high else f"{float(low)!r} to {float(high)!r}"
            return f"element {number} is {got!r}, expected {expected}"
    return None


def _numbers(array: NDArray[Any]) -> list[Any]:
    """Converts to Python's own numbers; complex ones to their parts."""
    if array.dtype.name in PARTS:
        array = array.view(PARTS[array.dtype.name])
    numbers: list[Any] = (array.astype(np.float64) if array.dtype.name in FLOATS else array).tolist()
    return numbers


def _true_value(op: ReduceOp, numbers: Sequence[Any]) -> Fraction:
    match op:
        case ReduceOp.MIN:
            return Fraction(min(numbers))
        case ReduceOp.MAX:
            return Fraction(max(numbers))
        case ReduceOp.PROD:
            return math.prod(map(Fraction, numbers), start=Fraction(1))
    if op.is_order_statistic:
        numbers = sorted(numbers)[slice(*op.sorted_range(len(numbers)))]
    ratios = [number.as_integer_ratio() for number in numbers]
    common = max(denominator for _, denominator in ratios)  # they are powers of 2
    total = sum(numerator * (common // denominator) for numerator, denominator in ratios)
    return Fraction(total, common * (1 if op is ReduceOp.SUM else len(numbers)))


def _wrapped(number: int, dtype: str) -> int | bool:
    if dtype == "bool":
        return bool(number)
    info = np.iinfo(dtype)
    return (number - int(info.min)) % (1 << info.bits) + int(info.min)


SECONDS = 45.0
"""Time limit for all checks in this process; those not reached are named."""

GROUP_SECONDS = 15.0
"""The deadline of each call between processes."""

NUM_ELEMENTS = 300
"""Size with several rounds of every vector loop and a remainder."""

LARGE_ELEMENTS = 3 << 20
"""Size with several threads, and results that bypass the cache."""

REPLICA_COUNTS = (2, 3, 8)
ORDERED = (ReduceOp.MIN, ReduceOp.MAX)
WIDE_UNSIGNED = ("uint16", "uint32", "uint64")
"""Dtypes that PyTorch can store, but not compute with on a GPU."""


class Place(NamedTuple):
    """A library and a device on which its arrays are reduced."""

    name: str
    backend: Backend
    devices: tuple[Device, ...]
    dtypes: tuple[str, ...]

    def devices_of(self, count: int) -> tuple[Device, ...]:
        """Repeats the devices in turn."""
        return tuple(itertools.islice(itertools.cycle(self.devices), count))


def verification(gpus: Gpus, seconds: float = SECONDS) -> Iterator[Finding]:
    """Yields a finding per place and dtype, one for the processes of a launch, and a summary."""
    end = time.monotonic() + seconds
    counts: dict[str, tuple[int, int]] = {}
    for place in _places(gpus):
        found = []
        for dtype in place.dtypes:
            found.append(_of_dtype(place, dtype, end))
            yield found[-1]
        counts[place.name] = sum(each.is_well and each.is_complete for each in found), len(found)
        yield _of_large_arrays(place)
    yield _of_processes()
    yield _summary(counts, seconds)


def _summary(counts: Mapping[str, tuple[int, int]], seconds: float) -> Finding:
    """Counts the dtypes verified from end to end, in each place."""
    parts = [
        f"{verified} of {number} dtypes verified on {name}" for name, (verified, number) in counts.items()
    ]
    is_complete = all(verified == number for verified, number in counts.values())
    advice = (
        f"not all was reached in {seconds:g} seconds: run it again, since kernels that were compiled "
        "meanwhile are kept, or give it more --seconds"
    )
    return Finding("summary", "; ".join(parts), True, "" if is_complete else advice, is_complete)


def _places(gpus: Gpus) -> Iterator[Place]:
    everything = tuple(dict.fromkeys(("float32", *FLOATS, *COMPLEXES, *INTEGERS, "bool")))
    yield Place("the host", backend_named("numpy"), tuple(map(host_device, range(8))), everything)
    count = gpus.seen.get("torch")
    if isinstance(count, int) and count:
        dtypes = tuple(name for name in everything if name not in WIDE_UNSIGNED)
        each = [Device("cuda", index) for index in range(count)]
        for devices in dict.fromkeys(((each[0],), tuple(each))):
            name = str(devices[0]) if len(devices) == 1 else f"{count} GPUs"
            yield Place(name, backend_named("torch"), devices, dtypes)


def _of_dtype(place: Place, dtype: str, end: float) -> Finding:
    """Checks every operation, precision and way of running, over several algorithms and replica counts."""
    algorithms = itertools.cycle(ALGORITHMS)
    tried = 0
    wrong: list[str] = []
    for op, precision, count in itertools.product(_operations(dtype), PRECISIONS, REPLICA_COUNTS):
        replicas, right = _case(dtype, op, precision, count)
        for lowering in LOWERINGS:
            if time.monotonic() > end:
                return _finding(place.name, dtype, tried, wrong, is_whole=False)
            tried += 1
            algorithm = next(name for name in algorithms if _can_run(name, place.devices_of(count)))
            options = CommunicationOptions(precision=precision, lowering=lowering)
            try:
                found = _reduced(place, algorithm, replicas, op, options)
                said = first_wrong(right, found, result_dtype(dtype, op))
            except Exception as failure:  # whatever it is, it is what one wants to know
                said = f"{type(failure).__name__}: {failure}"
            if said is not None:
                way = "in one pass" if lowering == "auto" else "step by step"
                wrong.append(f"{op.name} under {precision} of {count} replicas by {algorithm}, {way}: {said}")
    return _finding(place.name, dtype, tried, wrong)


def _case(dtype: str, op: ReduceOp, precision: Precision, count: int) -> tuple[list[NDArray[Any]], Any]:
    """Makes the arrays of this many replicas, the same everywhere, and the bounds of their reduction."""
    random = np.random.default_rng([count, *map(ord, dtype + op.name)])
    replicas = random_replicas(random, dtype, op, precision, count, NUM_ELEMENTS)
    return replicas, right_ranges(op, replicas, precision)


def _can_run(algorithm: str, devices: Sequence[Device]) -> bool:
    return ALGORITHMS.load(algorithm)().fallback_reason(devices) is None


def _operations(dtype: str) -> Sequence[ReduceOp]:
    if dtype in COMPLEXES:
        return [op for op in ReduceOp if op not in ORDERED and not op.is_order_statistic]
    return ORDERED if dtype == "bool" else list(ReduceOp)


def _reduced(
    place: Place,
    algorithm: str,
    replicas: Sequence[NDArray[Any]],
    op: ReduceOp,
    options: CommunicationOptions,
) -> NDArray[Any]:
    devices = place.devices_of(len(replicas))
    arrays = [
        place.backend.from_host(array.copy(), array.shape, device)
        for array, device in zip(replicas, devices, strict=True)
    ]
    ops = ALGORITHMS.load(algorithm)()
    result = ops.reduce(op, PerReplica.of(tuple(arrays), devices), devices[0], options)
    return place.backend.to_host(result)


def _of_large_arrays(place: Place) -> Finding:
    """Checks whole numbers, with sums that are exact in any order, against NumPy's sums of integers."""
    random = np.random.default_rng(1)
    whole = random.integers(-1000, 1000, (4, LARGE_ELEMENTS))
    wrong = []
    for precision in PRECISIONS:
        options = CommunicationOptions(precision=precision)
        found = _reduced(place, "direct", list(whole.astype(np.float32)), ReduceOp.SUM, options)
        different = np.flatnonzero(found != whole.sum(axis=0))
        if different.size:
            wrong.append(
                f"{counted(different.size, 'element')} under {precision}, the first is number {different[0]}"
            )
    return _finding(place.name, f"{LARGE_ELEMENTS} elements", len(PRECISIONS), wrong)


def _of_processes() -> Finding:
    """Verifies a reduction by all processes of the launch; each knows the inputs of all."""
    cluster = cluster_from_env()
    if cluster.size == 1:
        return Finding("processes", "one; under a launcher its processes are verified together")
    try:
        with cluster.form_group(timeout_seconds=GROUP_SECONDS) as group:
            tried, wrong = _reduced_together(group)
            ops = CollectiveAllReduce(group=group)
            total = int(ops.reduce("sum", np.int64(len(wrong)), "cpu:0"))
    except Exception as failure:
        return Finding("processes", f"{type(failure).__name__}: {failure}", False)
    if total and not wrong:
        wrong = ["a result of another process" if total == 1 else f"{total} results of other processes"]
    return _finding(f"{group.size} processes on {group.engine_name}", "all dtypes", tried, wrong)


def _reduced_together(group: ProcessGroup) -> tuple[int, list[str]]:
    tried, wrong = 0, []
    ops, count = CollectiveAllReduce(group=group), 2 * group.size
    own = slice(2 * group.rank, 2 * group.rank + 2)
    for dtype in (*FLOATS, *COMPLEXES, *INTEGERS):
        for op, precision in itertools.product(_operations(dtype), PRECISIONS):
            tried += 1
            replicas, right = _case(dtype, op, precision, count)
            options = CommunicationOptions(precision=precision)
            found = ops.reduce(op, PerReplica(replicas[own]), "cpu:0", options)
            said = first_wrong(right, found, result_dtype(dtype, op))
            if said is not None:
                wrong.append(f"{op.name} of {dtype} under {precision}: {said}")
    return tried, wrong


def _finding(where: str, what: str, tried: int, wrong: Sequence[str], *, is_whole: bool = True) -> Finding:
    name = f"{what} on {where}"
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        advice = "do not trust results of this machine; please report this with all that doctor prints"
        are_wrong = (
            f"{len(wrong)} of {counted(tried, 'reduction')} {'is' if len(wrong) == 1 else 'are'} WRONG"
        )
        return Finding(name, f"{are_wrong}: {wrong[0]}{more}", False, advice)
    are_right = f"{counted(tried, 'reduction')} {'is' if tried == 1 else 'are'} right"
    if not is_whole:
        found = f"{are_right}, others were not reached" if tried else "not reached"
        return Finding(name, found, is_complete=False)
    return Finding(name, are_right)

"""crossdevice under precision="fast" gives TensorFlow's bits, and differs only where it says so.

`tensorflow_2_21.npz` holds what TensorFlow 2.21 answered; `record_tensorflow.py` beside it says how, and
records it again. TensorFlow itself is needed by the last test only.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import crossdevice as cd

torch = pytest.importorskip("torch")

GOLDEN_FILE = Path(__file__).with_name("tensorflow_2_21.npz")
LIBRARIES = ("numpy", "torch")
FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = (
    *FLOATS,
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("complex64", "complex128"),
)
LOWERINGS = ("auto", "off")

Array = Any


class Golden:
    """A recorded file: its cases, and their arrays in their own dtypes."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as archive:
            self._arrays = dict(archive)
        index = json.loads(self._arrays.pop("index").tobytes())
        self.version: str = index["tensorflow"]
        self.cases: list[dict[str, Any]] = index["cases"]

    def array(self, name: str, dtype: str) -> np.ndarray:
        return self._arrays[name].view(dtype_named(dtype))

    def integers(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def replicas(self, case: dict[str, Any], shape: tuple[int, ...], start: int) -> list[np.ndarray]:
        rows = self.array(f"inputs/{case['dtype']}/{case['kind']}", case["dtype"])[: case["num_replicas"]]
        stop = start + int(np.prod(shape))
        return [row[start:stop].reshape(shape) for row in rows]

    def result(self, case: dict[str, Any]) -> np.ndarray:
        return self.array(f"results/{case['result_dtype']}", case["result_dtype"])[case["result_row"]]


@functools.cache
def golden() -> Golden:
    return Golden(GOLDEN_FILE)


def dtype_named(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def to_library(array: np.ndarray, library: str) -> Array:
    if library == "numpy":
        return array.copy()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view("int16").copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def to_numpy(array: Array) -> np.ndarray:
    if isinstance(array, np.ndarray):
        return array
    if array.dtype == torch.bfloat16:
        return array.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return array.numpy()


def parts(array: np.ndarray) -> np.ndarray:
    """A complex array as its real numbers; any other as it is."""
    array = np.ascontiguousarray(array)
    return array.reshape(-1).view(array.real.dtype) if array.dtype.kind == "c" else array.reshape(-1)


def assert_same_bits(actual: np.ndarray, expected: np.ndarray, name: str) -> None:
    """Bit for bit; of a NaN only that it is one, since IEEE 754 leaves its sign and payload open."""
    assert actual.dtype == expected.dtype, name
    ours, theirs = parts(actual), parts(expected)
    if ours.dtype.kind not in "iu":
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(theirs), name)
        ours, theirs = ours[~np.isnan(ours)], theirs[~np.isnan(theirs)]
    width = f"u{ours.dtype.itemsize}"
    np.testing.assert_array_equal(ours.view(width), theirs.view(width), name)


def reduced(case: dict[str, Any], source: Golden, library: str, lowering: str) -> np.ndarray:
    """What crossdevice answers: the values of the case's batch end to end, the same on every destination."""
    edges = np.cumsum([0, *(int(np.prod(shape)) for shape in case["shapes"])])
    values = []
    for shape, start in zip(case["shapes"], edges, strict=False):
        arrays = [to_library(array, library) for array in source.replicas(case, tuple(shape), int(start))]
        values.append(cd.PerReplica(arrays, [f"cpu:{replica % 8}" for replica in range(len(arrays))]))
    results = called(case, values, lowering)
    flat = []
    for result, shape in zip(results, case["shapes"], strict=True):
        components = result.values if isinstance(result, cd.Mirrored) else (result,)
        assert len(components) == (1 if case["destination"] else case["num_replicas"])
        arrays = [to_numpy(component) for component in components]
        assert {array.shape for array in arrays} == {tuple(shape)}
        for array in arrays[1:]:
            assert_same_bits(array, arrays[0], case["name"])
        flat.append(arrays[0].reshape(-1))
    return np.concatenate(flat)


def reduced_slices(case: dict[str, Any], source: Golden, library: str, lowering: str) -> Any:
    """What crossdevice answers to a case of IndexedSlices: the result on its last destination."""
    name, shape = case["name"], case["dense_shape"]
    replicas = []
    for replica, num_rows in enumerate(case["rows"]):
        values = to_library(source.array(f"{name}/values/{replica}", case["dtype"]), library)
        if num_rows is not None:
            indices = to_library(source.integers(f"{name}/indices/{replica}"), library)
            values = cd.IndexedSlices(values, indices, shape)
        replicas.append(values)
    batch = [cd.PerReplica(replicas)]
    if case["call"] == "batch_reduce":
        numbers = [to_library(np.float32([replica]), library) for replica in range(len(replicas))]
        batch.append(cd.PerReplica(numbers))
    result = called(case, batch, lowering)[0]
    return result.values[-1] if isinstance(result, cd.Mirrored) else result


def called(case: dict[str, Any], values: list[cd.PerReplica], lowering: str) -> list[Any]:
    algorithm = getattr(cd, case["algorithm"])
    ops = algorithm() if case.get("num_packs") is None else algorithm(num_packs=case["num_packs"])
    options = cd.CommunicationOptions(precision="fast", lowering=lowering)
    if case["call"] == "reduce":
        (value,) = values
        return [ops.reduce(case["op"], value, case["destination"] or value, options)]
    return ops.batch_reduce(case["op"], [(value, value) for value in values], options)


def in_order(rows: np.ndarray) -> np.ndarray:
    """Left to right, rounded at every addition."""
    return functools.reduce(np.add, rows)


def finished(total: np.ndarray, case: dict[str, Any]) -> np.ndarray:
    """The sum, divided in the result's dtype if it is a mean."""
    if case["op"] == "SUM":
        return total
    dtype = {"int32": np.dtype("float64")}.get(case["dtype"], total.dtype)
    return total.astype(dtype) / dtype.type(case["num_replicas"])


def dense_cases(source: Golden, evidence: str = "") -> list[dict[str, Any]]:
    return [case for case in source.cases if "shapes" in case and case["evidence"] == evidence]


def has_complex_infinities(case: dict[str, Any]) -> bool:
    """Means that TensorFlow divides by the complex number n + 0i: see the test of that name."""
    return case["op"] == "MEAN" and case["dtype"].startswith("complex") and case["kind"] == "special"


def grouped(cases: Iterable[dict[str, Any]], key: Callable[[dict[str, Any]], Any]) -> list[Any]:
    return sorted({key(case) for case in cases})


def group_of(case: dict[str, Any]) -> tuple[str, str, str]:
    return case["algorithm"], case["op"], case["dtype"]


# -------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("library", ["numpy", pytest.param("torch", marks=pytest.mark.more("a repetition"))])
@pytest.mark.parametrize("group", grouped(dense_cases(golden()), group_of), ids="-".join)
def test_fast_gives_tensorflows_bits(group: tuple[str, str, str], library: str, lowering: str) -> None:
    for case in dense_cases(golden()):
        if group_of(case) == group and not has_complex_infinities(case):
            ours = reduced(case, golden(), library, lowering)
            assert_same_bits(ours, golden().result(case), case["name"])


@pytest.mark.parametrize("num_bytes", [3 << 20, 25 << 20], ids=["threads", "streaming"])
@pytest.mark.parametrize(
    "case",
    [
        case
        for case in dense_cases(golden())
        if case["num_replicas"] == 8 and case["num_packs"] in (None, 2) and not has_complex_infinities(case)
    ],
    ids=lambda c: c["name"],
)
def test_fast_gives_tensorflows_bits_in_large_arrays_too(case: dict[str, Any], num_bytes: int) -> None:
    """Elements do not see each other: the recorded row, repeated until all that is read and written has
    `num_bytes`, has the recorded result, repeated. Kernels take other paths there than for 40 elements."""
    rows = golden().array(f"inputs/{case['dtype']}/{case['kind']}", case["dtype"])[: case["num_replicas"]]
    repeats = num_bytes // (2 * rows.nbytes) + 1
    value = cd.PerReplica([np.tile(row, repeats) for row in rows])
    (result,) = called(case, [value], "auto")
    for component in result.values[1:]:
        assert component.tobytes() == result.values[0].tobytes()
    expected = np.tile(golden().result(case), repeats)
    assert_same_bits(result.values[0], expected, case["name"])


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "case", [case for case in golden().cases if case["name"].startswith("sparse/")], ids=lambda c: c["name"]
)
def test_slices_are_joined_and_divided_as_in_tensorflow(
    case: dict[str, Any], library: str, lowering: str
) -> None:
    result = reduced_slices(case, golden(), library, lowering)
    name = case["name"]
    expected = golden().array(f"{name}/result", case["result_dtype"])
    if case["is_dense"]:
        assert to_numpy(result).shape == expected.shape
        assert_same_bits(to_numpy(result), expected, name)
        return
    assert isinstance(result, cd.IndexedSlices)
    assert to_numpy(result.values).shape == expected.shape
    assert_same_bits(to_numpy(result.values), expected, name)
    assert_same_bits(to_numpy(result.indices), golden().integers(f"{name}/result indices"), name)
    shape = case["result_dense_shape"]
    assert result.dense_shape == (None if shape is None else tuple(shape))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "case",
    [case for case in golden().cases if case["name"].startswith("broadcast/")],
    ids=lambda c: c["name"],
)
def test_broadcast_changes_no_bit(case: dict[str, Any], library: str) -> None:
    value = to_library(golden().array(f"inputs/{case['dtype']}/{case['kind']}", case["dtype"])[0], library)
    result = cd.ReductionToOneDevice().broadcast(value, cd.PerReplica([0.0] * case["num_devices"]))
    components = result.values if isinstance(result, cd.Mirrored) else (result,)
    assert len(components) == case["num_devices"]
    for component in components:
        assert_same_bits(to_numpy(component), golden().result(case), case["name"])


# -------------------------------------------------------------------- what the golden set can tell


def test_every_dtype_is_recorded_for_every_replica_count() -> None:
    recorded = {(c["algorithm"], c["call"], c["dtype"], c["num_replicas"]) for c in dense_cases(golden())}
    one = itertools.product(["ReductionToOneDevice"], ["reduce"], DTYPES, range(1, 9))
    two = itertools.product(["HierarchicalCopyAllReduce"], ["batch_reduce"], DTYPES, (2, 4, 6, 8))
    assert {*one, *two} <= recorded
    assert golden().version == "2.21.0"


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_golden_set_tells_orders_and_precisions_apart(dtype: str) -> None:
    case, other = (
        next(
            case
            for case in dense_cases(golden())
            if group_of(case) == (algorithm, "SUM", dtype) and case["num_replicas"] == 8
        )
        for algorithm in ("ReductionToOneDevice", "HierarchicalCopyAllReduce")
    )
    assert case["result_row"] != other["result_row"]
    for precision in ("accurate", "exact"):
        value = cd.PerReplica(golden().replicas(case, (40,), 0))
        rounded_once = cd.reduce(value, "sum", options=cd.CommunicationOptions(precision=precision))
        assert rounded_once.tobytes() != golden().result(case).tobytes()


# -------------------------------------------------------------------- where TensorFlow's bits are not ours


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("case", dense_cases(golden(), "the last replica is lost"), ids=lambda c: c["name"])
def test_hierarchical_copy_counts_every_replica_where_tensorflow_loses_the_last(
    case: dict[str, Any], library: str, lowering: str
) -> None:
    rows = golden().array(f"inputs/{case['dtype']}/random", case["dtype"])[: case["num_replicas"]]
    half = len(rows) // 2
    with np.errstate(all="ignore"):
        first, second = in_order(rows[:half]), in_order(rows[half:])
        without_last = finished(first + in_order(rows[half:-1]), case)
        with_all = finished(first + second, case)
    assert_same_bits(golden().result(case), without_last, case["name"])
    assert_same_bits(reduced(case, golden(), library, lowering), with_all, case["name"])


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("case", dense_cases(golden(), "the algorithm is not used"), ids=lambda c: c["name"])
def test_reduce_and_batch_reduce_give_the_same_bits_where_tensorflow_takes_two_paths(
    case: dict[str, Any], library: str, lowering: str
) -> None:
    """TensorFlow's `reduce` does not run the algorithm on CPUs; its `batch_reduce` does. Ours both do."""
    like_batch = {**case, "call": "batch_reduce"}
    theirs = {
        algorithm: next(
            golden().result(other)
            for other in dense_cases(golden())
            if group_of(other) == (algorithm, case["op"], case["dtype"]) and other["num_replicas"] == 8
        )
        for algorithm in ("ReductionToOneDevice", "HierarchicalCopyAllReduce")
    }
    assert_same_bits(golden().result(case), theirs["ReductionToOneDevice"], case["name"])
    for ours in (case, like_batch):
        assert_same_bits(
            reduced(ours, golden(), library, lowering), theirs["HierarchicalCopyAllReduce"], case["name"]
        )


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("case", dense_cases(golden(), "one integer is not divided"), ids=lambda c: c["name"])
def test_the_mean_of_one_integer_is_a_float_where_tensorflow_keeps_the_integer(
    case: dict[str, Any], library: str, lowering: str
) -> None:
    assert case["result_dtype"] == case["dtype"]
    elsewhere = next(
        other
        for other in dense_cases(golden())
        if group_of(other) == group_of(case) and other["destination"] and other["num_replicas"] == 1
    )
    # TensorFlow itself divides once the result goes to another device.
    assert_same_bits(reduced(case, golden(), library, lowering), golden().result(elsewhere), case["name"])


@pytest.mark.parametrize("case", dense_cases(golden(), "sums in eights from ten on"), ids=lambda c: c["name"])
def test_more_than_nine_replicas_are_added_left_to_right_where_tensorflow_adds_eights(
    case: dict[str, Any],
) -> None:
    """TensorFlow's kernel adds n modulo 8 inputs (8 or 9 for 0 or 1), then one sum of 8 after the other.

    That order belongs to one CPU kernel, not to the documents: `"fast"` stays left to right at any count.
    """
    rows = golden().array(f"inputs/{case['dtype']}/random", case["dtype"])
    with np.errstate(all="ignore"):
        in_eights = finished(in_order(rows[:4]) + in_order(rows[4:]), case)
        left_to_right = finished(in_order(rows), case)
    assert_same_bits(golden().result(case), in_eights, case["name"])
    assert_same_bits(reduced(case, golden(), "numpy", "auto"), left_to_right, case["name"])


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_complex_means_divide_each_part_where_tensorflow_divides_by_a_complex_number(
    library: str, lowering: str
) -> None:
    """Finite means have TensorFlow's bits. An infinite part divided by n + 0i makes NaN of both parts, and
    a zero can lose its sign; dividing the parts by n, as we do, keeps both."""
    cases = [case for case in dense_cases(golden()) if has_complex_infinities(case)]
    assert cases
    for case in cases:
        ours, theirs = reduced(case, golden(), library, lowering), golden().result(case)
        finite = np.isfinite(ours)
        np.testing.assert_array_equal(ours[finite], theirs[finite], case["name"])  # -0 == +0
        our_parts, their_parts = parts(ours[~finite]), parts(theirs[~finite])
        assert np.all(np.isnan(their_parts) | (our_parts == their_parts)), case["name"]


# -------------------------------------------------------------------- TensorFlow itself

LIVE = [
    "ReductionToOneDevice.reduce/SUM/float32/random/8",
    "ReductionToOneDevice.reduce/MEAN/bfloat16/random/7",
    "ReductionToOneDevice.reduce/MEAN/int8/random/5",
    "ReductionToOneDevice.reduce/SUM/float16/special/8",
    "HierarchicalCopyAllReduce.batch_reduce/3 packs/SUM/bfloat16/random/8",
    "HierarchicalCopyAllReduce.batch_reduce/2 packs/MEAN/float64/random/6",
    "HierarchicalCopyAllReduce.batch_reduce/0 packs/SUM/complex64/random/4",
]


@pytest.mark.more("TensorFlow")
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
def test_installed_tensorflow_still_gives_these_bits(tmp_path: Path) -> None:
    """In a process of its own, so that this one stays free of TensorFlow."""
    recorder = GOLDEN_FILE.with_name("record_tensorflow.py")
    target = tmp_path / "live.npz"
    recording = subprocess.run(
        [sys.executable, recorder, "--output", target, "--only", *LIVE],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert recording.returncode == 0, recording.stderr[-2000:]
    live = Golden(target)
    assert sorted(case["name"] for case in live.cases) == sorted(LIVE)
    for case, library, lowering in itertools.product(live.cases, LIBRARIES, LOWERINGS):
        assert_same_bits(reduced(case, live, library, lowering), live.result(case), case["name"])

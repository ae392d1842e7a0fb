"""Records what TensorFlow computes, so that tests can compare bits where it is not installed.

    python tests/golden/record_tensorflow.py

runs TensorFlow 2.21 on 8 logical CPU devices and writes `tensorflow_2_21.npz` beside this file. Inputs come
from fixed seeds and the file has no dates in it: recording again gives the same file.

The file holds, as unsigned integers of the same width (NumPy has no bfloat16, and NaNs stay as they are):

- `index`: JSON text, as bytes. `cases` says of each call what was called and where its arrays are.
- `inputs/<dtype>/<kind>`: one row per replica. A dense case takes the first `num_replicas` rows and cuts
  them into arrays of `shapes`, one after the other.
- `results/<dtype>`: one row per distinct result, laid out like an input row. A case names its row.
- `sparse/<name>/...` and `broadcast/<name>/...`: the arrays of the few cases that do not fit these tables.

`evidence` is empty for the cases in which crossdevice must give the same bits; otherwise it names the
defect or the limit of TensorFlow that the case shows.

Left out: subnormal numbers of every dtype but float16, because TensorFlow's kernels flush them to zero on
CPUs (float16 is computed in float32, where its subnormals are normal).
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

GOLDEN_FILE = Path(__file__).with_name("tensorflow_2_21.npz")
NUM_DEVICES = 8
NUM_ROWS = 12
SHAPES = [(5, 3), (), (0, 2), (7,), (17,)]
NUM_ELEMENTS = sum(int(np.prod(shape)) for shape in SHAPES)

FLOAT_DIGITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}
COMPLEX_PARTS = {"complex64": "float32", "complex128": "float64"}
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = (*FLOAT_DIGITS, *COMPLEX_PARTS, *INTEGERS)

Case = dict[str, Any]


def dtype_named(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def as_bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same memory as unsigned integers; a complex number is two of them."""
    if array.dtype.kind == "c":
        array = array.view(array.real.dtype)
    return array.view(f"u{array.dtype.itemsize}")


# -------------------------------------------------------------------- inputs


def inputs(dtype: str, kind: str) -> np.ndarray[Any, Any]:
    """One row of elements per replica, the same in every run."""
    random = np.random.default_rng(zlib.crc32(f"{dtype}/{kind}".encode()))
    if dtype in COMPLEX_PARTS:
        part = COMPLEX_PARTS[dtype]
        make = _random_floats if kind == "random" else _special_floats
        rows = np.empty((NUM_ROWS, NUM_ELEMENTS, 2), part)
        rows[..., 0], rows[..., 1] = make(part, random), make(part, random)[:, ::-1]
        return rows.view(dtype)[..., 0]
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        return random.integers(limits.min, limits.max, (NUM_ROWS, NUM_ELEMENTS), dtype, endpoint=True)
    return (_random_floats if kind == "random" else _special_floats)(dtype, random)


def _random_floats(dtype: str, random: np.random.Generator) -> np.ndarray[Any, Any]:
    """Magnitudes spread over the mantissa, so that every addition rounds; a third nearly cancels."""
    digits = FLOAT_DIGITS[dtype]
    shape = (NUM_ROWS, NUM_ELEMENTS)
    exponents = random.integers(-digits // 4, digits // 4, shape, endpoint=True)
    rows = np.ldexp(random.uniform(1, 2, shape) * random.choice([-1, 1], shape), exponents)
    cancelling = slice(0, NUM_ELEMENTS // 3)
    rows[1::2, cancelling] = -rows[::2, cancelling] * (
        1 + random.uniform(-1, 1, rows[::2, cancelling].shape) / 64
    )
    return rows.astype(dtype_named(dtype))


def _special_floats(dtype: str, random: np.random.Generator) -> np.ndarray[Any, Any]:
    """Columns with infinities, NaN, zeros of both signs, overflow, and integers beside their unit."""
    rows = _random_floats(dtype, random)
    info = ml_dtypes.finfo(dtype_named(dtype))
    largest, first_even = float(info.max), 2.0 ** FLOAT_DIGITS[dtype]
    columns: list[list[float]] = [
        [np.inf, 1, 2, 3],
        [1, -np.inf, 2, 3],
        [np.inf, -np.inf, 1, 2],
        [1, 2, 3, np.inf, 4, -np.inf],
        [np.nan, 1, 2, 3],
        [1, 2, 3, np.nan, np.inf],
        [-0.0] * NUM_ROWS,
        [-0.0, 0.0] * (NUM_ROWS // 2),
        [0.0, -0.0] * (NUM_ROWS // 2),
        [largest] * NUM_ROWS,
        [-largest] * NUM_ROWS,
        [largest, largest, -largest, -largest],
        [largest, -largest] * (NUM_ROWS // 2),
        [first_even] + [1.0] * (NUM_ROWS - 1),
        [1.0] * (NUM_ROWS - 1) + [first_even],
        [first_even, 1.0, -first_even, 1.0],
        [1.0, first_even, 1.0, -first_even],
        [-first_even] + [-1.0] * (NUM_ROWS - 1),
    ]
    if dtype == "float16":
        smallest = float(info.smallest_subnormal)
        columns += [[smallest] * NUM_ROWS, [smallest, -3 * smallest, 1023 * smallest, 5 * smallest]]
    for number, column in enumerate(columns):
        padded = [*column, *[1.0] * (NUM_ROWS - len(column))]
        rows[:, number] = np.array(padded).astype(rows.dtype)
    return rows


# -------------------------------------------------------------------- the table of cases


def dense_cases() -> Iterator[Case]:
    one, hierarchical = "ReductionToOneDevice", "HierarchicalCopyAllReduce"
    whole = [(NUM_ELEMENTS,)]
    for dtype, op in itertools.product(DTYPES, ("SUM", "MEAN")):
        for num_replicas in range(1, NUM_DEVICES + 1):
            yield _dense(one, "reduce", op, dtype, num_replicas, whole)
        for num_replicas, num_packs in itertools.product((2, 4, 6, 8), (0, 1, 2, 3)):
            yield _dense(hierarchical, "batch_reduce", op, dtype, num_replicas, SHAPES, num_packs=num_packs)
        for num_replicas in (1, 5):
            yield _dense(one, "reduce", op, dtype, num_replicas, whole, destination="cpu:7")
        yield _dense(one, "batch_reduce", op, dtype, 7, SHAPES)
        yield _dense("NcclAllReduce", "reduce", op, dtype, 6, whole, num_packs=1)
        if dtype not in INTEGERS:
            for num_replicas in (1, 2, 3, 5, 8):
                yield _dense(one, "reduce", op, dtype, num_replicas, whole, kind="special")
            for num_replicas in (2, 4, 8):
                yield _dense(
                    hierarchical, "batch_reduce", op, dtype, num_replicas, SHAPES, num_packs=2, kind="special"
                )
    for dtype, op in itertools.product(("float32", "bfloat16", "int32"), ("SUM", "MEAN")):
        for num_replicas in (3, 5, 7):
            yield _dense(
                hierarchical,
                "batch_reduce",
                op,
                dtype,
                num_replicas,
                SHAPES,
                num_packs=1,
                evidence="the last replica is lost",
            )
        yield _dense(
            hierarchical, "reduce", op, dtype, 8, whole, num_packs=1, evidence="the algorithm is not used"
        )
        yield _dense(one, "reduce", op, dtype, NUM_ROWS, whole, evidence="sums in eights from ten on")


def _dense(
    algorithm: str,
    call: str,
    op: str,
    dtype: str,
    num_replicas: int,
    shapes: list[tuple[int, ...]],
    *,
    num_packs: int | None = None,
    kind: str = "random",
    destination: str | None = None,
    evidence: str = "",
) -> Case:
    if algorithm == "ReductionToOneDevice" and num_replicas == 1 and op == "MEAN" and dtype in INTEGERS:
        evidence = evidence or ("" if destination else "one integer is not divided")
    packs = "" if num_packs is None else f"/{num_packs} packs"
    where = "" if destination is None else f" to {destination}"
    return {
        "name": f"{algorithm}.{call}{where}{packs}/{op}/{dtype}/{kind}/{num_replicas}",
        "algorithm": algorithm,
        "call": call,
        "op": op,
        "dtype": dtype,
        "kind": kind,
        "num_replicas": num_replicas,
        "num_packs": num_packs,
        "shapes": shapes,
        "destination": destination,
        "evidence": evidence,
    }


def sparse_cases() -> Iterator[Case]:
    """`rows`: how many rows each replica has; None is a dense replica. Two columns, five rows in all."""
    for dtype, op in itertools.product(("float32", "bfloat16", "float16", "int32", "int8"), ("SUM", "MEAN")):
        yield _sparse("uneven rows", op, dtype, [3, 1, 4], ["int64"] * 3, has_dense_shape=True)
        yield _sparse(
            "one replica elsewhere", op, dtype, [3], ["int64"], has_dense_shape=True, destination="cpu:7"
        )
    for op in ("SUM", "MEAN"):
        yield _sparse("no dense_shape", op, "float32", [2, 2], ["int32"] * 2, has_dense_shape=False)
        yield _sparse("no rows", op, "float32", [0, 2, 0, 1], ["int32"] * 4, has_dense_shape=True)
        yield _sparse("two index dtypes", op, "float32", [2, 3], ["int32", "int64"], has_dense_shape=True)
        yield _sparse("some dense", op, "float32", [3, None, 4], ["int64"] * 3, has_dense_shape=True)
        yield _sparse(
            "in a batch",
            op,
            "float32",
            [2, 1, 3, 1],
            ["int64"] * 4,
            has_dense_shape=True,
            call="batch_reduce",
        )


def _sparse(
    name: str,
    op: str,
    dtype: str,
    rows: list[int | None],
    index_dtypes: list[str],
    *,
    has_dense_shape: bool,
    destination: str | None = None,
    call: str = "reduce",
) -> Case:
    return {
        "name": f"sparse/{name}/{op}/{dtype}",
        "algorithm": "HierarchicalCopyAllReduce" if call == "batch_reduce" else "ReductionToOneDevice",
        "call": call,
        "op": op,
        "dtype": dtype,
        "rows": rows,
        "index_dtypes": index_dtypes,
        "dense_shape": [5, 2] if has_dense_shape else None,
        "destination": destination,
        "evidence": "",
    }


def sparse_inputs(case: Case) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any] | None]]:
    """(values, indices) of each replica; indices repeat, inside a replica and between them."""
    random = np.random.default_rng(zlib.crc32(case["name"].encode()))
    elements = inputs(case["dtype"], "random")
    for replica, (num_rows, index_dtype) in enumerate(zip(case["rows"], case["index_dtypes"], strict=True)):
        values = elements[replica, : 2 * (5 if num_rows is None else num_rows)].reshape(-1, 2)
        indices = None if num_rows is None else random.integers(0, 3, num_rows, index_dtype)
        yield values, indices


def broadcast_cases() -> Iterator[Case]:
    for dtype, num_devices in itertools.product(DTYPES, (1, 5)):
        kind = "random" if dtype in INTEGERS else "special"
        yield {
            "name": f"broadcast/{dtype}/{num_devices}",
            "dtype": dtype,
            "kind": kind,
            "num_devices": num_devices,
            "evidence": "",
        }


# -------------------------------------------------------------------- running TensorFlow


class Recorder:
    """Runs cases in TensorFlow and keeps their arrays for the file."""

    def __init__(self) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        import tensorflow as tf
        from tensorflow.python.distribute import cross_device_ops, values

        self.tf, self._ops, self._values = tf, cross_device_ops, values
        (host, *_) = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            host, [tf.config.LogicalDeviceConfiguration() for _ in range(NUM_DEVICES)]
        )
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}
        self._rows: dict[str, dict[bytes, int]] = {}

    def record_dense(self, case: Case) -> Case:
        rows = inputs(case["dtype"], case["kind"])
        self.arrays[f"inputs/{case['dtype']}/{case['kind']}"] = as_bits(rows)
        edges = np.cumsum([0, *(int(np.prod(shape)) for shape in case["shapes"])])
        values = [
            self._per_replica([row[low:high].reshape(shape) for row in rows[: case["num_replicas"]]])
            for shape, (low, high) in zip(case["shapes"], itertools.pairwise(edges), strict=True)
        ]
        results = [self._only(result, case) for result in self._called(case, values)]
        for result, shape in zip(results, case["shapes"], strict=True):
            assert result.shape == tuple(shape), case["name"]
        flat = np.concatenate([result.reshape(-1) for result in results])
        return {**case, "result_dtype": flat.dtype.name, "result_row": self._row_of(flat)}

    def record_sparse(self, case: Case) -> Case:
        tf = self.tf
        parts = []
        for replica, (values, indices) in enumerate(sparse_inputs(case)):
            self.arrays[f"{case['name']}/values/{replica}"] = as_bits(values)
            with tf.device(f"/cpu:{replica}"):
                part = tf.constant(values)
                if indices is not None:
                    self.arrays[f"{case['name']}/indices/{replica}"] = indices
                    dense_shape = None if case["dense_shape"] is None else tf.constant(case["dense_shape"])
                    part = tf.IndexedSlices(part, tf.constant(indices), dense_shape)
                parts.append(part)
        per_replica = self._values.PerReplica(parts)
        batch = [per_replica]
        if case["call"] == "batch_reduce":
            batch.append(self._per_replica([np.float32(replica) for replica in range(len(parts))]))
        first = self._called(case, batch)[0]
        component = first.values[-1] if isinstance(first, self._values.Mirrored) else first
        if not isinstance(component, tf.IndexedSlices):
            result = component.numpy()
            self.arrays[f"{case['name']}/result"] = as_bits(result)
            return {**case, "result_dtype": result.dtype.name, "result_dense_shape": None, "is_dense": True}
        values, indices = component.values.numpy(), component.indices.numpy()
        self.arrays[f"{case['name']}/result"] = as_bits(values)
        self.arrays[f"{case['name']}/result indices"] = indices
        shape = component.dense_shape
        return {
            **case,
            "result_dtype": values.dtype.name,
            "result_dense_shape": None if shape is None else shape.numpy().tolist(),
            "is_dense": False,
        }

    def record_broadcast(self, case: Case) -> Case:
        row = inputs(case["dtype"], case["kind"])[0]
        self.arrays[f"inputs/{case['dtype']}/{case['kind']}"] = as_bits(inputs(case["dtype"], case["kind"]))
        targets = self._per_replica([np.float32(0)] * case["num_devices"])
        result = self._ops.ReductionToOneDevice().broadcast(self.tf.constant(row), targets)
        flat = self._only(result, {**case, "num_replicas": case["num_devices"], "destination": None})
        return {**case, "result_dtype": flat.dtype.name, "result_row": self._row_of(flat)}

    def _per_replica(self, arrays: list[Any]) -> Any:
        placed = []
        for replica, array in enumerate(arrays):
            with self.tf.device(f"/cpu:{replica % NUM_DEVICES}"):
                placed.append(self.tf.constant(array))
        return self._values.PerReplica(placed)

    def _called(self, case: Case, values: list[Any]) -> list[Any]:
        """Through the public calls; a batch of one device list is what makes all-reduces run on CPUs."""
        algorithm = getattr(self._ops, case["algorithm"])
        ops = algorithm() if case.get("num_packs") is None else algorithm(num_packs=case["num_packs"])
        op = self.tf.distribute.ReduceOp(case["op"])
        destination = case["destination"]
        if case["call"] == "reduce":
            (value,) = values
            return [ops.reduce(op, value, f"/{destination}" if destination else value)]
        return list(ops.batch_reduce(op, [(value, value) for value in values]))

    def _only(self, result: Any, case: Case) -> np.ndarray[Any, Any]:
        """The result's array, after a look at the others: every destination must have the same bits."""
        num_results = 1 if case["destination"] else case["num_replicas"]
        components = result.values if isinstance(result, self._values.Mirrored) else (result,)
        assert len(components) == num_results, case["name"]
        arrays = [component.numpy() for component in components]
        arrays = [np.asarray(array, arrays[0].dtype) for array in arrays]
        assert len({array.tobytes() for array in arrays}) == 1, case["name"]
        return arrays[0]

    def _row_of(self, flat: np.ndarray[Any, Any]) -> int:
        rows = self._rows.setdefault(flat.dtype.name, {})
        return rows.setdefault(flat.tobytes(), len(rows))

    def save(self, path: Path, cases: list[Case]) -> None:
        arrays = dict(self.arrays)
        for dtype, rows in self._rows.items():
            table = np.stack([np.frombuffer(row, dtype_named(dtype)) for row in rows])
            arrays[f"results/{dtype}"] = as_bits(table)
        index = {"tensorflow": self.tf.__version__, "cases": cases}
        arrays["index"] = np.frombuffer(json.dumps(index, separators=(",", ":")).encode(), np.uint8)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in sorted(arrays):
                buffer = io.BytesIO()
                np.lib.format.write_array(buffer, arrays[name], allow_pickle=False)
                # numpy.savez would write the time of day into each entry.
                entry = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, buffer.getvalue())


def record(path: Path, only: list[str] | None = None) -> None:
    """Writes the cases whose names are in `only`, or all of them."""
    recorder = Recorder()
    cases = [
        run(case)
        for table, run in (
            (dense_cases(), recorder.record_dense),
            (sparse_cases(), recorder.record_sparse),
            (broadcast_cases(), recorder.record_broadcast),
        )
        for case in table
        if not only or case["name"] in only
    ]
    recorder.save(path, cases)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=GOLDEN_FILE)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="names of cases; all of them if left out")
    arguments = parser.parse_args()
    record(arguments.output, arguments.only)

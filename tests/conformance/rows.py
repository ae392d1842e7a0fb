"""The one table of the laws: algorithms x backends x dtypes x replica counts x operations x precisions.

Algorithms of the registry have their rows from there. A new backend gets one here, and is then held to every
law. What a row cannot keep yet is named in its `gaps` with the reason, and shows as an expected failure.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import crossdevice as cd
from conformance import array_libraries
from conformance.oracle import FORMATS, NUMPY_DTYPES, expected
from crossdevice.algorithms.registry import ALGORITHMS, OWN_ALGORITHMS
from crossdevice.process_groups.engines.thread_engine import Mailboxes, ThreadEngine
from crossdevice.process_groups.group import ProcessGroup

DTYPES = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "complex64",
)
FLOATS = tuple(FORMATS)
COUNTS = range(1, 10)
OPS = ("SUM", "MEAN", "MIN", "MAX", "PROD")
LOWERINGS = ("auto", "off")
PRECISIONS = ("fast", "accurate", "exact")


class OnlyReduces(cd.CrossDeviceOps):
    """A user's class that overrides `reduce_implementation` and nothing else."""

    def reduce_implementation(
        self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any
    ) -> Any:
        return cd.DirectAllReduce().reduce(reduce_op, per_replica_value, destinations, options)


@functools.cache
def group_of_one() -> ProcessGroup:
    """A group without other processes: values go the way of those that do cross between processes."""
    return ProcessGroup(ThreadEngine(Mailboxes(1), 0))


@dataclasses.dataclass(frozen=True)
class AlgorithmRow:
    """An algorithm: how it is made, its name in the registry if it has one, and the laws it cannot keep."""

    name: str
    make: Callable[[], cd.CrossDeviceOps]
    registered: str | None = None
    gaps: Mapping[str, str] = dataclasses.field(default_factory=dict)


ALGORITHM_ROWS = (
    *(AlgorithmRow(name, ALGORITHMS.load(name), name) for name in OWN_ALGORITHMS),
    AlgorithmRow("one_other_device", lambda: cd.ReductionToOneDevice(reduce_to_device="cpu:11")),
    AlgorithmRow("by_name_in_packs", lambda: cd.AllReduceCrossDeviceOps("tree", num_packs=3)),
    AlgorithmRow(
        "by_name_in_small_groups", lambda: cd.AllReduceCrossDeviceOps("hierarchical_copy", 0, 64, 3)
    ),
    AlgorithmRow("collective", cd.CollectiveAllReduce),
    AlgorithmRow("collective_in_a_group", lambda: cd.CollectiveAllReduce(group=group_of_one())),
    AlgorithmRow("users_own", OnlyReduces),
)

WITH_PACKS = tuple(
    algorithm
    for algorithm in map(ALGORITHMS.load, ALGORITHMS)
    if "num_packs" in inspect.signature(algorithm).parameters
)
"""The classes with a `num_packs`."""


@dataclasses.dataclass(frozen=True)
class BackendRow:
    """An array library: from ndarrays to its arrays, and its arrays' memory as ndarrays."""

    name: str
    place: Callable[[np.ndarray, int], Any]
    """A new array with these values on the host device of this number."""
    memory: Callable[[Any], np.ndarray]
    gaps: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_immutable: bool = False
    dtypes: Sequence[str] = DTYPES
    is_sampled: bool = False
    """Some combinations of long tables stand for all of them."""

    @property
    def is_installed(self) -> bool:
        """Whether the library is there to be tested."""
        return importlib.util.find_spec(self.name) is not None

    @functools.cached_property
    def array_type(self) -> type:
        """The type of the library's arrays."""
        return type(self.make(np.zeros(1)))

    @property
    def floats(self) -> tuple[str, ...]:
        """Those of its dtypes that are rounded, or every other one."""
        return tuple(dtype for dtype in FLOATS if dtype in self.dtypes)[:: 2 if self.is_sampled else 1]

    @property
    def pack_counts(self) -> Sequence[int]:
        """Numbers of packs to try: none, one, more than there are values."""
        return (0, 1, 5) if self.is_sampled else range(6)

    def make(self, array: np.ndarray) -> Any:
        """A new array with these values."""
        return self.place(array, 0)

    def arrays(self, arrays: Sequence[np.ndarray]) -> list[Any]:
        """New arrays with these values, on one device after another."""
        return [self.place(array, number) for number, array in enumerate(arrays)]

    def per_replica(self, arrays: Sequence[np.ndarray], devices: Any = None) -> cd.PerReplica:
        """A PerReplica of new arrays with these values."""
        if devices is None:
            return cd.PerReplica(self.arrays(arrays))
        numbers = [cd.Device.parse(device).index for device in devices]
        return cd.PerReplica(list(map(self.place, arrays, numbers)), devices)

    def lists(self, array: Any) -> Any:
        """The elements as nested lists."""
        return self.memory(array).tolist()

    def keeps_apart(self, results: Sequence[Any], inputs: Sequence[Any]) -> bool:
        """Whether results have memory of their own; what cannot be written to may share it."""
        memories = list(map(self.memory, (*results, *inputs)))
        return self.is_immutable or not any(
            np.shares_memory(result, other)
            for number, result in enumerate(memories[: len(results)])
            for other in memories[number + 1 :]
        )

    def product(self, *columns: Any) -> Iterator[Any]:
        """All combinations, or a regular sample of ten or more in which all of up to ten entries occur."""
        combinations = list(itertools.product(*columns))
        strides = [prime for prime in (19, 13, 11, 7, 5) if len(combinations) >= 10 * prime]
        return iter(combinations[:: strides[0] if self.is_sampled and strides else 1])

    def bits(self, array: Any) -> bytes:
        """Dtype, shape and every bit."""
        memory = self.memory(array)
        return repr((memory.dtype.name, memory.shape)).encode() + memory.tobytes()


def _torch_of(array: np.ndarray) -> torch.Tensor:
    array = np.array(array)
    if array.dtype == NUMPY_DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _memory_of_tensor(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(NUMPY_DTYPES["bfloat16"])
    return tensor.numpy()


NUMPY = BackendRow("numpy", lambda array, _: np.array(array), np.asarray)
TORCH = BackendRow("torch", lambda array, _: _torch_of(array), _memory_of_tensor, is_sampled=True)
TORCH_IN_FULL = dataclasses.replace(TORCH, is_sampled=False)
BACKEND_ROWS = (
    NUMPY,
    TORCH,
    TORCH_IN_FULL,
    BackendRow(
        "jax",
        array_libraries.jax_array,
        np.asarray,
        gaps={"out": "JAX arrays cannot be written to"},
        is_immutable=True,
        is_sampled=True,
    ),
    BackendRow(
        "tensorflow",
        array_libraries.tensorflow_tensor,
        np.asarray,
        gaps={"out": "TensorFlow's tensors cannot be written to"},
        is_immutable=True,
        is_sampled=True,
    ),
    BackendRow(
        "array_api_strict",
        array_libraries.strict_array,
        np.from_dlpack,
        dtypes=tuple(dtype for dtype in DTYPES if not dtype.endswith("float16")),
        is_sampled=True,
    ),
)
INSTALLED_ROWS = tuple(row for row in BACKEND_ROWS if row.is_installed and row is not TORCH_IN_FULL)
"""One row for each library that is there."""


def each_algorithm(law: str) -> pytest.MarkDecorator:
    """Runs a test for every algorithm; a row's gap in this law is an expected failure."""
    return pytest.mark.parametrize("row", with_gaps(ALGORITHM_ROWS, law))


def each_backend(law: str) -> pytest.MarkDecorator:
    """Runs a test for every backend; a row's gap in this law is an expected failure."""
    return pytest.mark.parametrize("backend", with_gaps(BACKEND_ROWS, law))


def with_gaps(rows: Sequence[Any], law: str = "") -> list[Any]:
    """Parameters for rows: gaps are expected failures; `make test` has NumPy, and a sample of PyTorch."""
    return [pytest.param(row, id=_id_of(row), marks=list(_marks_of(row, law))) for row in rows]


def _id_of(row: AlgorithmRow | BackendRow) -> str:
    return f"{row.name}_in_full" if row is TORCH_IN_FULL else row.name


def _marks_of(row: AlgorithmRow | BackendRow, law: str) -> Iterator[pytest.MarkDecorator]:
    if law in row.gaps:
        yield pytest.mark.xfail(reason=row.gaps[law], strict=True)
    if isinstance(row, BackendRow) and row not in (NUMPY, TORCH):
        yield pytest.mark.more(f"the laws with {_id_of(row)}")
        yield pytest.mark.skipif(not row.is_installed, reason=f"{row.name} is not installed")


def is_defined(op: str, dtype: str) -> bool:
    """Complex numbers have no order."""
    return not dtype.startswith("complex") or op in ("SUM", "MEAN", "PROD")


def each_option(precisions: Sequence[str] = PRECISIONS) -> Iterator[cd.CommunicationOptions]:
    """Every precision, lowered and stepwise."""
    for precision, lowering in itertools.product(precisions, LOWERINGS):
        yield cd.CommunicationOptions(precision=precision, lowering=lowering)


@functools.cache
def plain_arrays(dtype: str, num_replicas: int, op: str = "SUM") -> tuple[np.ndarray, ...]:
    """Flat arrays whose sums and products are exact in their dtype, so that no order or precision shows.

    Integers take their whole range and wrap around. Floats have zeros of both signs, infinities and NaN.
    """
    choose = random.Random(f"{dtype} {num_replicas} {op}")
    if dtype in FORMATS:
        columns = _float_columns(choose, num_replicas, op)
    elif dtype.startswith("complex"):
        columns = _complex_columns(choose, num_replicas, op)
    else:
        limits = np.iinfo(dtype)
        columns = [
            [choose.randint(int(limits.min), int(limits.max)) for _ in range(num_replicas)] for _ in range(9)
        ]
        columns += [[int(limits.max)] * num_replicas, [int(limits.min)] * num_replicas]
    return tuple(np.array(values, NUMPY_DTYPES[dtype]) for values in zip(*columns, strict=True))


@functools.cache
def plain_result(dtype: str, num_replicas: int, op: str, precision: str) -> np.ndarray:
    """What `plain_arrays` must reduce to."""
    return expected(op, plain_arrays(dtype, num_replicas, op), dtype, precision)


def _float_columns(choose: random.Random, num_replicas: int, op: str) -> list[list[float]]:
    numbers = [0.5, 1.0, 2.0, -0.5, -1.0, -2.0] if op == "PROD" else [float(n) for n in range(-8, 9)]
    columns = [[choose.choice(numbers) for _ in range(num_replicas)] for _ in range(7)]
    for replica, special in ((num_replicas // 2, float("nan")), (0, float("inf")), (-1, -float("inf"))):
        column = [choose.choice(numbers) for _ in range(num_replicas)]
        column[replica] = special
        columns.append(column)
    both = [1.0] * num_replicas
    both[0], both[-1] = float("inf"), -float("inf")
    signs = [0.0 if replica % 3 == 0 else -0.0 for replica in range(num_replicas)]
    return [*columns, both, signs, [-0.0] * num_replicas]


def _complex_columns(choose: random.Random, num_replicas: int, op: str) -> list[list[complex]]:
    parts = [0.5, 1.0, -1.0] if op == "PROD" else [float(n) for n in range(-8, 9)]
    return [
        [complex(choose.choice(parts), choose.choice(parts)) for _ in range(num_replicas)] for _ in range(11)
    ]


def wild_arrays(dtype: str, num_replicas: int, num_elements: int, seed: int) -> list[np.ndarray]:
    """Flat arrays of every magnitude, in which every order and every rounding shows."""
    chosen = np.random.default_rng([seed, num_replicas, num_elements])
    if dtype not in FORMATS:
        part = "float32"
        parts = wild_arrays(part, num_replicas, 2 * num_elements, seed)
        return [array.view(np.complex64) for array in parts]
    form = FORMATS[dtype]
    spread = min(form.greatest_exponent - 4, 2 * form.precision)
    arrays = chosen.uniform(-1, 1, (num_replicas, num_elements))
    arrays *= 2.0 ** chosen.integers(-spread // 2, spread // 2, arrays.shape)
    return list(arrays.astype(NUMPY_DTYPES[dtype]))


def plain_and_wild_arrays(dtype: str, num_replicas: int, num_wild: int, seed: int) -> list[np.ndarray]:
    """Arrays of plain numbers, and for floats of some far apart too."""
    plain = list(plain_arrays(dtype, num_replicas))
    if "int" in dtype:
        return plain
    wild = wild_arrays(dtype, num_replicas, num_wild, seed)
    return [np.concatenate(pair) for pair in zip(plain, wild, strict=True)]


def same_numbers(left: np.ndarray, right: np.ndarray) -> bool:
    """Equal dtypes, shapes and bits, except that one NaN is as good as another."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    if left.dtype.kind == "c":
        part = left.real.dtype
        left, right = left.reshape(-1).view(part), right.reshape(-1).view(part)
    if left.dtype.kind not in "iu":
        is_nan = np.isnan(left)
        if not np.array_equal(is_nan, np.isnan(right)):
            return False
        left, right = left[~is_nan], right[~is_nan]
    return left.tobytes() == right.tobytes()


def placed(*devices: str) -> cd.PerReplica:
    """Something that has these devices, to be given as destinations."""
    return cd.PerReplica([0.0] * len(devices), devices)


def components_of(result: Any) -> tuple[Any, ...]:
    """What each destination got."""
    return result.values if isinstance(result, cd.DistributedValues) else (result,)


def bits_of(
    ops: cd.CrossDeviceOps,
    op: str,
    arrays: Sequence[np.ndarray],
    options: cd.CommunicationOptions,
    backend: BackendRow = NUMPY,
    weights: Any = None,
) -> bytes:
    """The bits every destination got, which must be the same."""
    value = backend.per_replica(arrays)
    results = components_of(ops.reduce(op, value, value, options, weights=weights))
    (bits,) = {backend.bits(array) for array in results}
    return bits


def patterns(dtype: str) -> st.SearchStrategy[int]:
    """Bit patterns of a float dtype: any, and often zeros, subnormals, the greatest, infinities, NaN."""
    form = FORMATS[dtype]
    width = NUMPY_DTYPES[dtype].itemsize * 8
    infinity = ((1 << (width - form.precision)) - 1) << (form.precision - 1)
    corners = [0, 1, 2, 1 << (form.precision - 1), infinity - 1, infinity, infinity + 1, infinity // 2]
    magnitudes = st.one_of(st.sampled_from(corners), st.integers(0, infinity), st.integers(0, 1 << width - 1))
    return st.builds(
        lambda magnitude, sign: (magnitude & ((1 << width - 1) - 1)) | (sign << width - 1),
        magnitudes,
        st.integers(0, 1),
    )


@st.composite
def adversarial_arrays(draw: Any, dtypes: Sequence[str] = FLOATS) -> tuple[str, list[np.ndarray]]:
    """A float dtype and an array of its bit patterns for each of 1 to 9 replicas."""
    dtype = draw(st.sampled_from(dtypes))
    count = draw(st.integers(1, 9))
    num_elements = draw(st.integers(1, 5))
    row = st.lists(patterns(dtype), min_size=num_elements, max_size=num_elements)
    unsigned = np.dtype(f"u{NUMPY_DTYPES[dtype].itemsize}")
    return dtype, [np.array(draw(row), unsigned).view(NUMPY_DTYPES[dtype]) for _ in range(count)]

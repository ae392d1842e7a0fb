"""One random reduction as data, and whether the library computes what an independent model says.

The model is the conformance tests' oracle: exact integers and fractions, none of the library's kernels.
Under `fast`, whose order is the algorithm's, results must lie within the bound of any order.
"""

from __future__ import annotations

import dataclasses
import random
from fractions import Fraction
from itertools import chain
from typing import Any

import numpy as np

import crossdevice as cd
from conformance.oracle import FORMATS, NUMPY_DTYPES, expected, result_dtype, rounded
from conformance.rows import ALGORITHM_ROWS, INSTALLED_ROWS, BackendRow, is_defined, same_numbers

DTYPES = (
    *FORMATS,
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("complex64", "complex128"),
)
BACKENDS = {row.name: row for row in INSTALLED_ROWS if row.name in ("numpy", "torch", "jax", "tensorflow")}
ALGORITHMS = {row.name: row for row in ALGORITHM_ROWS}
FIELDS: dict[str, tuple[Any, ...]] = {
    "backend": ("numpy", *(name for name in BACKENDS if name != "numpy")),
    "dtype": ("float32", *(name for name in DTYPES if name != "float32")),
    "op": ("SUM", "MEAN", "MIN", "MAX", "PROD"),
    "precision": ("accurate", "exact", "fast"),
    "algorithm": tuple(ALGORITHMS),
    "lowering": ("auto", "off"),
    "replicas": (2, 1, 3, 4, 5, 7, 8),
    "shapes": (((1,),), ((),), ((0,),), ((3, 5),), ((17,),), ((2, 3, 4),), ((5,), (2, 2), (33,))),
    "numbers": ("small", "ordinary", "spread", "special", "bits"),
    "layout": ("contiguous", "transposed", "strided", "shifted", "reversed"),
    "destinations": ("same", "one", "others"),
    "call": ("plain", "out", "in place", "bound"),
}
"""What a case may be, the simplest first."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A reduction; the seed decides its numbers."""

    backend: str
    dtype: str
    op: str
    precision: str
    algorithm: str
    lowering: str
    replicas: int
    shapes: tuple[tuple[int, ...], ...]
    numbers: str
    layout: str
    destinations: str
    call: str
    seed: int

    @property
    def is_possible(self) -> bool:
        """Whether the library offers it at all."""
        row = BACKENDS[self.backend]
        writes = self.call in ("out", "in place")
        result = result_dtype(self.dtype, self.op)
        return (
            self.dtype in (*row.dtypes, *(DTYPES if self.backend in ("numpy", "torch") else ()))
            and is_defined(self.op, self.dtype)
            and not (row.is_immutable and writes)
            and not (self.layout != "contiguous" and self.backend not in ("numpy", "torch"))
            and not (self.layout == "reversed" and self.backend != "numpy")
            and not (self.call == "in place" and (self.destinations != "same" or result != self.dtype))
            and not (self.call == "in place" and self.layout not in ("contiguous", "shifted"))
            # Any order may overflow on the way, or not.
            and not (self.precision == "fast" and self.numbers in ("special", "bits"))
        )


def random_case(choose: random.Random) -> Case:
    """A case that is possible."""
    while True:
        chosen = {name: choose.choice(options) for name, options in FIELDS.items()}
        case = Case(**chosen, seed=choose.randrange(1 << 32))
        if case.is_possible:
            return case


def failure_of(case: Case) -> str | None:
    """What is wrong; None if nothing is."""
    row = BACKENDS[case.backend]
    inputs = [
        [_laid_out(row, array, case.layout, replica) for array in leaves]
        for replica, leaves in enumerate(_inputs(case))
    ]
    before = _bits(row, inputs)
    try:
        results, outs = _reduced(case, row, inputs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if outs is not None and list(map(id, chain(*results))) != list(map(id, chain(*outs))):
        return "out= was not what came back"
    if case.call != "in place" and before != _bits(row, inputs):
        return "an input was written to"
    for leaf, replicas in enumerate(zip(*_inputs(case), strict=True)):
        for place, tree in enumerate(results):
            wrong = _wrong(case, [array.reshape(-1) for array in replicas], _memory(row, tree[leaf]))
            if wrong:
                return f"leaf {leaf} at destination {place}: {wrong}"
    return None


def _memory(row: BackendRow, array: Any) -> np.ndarray:
    # TensorFlow does not hand bfloat16 without an axis to NumPy as an array.
    return np.asarray(array.numpy()) if row.name == "tensorflow" else row.memory(array)


def _bits(row: BackendRow, trees: list[list[Any]]) -> list[list[bytes]]:
    return [[_memory(row, array).tobytes() for array in tree] for tree in trees]


def _reduced(case: Case, row: BackendRow, inputs: list[list[Any]]) -> tuple[list[Any], list[Any] | None]:
    options = cd.CommunicationOptions(precision=case.precision, lowering=case.lowering)
    common: dict[str, Any] = {"algorithm": ALGORITHMS[case.algorithm].make(), "options": options}
    where = {"same": None, "one": "cpu:0", "others": ["cpu:5", "cpu:1"]}[case.destinations]
    outs = None
    if case.call in ("out", "in place"):
        dtype = NUMPY_DTYPES[result_dtype(case.dtype, case.op)]
        number = {"same": case.replicas, "one": 1, "others": 2}[case.destinations]
        made = [[row.make(np.zeros(shape, dtype)) for shape in case.shapes] for _ in range(number)]
        outs = inputs if case.call == "in place" else made
        common["out"] = outs[0] if case.destinations == "one" else outs
    if case.call == "bound":
        bound = cd.bind(inputs, case.op, where, **common)
        bound()
        found = bound()
    elif where is None:
        found = cd.all_reduce(inputs, case.op, **common)
    else:
        found = cd.reduce(inputs, case.op, where, **common)
    return [found] if case.destinations == "one" else list(found), outs


def _inputs(case: Case) -> list[list[np.ndarray]]:
    """The leaves of each replica."""
    random_numbers = np.random.default_rng(case.seed)
    return [[_array(random_numbers, case, shape) for shape in case.shapes] for _ in range(case.replicas)]


def _array(numbers: np.random.Generator, case: Case, shape: tuple[int, ...]) -> np.ndarray:
    dtype = NUMPY_DTYPES[case.dtype]
    if dtype.kind in "iu":
        limits = (0, 9) if case.numbers == "small" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        return numbers.integers(*limits, shape, dtype=dtype, endpoint=True)
    if dtype.kind == "c":
        part = np.empty(0, dtype).real.dtype
        narrow = dataclasses.replace(case, dtype=part.name)
        pairs = _array(numbers, narrow, (*shape, 2))
        return np.ascontiguousarray(pairs).view(dtype).reshape(shape)
    with np.errstate(all="ignore"):
        if case.numbers == "bits":
            size = int(np.prod(shape))
            return numbers.integers(0, 256, size * dtype.itemsize, np.uint8).view(dtype).reshape(shape)
        values = numbers.standard_normal(shape)
        if case.numbers == "small":
            values = np.rint(values * 3)
        elif case.numbers == "spread":
            values = values * 2.0 ** numbers.integers(-9, 9, shape)
        elif case.numbers == "special":
            special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0, -1.0, 2.0**-149, 2.0**-24, 65504.0])
            values = np.where(numbers.random(shape) < 0.5, numbers.choice(special, shape), values)
        return np.asarray(values).astype(dtype)


def _laid_out(row: BackendRow, array: np.ndarray, layout: str, replica: int) -> Any:
    """The same elements, elsewhere in memory."""
    if layout == "contiguous" or array.ndim == 0:
        return row.place(array, replica)
    if layout == "transposed":
        made = row.make(np.ascontiguousarray(array.T))
        return made.T if row.name == "numpy" else made.permute(*reversed(range(made.dim())))
    if layout == "shifted":
        flat = row.make(np.concatenate([np.zeros(1, array.dtype), array.reshape(-1)]))
        return flat[1:].reshape(array.shape)
    if layout == "strided":
        return row.make(np.repeat(array, 2, axis=0))[::2]
    return row.make(array[::-1])[::-1]


def _wrong(case: Case, replicas: list[np.ndarray], found: np.ndarray) -> str | None:
    flat = np.ascontiguousarray(found).reshape(-1)
    dtype = result_dtype(case.dtype, case.op)
    if flat.dtype != NUMPY_DTYPES[dtype]:
        return f"dtype {flat.dtype}, expected {dtype}"
    if case.op == "PROD" and case.dtype.startswith("complex"):
        right = _complex_products(case, replicas)
        return None if right is None or same_numbers(flat, right) else f"{flat} instead of {right}"
    if case.precision == "fast" and replicas[0].dtype.kind not in "iu" and case.op not in ("MIN", "MAX"):
        return _outside(case, replicas, flat)
    with np.errstate(all="ignore"):
        right = expected(case.op, replicas, case.dtype, case.precision)
    return None if same_numbers(flat, right) else f"{flat} instead of {right}"


def _complex_products(case: Case, replicas: list[np.ndarray]) -> np.ndarray | None:
    """By their parts, in replica order (`accurate`), or the true ones of finite numbers (`exact`)."""
    if case.precision == "fast" or (case.precision == "exact" and case.numbers in ("special", "bits")):
        return None
    part = "float32" if case.dtype == "complex64" else "float64"
    results = []
    for column in zip(*(array.tolist() for array in replicas), strict=True):
        kind = float if case.precision == "accurate" else Fraction
        real, imaginary = kind(column[0].real), kind(column[0].imag)
        for number in column[1:]:
            c, d = kind(number.real), kind(number.imag)
            real, imaginary = real * c - imaginary * d, real * d + imaginary * c
        if case.precision == "exact":
            if not real or not imaginary:
                return None  # zeros' signs have rules of their own
            real, imaginary = rounded(real, part), rounded(imaginary, part)
        results.append((real, imaginary))
    with np.errstate(all="ignore"):
        return np.array(results, np.float64).astype(part).reshape(-1).view(case.dtype)


def _outside(case: Case, replicas: list[np.ndarray], found: np.ndarray) -> str | None:
    """Where a sum or product in the dtype, in any order, cannot be."""
    if replicas[0].dtype.kind == "c":
        part = replicas[0].real.dtype
        replicas, found = [array.view(part) for array in replicas], found.view(part)
        case = dataclasses.replace(case, dtype=part.name)
    form = FORMATS[case.dtype]
    least = Fraction(2) ** (form.least_exponent - form.precision + 1)
    for element, column in enumerate(zip(*(array.tolist() for array in replicas), strict=True)):
        numbers = [Fraction(float(number)) for number in column]
        steps = len(numbers) + 1
        if case.op == "PROD":
            true = scale = Fraction(1)
            for number in numbers:
                true, scale = true * number, scale * max(abs(number), Fraction(1))
        else:
            share = len(numbers) if case.op == "MEAN" else 1
            true, scale = sum(numbers) / share, sum(map(abs, numbers)) / share
        if steps * scale * 2 > form.greatest:
            continue
        bound = 2 * steps * (scale / 2**form.precision + least)
        if case.op == "PROD":
            bound *= steps
        if not np.isfinite(float(found[element])) or abs(Fraction(float(found[element])) - true) > bound:
            return f"element {element} is {found[element]}, expected {float(true)} +- {float(bound)}"
    return None

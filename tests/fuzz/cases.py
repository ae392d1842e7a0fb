"""One random reduction as data, and whether the library computes what an independent model says.

The model is the conformance tests' oracle: exact integers and fractions, none of the library's kernels.
Under `fast`, whose order is the algorithm's, results must lie within the bound of any order.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

import crossdevice as cd
from conformance.oracle import FORMATS, NUMPY_DTYPES, expected, result_dtype, rounded, weighted
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
    "weights": ("none", "halves", "any"),
}
"""What a case may be, the simplest first."""

VARIED = ("precision", "algorithm", "lowering", "layout", "destinations", "call", "weights")
"""What differs between cases with the same inputs, which are drawn and worked out once."""

CASES_PER_DRAW = 20
USES_PER_ALGORITHM = 200
"""An algorithm remembers its calls, and is used again for so many."""


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
    weights: str = "none"

    @property
    def result_dtype(self) -> str:
        """A sum of integers with weights is a float, as their mean is."""
        return result_dtype(self.dtype, self.op if self.weights == "none" else "MEAN")

    @property
    def is_possible(self) -> bool:
        """Whether the library offers it at all."""
        row = BACKENDS[self.backend]
        writes = self.call in ("out", "in place")
        return (
            self.dtype in (*row.dtypes, *(DTYPES if self.backend in ("numpy", "torch") else ()))
            and is_defined(self.op, self.dtype)
            and not (row.is_immutable and writes)
            and not (self.layout != "contiguous" and self.backend not in ("numpy", "torch"))
            and not (self.layout == "reversed" and self.backend != "numpy")
            and not (
                self.call == "in place" and (self.destinations != "same" or self.result_dtype != self.dtype)
            )
            and not (self.call == "in place" and self.layout not in ("contiguous", "shifted"))
            # Any order may overflow on the way, or not.
            and not (self.precision == "fast" and self.numbers in ("special", "bits"))
            and (self.weights == "none" or self._can_be_weighted)
        )

    @property
    def _can_be_weighted(self) -> bool:
        """Whether the model knows what weights give; products of the largest numbers overflow."""
        return (
            self.op in ("SUM", "MEAN")
            and self.precision != "fast"
            and self.numbers in ("small", "ordinary", "spread")
            and self.dtype != "complex128"
            and self.algorithm != "users_own"
        )


def random_cases(choose: random.Random) -> Iterator[Case]:
    """Cases that are possible, several in a row of the same inputs."""
    while True:
        chosen = {name: choose.choice(options) for name, options in FIELDS.items()}
        drawn = Case(**chosen, seed=choose.randrange(1 << 32))
        for _ in range(CASES_PER_DRAW):
            case = dataclasses.replace(drawn, **{name: choose.choice(FIELDS[name]) for name in VARIED})
            if case.is_possible:
                yield case


def failure_of(case: Case) -> str | None:
    """What is wrong; None if nothing is."""
    row = BACKENDS[case.backend]
    inputs = [
        [laid_out(row, array, case.layout, replica) for array in leaves]
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
    for leaf in range(len(case.shapes)):
        for place, tree in enumerate(results):
            wrong = wrong_result(case, leaf, memory_of(row, tree[leaf]))
            if wrong:
                return f"leaf {leaf} at destination {place}: {wrong}"
    return None


def memory_of(row: BackendRow, array: Any) -> np.ndarray:
    # TensorFlow does not hand bfloat16 without an axis to NumPy as an array.
    return np.asarray(array.numpy()) if row.name == "tensorflow" else row.memory(array)


def _bits(row: BackendRow, trees: list[list[Any]]) -> list[list[bytes]]:
    return [[memory_of(row, array).tobytes() for array in tree] for tree in trees]


def _reduced(case: Case, row: BackendRow, inputs: list[list[Any]]) -> tuple[list[Any], list[Any] | None]:
    options = cd.CommunicationOptions(precision=case.precision, lowering=case.lowering)
    common: dict[str, Any] = {"algorithm": _algorithm(case.algorithm), "options": options}
    if case.weights != "none":
        common["weights"] = weights_of(Inputs.of(case), case.weights)
    where = {"same": None, "one": "cpu:0", "others": ["cpu:5", "cpu:1"]}[case.destinations]
    outs = None
    if case.call in ("out", "in place"):
        dtype = NUMPY_DTYPES[case.result_dtype]
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


_made: dict[str, list[Any]] = {}


def _algorithm(name: str) -> cd.CrossDeviceOps:
    left = _made.setdefault(name, [])
    if not left:
        left += [ALGORITHMS[name].make()] * USES_PER_ALGORITHM
    return left.pop()


class Inputs(NamedTuple):
    """What decides the numbers of a case."""

    dtype: str
    replicas: int
    shapes: tuple[tuple[int, ...], ...]
    numbers: str
    seed: int

    @classmethod
    def of(cls, case: Any) -> Inputs:
        return cls(case.dtype, case.replicas, case.shapes, case.numbers, case.seed)


def _inputs(case: Case) -> list[list[np.ndarray]]:
    """The leaves of each replica."""
    return drawn(Inputs.of(case))


@functools.lru_cache(maxsize=2)
def drawn(inputs: Inputs) -> list[list[np.ndarray]]:
    """The leaves of each replica; not to be written to."""
    random_numbers = np.random.default_rng(inputs.seed)
    return [
        [_array(random_numbers, inputs, shape) for shape in inputs.shapes] for _ in range(inputs.replicas)
    ]


def _array(numbers: np.random.Generator, case: Inputs, shape: tuple[int, ...]) -> np.ndarray:
    dtype = NUMPY_DTYPES[case.dtype]
    if dtype.kind in "iu":
        limits = (0, 9) if case.numbers == "small" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        return numbers.integers(*limits, shape, dtype=dtype, endpoint=True)
    if dtype.kind == "c":
        part = np.empty(0, dtype).real.dtype
        narrow = case._replace(dtype=part.name)
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


def laid_out(row: BackendRow, array: np.ndarray, layout: str, replica: int) -> Any:
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


def wrong_result(case: Any, leaf: int, found: np.ndarray) -> str | None:
    """What is wrong with a leaf of the result of a case; None if nothing is."""
    flat = np.ascontiguousarray(found).reshape(-1)
    weights = getattr(case, "weights", "none")
    dtype = result_dtype(case.dtype, case.op if weights == "none" else "MEAN")
    if flat.dtype != NUMPY_DTYPES[dtype]:
        return f"dtype {flat.dtype}, expected {dtype}"
    inputs = Inputs.of(case)
    is_float = case.dtype in FORMATS or case.dtype.startswith("complex")
    if weights != "none":
        right = _weighted(inputs, leaf, case.op, case.precision, weights)
    elif case.op == "PROD" and case.dtype.startswith("complex"):
        right = _complex_products(inputs, leaf, case.precision)
    elif case.precision == "fast" and is_float and case.op not in ("MIN", "MAX"):
        return _outside(bounds(inputs, leaf, case.op), flat)
    else:
        right = _expected(inputs, leaf, case.op, case.precision)
    return None if right is None or same_numbers(flat, right) else f"{flat} instead of {right}"


def columns_of(inputs: Inputs, leaf: int) -> list[np.ndarray]:
    """The flat arrays of all replicas at a leaf."""
    return [leaves[leaf].reshape(-1) for leaves in drawn(inputs)]


@functools.lru_cache(maxsize=32)
def _expected(inputs: Inputs, leaf: int, op: str, precision: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return expected(op, columns_of(inputs, leaf), inputs.dtype, precision)


def weights_of(inputs: Inputs, kind: str) -> list[float]:
    """One for each replica, of which the first is not 0."""
    random_numbers = np.random.default_rng([inputs.seed, 1])
    if kind == "halves":
        return [1.0, *(random_numbers.integers(0, 9, inputs.replicas - 1) / 2).tolist()]
    return random_numbers.uniform(0.01, 3.0, inputs.replicas).tolist()


@functools.lru_cache(maxsize=32)
def _weighted(inputs: Inputs, leaf: int, op: str, precision: str, kind: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return weighted(op, columns_of(inputs, leaf), weights_of(inputs, kind), inputs.dtype, precision)


@functools.lru_cache(maxsize=32)
def _complex_products(inputs: Inputs, leaf: int, precision: str) -> np.ndarray | None:
    """By their parts, in replica order (`accurate`), or the true ones of finite numbers (`exact`)."""
    if precision == "fast" or (precision == "exact" and inputs.numbers in ("special", "bits")):
        return None
    part = "float32" if inputs.dtype == "complex64" else "float64"
    results = []
    for column in zip(*(array.tolist() for array in columns_of(inputs, leaf)), strict=True):
        kind = float if precision == "accurate" else Fraction
        real, imaginary = kind(column[0].real), kind(column[0].imag)
        for number in column[1:]:
            c, d = kind(number.real), kind(number.imag)
            real, imaginary = real * c - imaginary * d, real * d + imaginary * c
        if precision == "exact":
            if not real or not imaginary:
                return None  # zeros' signs have rules of their own
            real, imaginary = rounded(real, part), rounded(imaginary, part)
        results.append((real, imaginary))
    with np.errstate(all="ignore"):
        return np.array(results, np.float64).astype(part).reshape(-1).view(inputs.dtype)


@functools.lru_cache(maxsize=32)
def bounds(inputs: Inputs, leaf: int, op: str) -> list[tuple[Fraction, Fraction] | None]:
    """The true sums or products, and how far from them those in the dtype, in any order, can be.

    None where these may overflow.
    """
    replicas = columns_of(inputs, leaf)
    part = replicas[0].real.dtype
    form = FORMATS[part.name]
    least = Fraction(2) ** (form.least_exponent - form.precision + 1)
    found: list[tuple[Fraction, Fraction] | None] = []
    for column in zip(*(array.view(part).tolist() for array in replicas), strict=True):
        numbers = [Fraction(float(number)) for number in column]
        steps = len(numbers) + 1
        if op == "PROD":
            true = scale = Fraction(1)
            for number in numbers:
                true, scale = true * number, scale * max(abs(number), Fraction(1))
        else:
            share = len(numbers) if op == "MEAN" else 1
            true, scale = sum(numbers) / share, sum(map(abs, numbers)) / share
        bound = 2 * steps * (scale / 2**form.precision + least) * (steps if op == "PROD" else 1)
        found.append(None if steps * scale * 2 > form.greatest else (Fraction(true), bound))
    return found


def _outside(known: Sequence[tuple[Fraction, Fraction] | None], found: np.ndarray) -> str | None:
    """Where a result cannot be."""
    for element, (near, number) in enumerate(zip(known, found.view(found.real.dtype), strict=True)):
        if near is None:
            continue
        true, bound = near
        if not np.isfinite(float(number)) or abs(Fraction(float(number)) - true) > bound:
            return f"element {element} is {number}, expected {float(true)} +- {float(bound)}"
    return None

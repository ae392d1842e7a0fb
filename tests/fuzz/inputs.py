"""The random numbers of a case, laid out in memory in different ways; all areas draw theirs here."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from conformance.oracle import FORMATS, NUMPY_DTYPES
from conformance.rows import INSTALLED_ROWS, BackendRow

DTYPES = (
    *FORMATS,
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("complex64", "complex128"),
)
BACKENDS = {row.name: row for row in INSTALLED_ROWS if row.name in ("numpy", "torch", "jax", "tensorflow")}
LAYOUTS = ("contiguous", "transposed", "strided", "shifted", "reversed")
NUMBERS = ("small", "ordinary", "spread", "special", "bits")
WEIGHTS = ("none", "halves", "any")
WEIGHTED_NUMBERS = ("small", "ordinary", "spread")
"""Of which weights make no infinities: products of the largest numbers overflow."""


CASES_PER_DRAW = 30

LIKELIHOODS = {"numpy": 12, "torch": 6}
"""Of the libraries whose calls are quick, and which can be written to; of others 1."""


def random_draws(
    kind: type[Any], fields: dict[str, Sequence[Any]], varied: Sequence[str], choose: random.Random
) -> Iterator[Any]:
    """Possible cases, several in a row of the same inputs, which are drawn and worked out once.

    Args:
        varied: the fields in which these differ.
    """
    likelihoods = [LIKELIHOODS.get(name, 1) for name in fields["backend"]]
    while True:
        chosen = {name: choose.choice(options) for name, options in fields.items()}
        chosen["backend"] = choose.choices(fields["backend"], likelihoods)[0]
        first = kind(**chosen, seed=choose.randrange(1 << 32))
        for _ in range(CASES_PER_DRAW):
            case = dataclasses.replace(first, **{name: choose.choice(fields[name]) for name in varied})
            if case.is_possible:
                yield case


def can_hold(backend: str, dtype: str, layout: str) -> bool:
    """Whether a library has such arrays."""
    dtypes = DTYPES if backend in ("numpy", "torch") else BACKENDS[backend].dtypes
    layouts = {"numpy": LAYOUTS, "torch": LAYOUTS[:-1]}.get(backend, LAYOUTS[:1])
    return dtype in dtypes and layout in layouts


def memory_of(row: BackendRow, array: Any) -> np.ndarray:
    """An array's elements."""
    # TensorFlow does not hand bfloat16 without an axis to NumPy as an array.
    return np.asarray(array.numpy()) if row.name == "tensorflow" else row.memory(array)


def bits_of(row: BackendRow, trees: list[list[Any]]) -> list[list[bytes]]:
    """Those of all arrays, to be compared with what they are later."""
    return [[memory_of(row, array).tobytes() for array in tree] for tree in trees]


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


def columns_of(inputs: Inputs, leaf: int) -> list[np.ndarray]:
    """The flat arrays of all replicas at a leaf."""
    return [leaves[leaf].reshape(-1) for leaves in drawn(inputs)]


def weights_of(inputs: Inputs, kind: str) -> list[float]:
    """One for each replica, of which the first is not 0; all 1 for those of no weights."""
    if kind == "none":
        return [1.0] * inputs.replicas
    random_numbers = np.random.default_rng([inputs.seed, 1])
    if kind == "halves":
        return [1.0, *(random_numbers.integers(0, 9, inputs.replicas - 1) / 2).tolist()]
    return random_numbers.uniform(0.01, 3.0, inputs.replicas).tolist()

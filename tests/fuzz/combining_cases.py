"""One random mean or sum of models that arrive one by one, or lie in files, as data."""

from __future__ import annotations

import dataclasses
import functools
import random
import tempfile
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

import crossdevice as cd
from conformance.oracle import expected, weighted
from conformance.rows import same_numbers
from fuzz.cases import FIELDS
from fuzz.inputs import (
    BACKENDS,
    WEIGHTED_NUMBERS,
    Inputs,
    bits_of,
    can_hold,
    columns_of,
    drawn,
    laid_out,
    memory_of,
    random_draws,
    weights_of,
)

COMBINING_FIELDS: dict[str, tuple[Any, ...]] = {
    **{name: FIELDS[name] for name in ("backend", "dtype", "replicas", "shapes", "numbers", "layout")},
    "op": ("MEAN", "SUM"),
    "precision": ("accurate", "exact"),
    "weights": FIELDS["weights"],
    "integers": ("mean", "first", "max"),
    "way": ("added", "pending", "merged", "saved", "files"),
    "partial": (False, True),
}
COMBINING_VARIED = ("layout", "op", "precision", "weights", "integers", "way", "partial")


@dataclasses.dataclass(frozen=True)
class CombiningCase:
    """Models, of which there are as many as replicas elsewhere; the seed decides their numbers."""

    backend: str
    dtype: str
    replicas: int
    shapes: tuple[tuple[int, ...], ...]
    numbers: str
    layout: str
    op: str
    precision: str
    weights: str
    integers: str
    way: str
    partial: bool
    seed: int

    @property
    def is_possible(self) -> bool:
        """Whether the library offers it, and the model knows what it gives."""
        is_whole = "int" in self.dtype
        return (
            can_hold(self.backend, self.dtype, self.layout)
            and (self.integers == "mean" or is_whole)
            and (self.weights == "none" or is_whole or self.numbers in WEIGHTED_NUMBERS)
            # Sums of sums are rounded.
            and not (self.way == "merged" and self.precision == "accurate" and not is_whole)
            and not (self.way == "files" and not self._fits_files)
        )

    @property
    def _fits_files(self) -> bool:
        """NumPy's files have no bfloat16, and what is made of files is a mean."""
        return self.backend == "numpy" and self.dtype != "bfloat16" and self.op == "MEAN"

    def having(self, leaf: int) -> tuple[int, ...]:
        """The models that have a leaf; the first has all."""
        if not self.partial:
            return tuple(range(self.replicas))
        lacks = np.random.default_rng([self.seed, 4, leaf]).random(self.replicas) < 0.4
        return (0, *(number for number in range(1, self.replicas) if not lacks[number]))


def random_combining_cases(choose: random.Random) -> Iterator[CombiningCase]:
    """Cases that are possible."""
    return random_draws(CombiningCase, COMBINING_FIELDS, COMBINING_VARIED, choose)


def combining_failure_of(case: CombiningCase) -> str | None:
    """What is wrong; None if nothing is."""
    row = BACKENDS[case.backend]
    arrays = [[laid_out(row, array, case.layout, 0) for array in leaves] for leaves in drawn(Inputs.of(case))]
    trees = [
        {f"leaf {leaf}": array for leaf, array in enumerate(leaves) if number in case.having(leaf)}
        for number, leaves in enumerate(arrays)
    ]
    before = bits_of(row, arrays)
    try:
        found = _from_files(case, trees) if case.way == "files" else _from_accumulators(case, trees)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if before != bits_of(row, arrays):
        return "an input was written to"
    for leaf, shape in enumerate(case.shapes):
        memory = memory_of(row, found[f"leaf {leaf}"])
        right = _right(Inputs.of(case), leaf, _settings(case), case.having(leaf))
        if memory.shape != shape:
            return f"leaf {leaf} has shape {memory.shape}, expected {shape}"
        if not same_numbers(np.ascontiguousarray(memory).reshape(-1), right):
            return f"leaf {leaf}: {memory.reshape(-1)} instead of {right}"
    return None


def _from_accumulators(case: CombiningCase, trees: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def new() -> cd.Accumulator:
        most = 3 if case.way == "pending" else 1
        return cd.Accumulator(case.precision, partial=case.partial, integers=case.integers, max_pending=most)

    total, weights, half = new(), weights_of(Inputs.of(case), case.weights), len(trees) // 2
    other = new() if case.way == "merged" else total
    for number, (tree, weight) in enumerate(zip(trees, weights, strict=True)):
        if case.way == "saved" and number == half:
            with tempfile.TemporaryDirectory() as folder:
                total.save(Path(folder, "half.npz"))
                total = other = cd.Accumulator.load(Path(folder, "half.npz"))
        (total if number <= half else other).add(tree, weight)
    if other is not total:
        total.merge(other)
    if total.count != len(trees):
        raise AssertionError(f"{total.count} models were counted")
    return total.mean() if case.op == "MEAN" else total.sum()


def _from_files(case: CombiningCase, trees: Sequence[dict[str, Any]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{number}.npz") for number in range(len(trees))]
        for path, tree in zip(paths, trees, strict=True):
            np.savez(path, **tree)
        cd.average_files(
            paths,
            Path(folder, "mean.npz"),
            weights_of(Inputs.of(case), case.weights),
            precision=case.precision,
            integers=case.integers,
            keys="union" if case.partial else "strict",
        )
        return dict(np.load(Path(folder, "mean.npz")))


def _settings(case: CombiningCase) -> tuple[str, str, str, str]:
    return case.op, case.precision, case.weights, case.integers


@functools.lru_cache(maxsize=64)
def _right(
    inputs: Inputs, leaf: int, settings: tuple[str, str, str, str], having: tuple[int, ...]
) -> np.ndarray:
    """What the models that have the leaf give."""
    op, precision, kind, integers = settings
    columns = [columns_of(inputs, leaf)[number] for number in having]
    weights = [weights_of(inputs, kind)[number] for number in having]
    with np.errstate(all="ignore"):
        if "int" in inputs.dtype:
            return _right_integers(columns, weights, op, integers)
        if kind == "none":
            return expected(op, columns, inputs.dtype, precision)
        return weighted(op, columns, weights, inputs.dtype, precision)


def _right_integers(
    columns: Sequence[np.ndarray], weights: Sequence[float], op: str, integers: str
) -> np.ndarray:
    """What came first, the largest, or the true result to nearest even, within what the dtype holds."""
    limits, dtype = np.iinfo(columns[0].dtype), columns[0].dtype
    divisor = sum(map(Fraction, weights)) if op == "MEAN" else Fraction(1)

    def result(numbers: Sequence[int]) -> int:
        if integers != "mean":
            return numbers[0] if integers == "first" else max(numbers)
        true = sum(number * Fraction(weight) for number, weight in zip(numbers, weights, strict=True))
        return min(max(round(true / divisor), int(limits.min)), int(limits.max))

    columns_of_numbers = zip(*(column.tolist() for column in columns), strict=True)
    return np.array([result(numbers) for numbers in columns_of_numbers], dtype)

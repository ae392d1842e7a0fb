"""One random reduction between processes as data, and whether every rank gets what the model says.

All ranks draw the same cases from one seed, so that each knows what the others bring.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import zlib
from collections.abc import Iterator
from functools import reduce
from operator import add, mul
from typing import Any

import numpy as np

import crossdevice as cd
from conformance.oracle import FORMATS, NUMPY_DTYPES, rounded_float
from conformance.rows import components_of, same_numbers
from fuzz.cases import FIELDS, is_reducible
from fuzz.inputs import (
    BACKENDS,
    Inputs,
    can_hold,
    columns_of,
    drawn,
    laid_out,
    memory_of,
    random_draws,
    weights_of,
)
from fuzz.model import ALL, result_dtype_of, wrong_result

SHARES = {
    2: ((1, 1), (2, 2), (1, 2), (4, 3)),
    3: ((1, 1, 1), (2, 2, 2), (1, 2, 3)),
}
"""How many replicas each rank has, by the number of ranks."""

PROCESS_FIELDS: dict[str, tuple[Any, ...]] = {
    "backend": ("numpy", "torch"),
    **{name: FIELDS[name] for name in ("dtype", "op", "precision", "shapes", "numbers")},
    "shares": tuple(itertools.chain(*SHARES.values())),
    "layout": ("contiguous", "transposed", "shifted"),
    "destinations": ("same", "one"),
    "call": ("plain", "out", "in place", "bound", "batch", "bound out", "started", "start_reduce"),
    "weights": FIELDS["weights"],
}
PROCESS_VARIED = ("precision", "layout", "destinations", "call", "weights")


@dataclasses.dataclass(frozen=True)
class ProcessCase:
    """A reduction in which every rank takes part; the seed decides its numbers."""

    backend: str
    dtype: str
    op: str
    precision: str
    shapes: tuple[tuple[int, ...], ...]
    numbers: str
    shares: tuple[int, ...]
    layout: str
    destinations: str
    call: str
    seed: int
    weights: str = "none"

    @property
    def replicas(self) -> int:
        """Those of all ranks."""
        return sum(self.shares)

    @property
    def is_possible(self) -> bool:
        """Whether the library offers it, and the model knows what it gives."""
        fits_in_place = self.destinations == "same" and result_dtype_of(self) == self.dtype
        return (
            can_hold(self.backend, self.dtype, self.layout)
            and is_reducible(self)
            and not (self.call == "in place" and (not fits_in_place or self.layout == "transposed"))
        )


def random_process_cases(choose: random.Random, size: int) -> Iterator[ProcessCase]:
    """Cases for so many ranks."""
    return random_draws(ProcessCase, {**PROCESS_FIELDS, "shares": SHARES[size]}, PROCESS_VARIED, choose)


def checked(case: ProcessCase, ops: cd.CollectiveAllReduce, rank: int) -> tuple[str | None, int]:
    """What is wrong on this rank, if anything, and a digest of the bits it got."""
    row = BACKENDS[case.backend]
    first = sum(case.shares[:rank])
    own = drawn(Inputs.of(case))[first : first + case.shares[rank]]
    trees = [
        [laid_out(row, array, case.layout, replica) for array in leaves] for replica, leaves in enumerate(own)
    ]
    try:
        results = _reduced(case, ops, trees, slice(first, first + len(trees)))
    except Exception as error:
        return f"{type(error).__name__}: {error}", 0
    digest = 0
    for leaf in range(len(case.shapes)):
        for tree in results:
            found = memory_of(row, tree[leaf])
            wrong = wrong_result(case, leaf, found)
            if wrong is not None and not is_by_partial_results(case, leaf, found):
                return f"leaf {leaf}: {wrong}", 0
        digest = zlib.crc32(np.ascontiguousarray(found).tobytes(), digest)
    return None, digest


def _reduced(
    case: ProcessCase, ops: cd.CollectiveAllReduce, trees: list[list[Any]], own: slice
) -> list[list[Any]]:
    """The leaves at each destination."""
    row = BACKENDS[case.backend]
    value = cd.PerReplica(trees)
    options = cd.CommunicationOptions(precision=case.precision)
    target = value if case.destinations == "same" else "cpu:0"
    number = len(trees) if case.destinations == "same" else 1
    outs: Any = None
    if case.call == "in place":
        outs = trees
    elif case.call in ("out", "bound out"):
        dtype = NUMPY_DTYPES[result_dtype_of(case)]
        outs = [[row.make(np.zeros(shape, dtype)) for shape in case.shapes] for _ in range(number)]
    common: dict[str, Any] = {}
    if case.weights != "none":
        common["weights"] = weights_of(Inputs.of(case), case.weights)[own]
    if case.call == "batch":
        columns = [cd.PerReplica(list(column)) for column in zip(*trees, strict=True)]
        pairs = [(column, column if case.destinations == "same" else "cpu:0") for column in columns]
        found = ops.batch_reduce(case.op, pairs, options, **common)
        return [list(tree) for tree in zip(*map(components_of, found), strict=True)]
    common["out"] = outs if outs is None or number > 1 else outs[0]
    arguments = (case.op, value, target, options)
    if case.call in ("bound", "bound out", "started"):
        bound = ops.bind(*arguments, **common)
        bound()
        found = bound.start().wait() if case.call == "started" else bound()
    elif case.call == "start_reduce":
        found = ops.start_reduce(*arguments, **common).wait()
    else:
        found = ops.reduce(*arguments, **common)
    return list(components_of(found))


def is_by_partial_results(case: Any, leaf: int, found: np.ndarray, at: Any = ALL) -> bool:
    """Whether it is what wide results of each rank's replicas give: `accurate` may send these instead."""
    part = {"complex64": "float32"}.get(case.dtype, case.dtype)
    is_sent_so = case.precision == "accurate" and case.weights == "none"
    if not is_sent_so or part not in FORMATS or case.op not in ("SUM", "MEAN", "PROD"):
        return False
    columns = [array[at] for array in columns_of(Inputs.of(case), leaf)]
    if case.dtype == "complex64":
        if case.op == "PROD":
            return False
        columns, found = [array.view(part) for array in columns], np.ascontiguousarray(found).view(part)
    combine, edges = (mul if case.op == "PROD" else add), np.cumsum((0, *case.shares)).tolist()
    results = []
    with np.errstate(all="ignore"):
        for column in zip(*(array.astype(np.float64) for array in columns), strict=True):
            partial = [reduce(combine, column[low:high]) for low, high in itertools.pairwise(edges)]
            total = float(reduce(combine, partial))
            results.append(rounded_float(total / case.replicas if case.op == "MEAN" else total, part))
        return same_numbers(found.reshape(-1), np.array(results).astype(NUMPY_DTYPES[part]))

"""One random reduction between processes as data, and whether every rank gets what the model says.

All ranks draw the same cases from one seed, so that each knows what the others bring.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import time
import zlib
from collections.abc import Iterator
from functools import reduce
from operator import add, mul
from typing import Any

import numpy as np

import crossdevice as cd
from conformance.oracle import FORMATS, NUMPY_DTYPES, result_dtype, rounded_float
from conformance.rows import is_defined, same_numbers
from crossdevice.testing import run_ranks
from fuzz.cases import BACKENDS, DTYPES, FIELDS, Inputs, columns_of, drawn, laid_out, memory_of, wrong_result

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
    "call": ("plain", "out", "in place", "bound", "batch"),
}
PROCESS_VARIED = ("precision", "layout", "destinations", "call")
CASES_PER_DRAW = 10
CASES_PER_MEETING = 50
"""After so many, ranks compare their bits, and decide whether to go on."""


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

    @property
    def replicas(self) -> int:
        """Those of all ranks."""
        return sum(self.shares)

    @property
    def is_possible(self) -> bool:
        """Whether the library offers it, and the model knows what it gives."""
        has_same_dtype = result_dtype(self.dtype, self.op) == self.dtype
        return (
            self.dtype in (*BACKENDS[self.backend].dtypes, *DTYPES)
            and is_defined(self.op, self.dtype)
            and not (self.call == "in place" and (self.destinations != "same" or not has_same_dtype))
            and not (self.call == "in place" and self.layout == "transposed")
            # Any order may overflow on the way, or not.
            and not (self.precision == "fast" and self.numbers in ("special", "bits"))
        )


def random_process_cases(choose: random.Random, size: int) -> Iterator[ProcessCase]:
    """Cases for so many ranks, several in a row of the same inputs."""
    options = {**PROCESS_FIELDS, "shares": SHARES[size]}
    while True:
        chosen = {name: choose.choice(some) for name, some in options.items()}
        first = ProcessCase(**chosen, seed=choose.randrange(1 << 32))
        for _ in range(CASES_PER_DRAW):
            varied = {name: choose.choice(options[name]) for name in PROCESS_VARIED}
            case = dataclasses.replace(first, **varied)
            if case.is_possible:
                yield case


def process_failure_of(case: ProcessCase) -> str | None:
    """What is wrong on the first rank on which something is, with ranks as threads; None if nothing is."""

    def answer(group: cd.ProcessGroup) -> tuple[str | None, int]:
        return checked(case, cd.CollectiveAllReduce(group=group), group.rank)

    answers = run_ranks(len(case.shares), answer)
    digests = {digest for _, digest in answers}
    return next((wrong for wrong, _ in answers if wrong), "bits differ" if len(digests) > 1 else None)


def fuzz_rank(
    group: cd.ProcessGroup, seed: int, seconds: float
) -> tuple[collections.Counter[str], list[tuple[ProcessCase, str]]]:
    """What one of several ranks does: the cases of all others, until time is up or something is wrong."""
    ops, end = cd.CollectiveAllReduce(group=group), time.monotonic() + seconds
    cases = random_process_cases(random.Random(seed), group.size)
    counts: collections.Counter[str] = collections.Counter()
    while True:
        some = list(itertools.islice(cases, CASES_PER_MEETING))
        failures, digests = [], []
        for case in some:
            counts.update(["cases", *(f"{name} {getattr(case, name)}" for name in PROCESS_FIELDS)])
            wrong, digest = checked(case, ops, group.rank)
            digests.append(digest)
            if wrong is not None:
                failures.append((case, f"rank {group.rank}: {wrong}"))
            if group.is_broken:
                return counts, failures
        mine = np.array([[time.monotonic() >= end or bool(failures), *digests]], np.int64)
        rows = ops.gather(mine, "cpu:0")
        for case, column in zip(some, rows.T[1:], strict=True):
            if len(set(column.tolist())) > 1:
                failures.append((case, "ranks have different bits"))
        if failures or rows[:, 0].any():
            return counts, failures


def checked(case: ProcessCase, ops: cd.CollectiveAllReduce, rank: int) -> tuple[str | None, int]:
    """What is wrong on this rank, if anything, and a digest of the bits it got."""
    row = BACKENDS[case.backend]
    first = sum(case.shares[:rank])
    own = drawn(Inputs.of(case))[first : first + case.shares[rank]]
    trees = [
        [laid_out(row, array, case.layout, replica) for array in leaves] for replica, leaves in enumerate(own)
    ]
    try:
        results = _reduced(case, ops, trees)
    except Exception as error:
        return f"{type(error).__name__}: {error}", 0
    digest = 0
    for leaf in range(len(case.shapes)):
        for tree in results:
            found = memory_of(row, tree[leaf])
            wrong = wrong_result(case, leaf, found)
            if wrong is not None and not _is_by_partial_results(case, leaf, found):
                return f"leaf {leaf}: {wrong}", 0
        digest = zlib.crc32(np.ascontiguousarray(found).tobytes(), digest)
    return None, digest


def _reduced(case: ProcessCase, ops: cd.CollectiveAllReduce, trees: list[list[Any]]) -> list[list[Any]]:
    """The leaves at each destination."""
    row = BACKENDS[case.backend]
    value = cd.PerReplica(trees)
    options = cd.CommunicationOptions(precision=case.precision)
    target = value if case.destinations == "same" else "cpu:0"
    number = len(trees) if case.destinations == "same" else 1
    outs: Any = None
    if case.call == "in place":
        outs = trees
    elif case.call == "out":
        dtype = NUMPY_DTYPES[result_dtype(case.dtype, case.op)]
        outs = [[row.make(np.zeros(shape, dtype)) for shape in case.shapes] for _ in range(number)]
    if case.call == "batch":
        columns = [cd.PerReplica(list(column)) for column in zip(*trees, strict=True)]
        pairs = [(column, column if case.destinations == "same" else "cpu:0") for column in columns]
        found = ops.batch_reduce(case.op, pairs, options)
        parts = [each.values if isinstance(each, cd.Mirrored) else (each,) for each in found]
        return [list(tree) for tree in zip(*parts, strict=True)]
    out = outs if outs is None or number > 1 else outs[0]
    if case.call == "bound":
        found = ops.bind(case.op, value, target, options)()
    else:
        found = ops.reduce(case.op, value, target, options, out=out)
    return list(found.values) if isinstance(found, cd.Mirrored) else [found]


def _is_by_partial_results(case: ProcessCase, leaf: int, found: np.ndarray) -> bool:
    """Whether it is what wide results of each rank's replicas give: `accurate` may send these instead."""
    part = {"complex64": "float32"}.get(case.dtype, case.dtype)
    if case.precision != "accurate" or part not in FORMATS or case.op in ("MIN", "MAX"):
        return False
    columns = columns_of(Inputs.of(case), leaf)
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

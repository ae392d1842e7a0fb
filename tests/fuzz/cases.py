"""One random reduction in one process as data, and whether the library computes what the model says."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

import crossdevice as cd
from conformance.oracle import NUMPY_DTYPES, is_of_ranks
from conformance.rows import ALGORITHM_ROWS, BackendRow, components_of, is_defined, placed
from fuzz.inputs import (
    BACKENDS,
    DTYPES,
    LAYOUTS,
    NUMBERS,
    WEIGHTED_NUMBERS,
    WEIGHTS,
    Inputs,
    bits_of,
    can_hold,
    drawn,
    laid_out,
    memory_of,
    random_draws,
    weights_of,
)
from fuzz.model import result_dtype_of, wrong_result

ALGORITHMS = {row.name: row for row in ALGORITHM_ROWS}
FIELDS: dict[str, tuple[Any, ...]] = {
    "backend": ("numpy", *(name for name in BACKENDS if name != "numpy")),
    "dtype": ("float32", *(name for name in DTYPES if name != "float32")),
    "op": ("SUM", "MEAN", "MIN", "MAX", "PROD", "MEDIAN", "TRIMMED_MEAN(1)", "TRIMMED_MEAN(2)"),
    "precision": ("accurate", "exact", "fast"),
    "algorithm": tuple(ALGORITHMS),
    "lowering": ("auto", "off"),
    "replicas": (2, 1, 3, 4, 5, 7, 8),
    "shapes": (((1,),), ((),), ((0,),), ((3, 5),), ((17,),), ((2, 3, 4),), ((5,), (2, 2), (33,))),
    "numbers": NUMBERS,
    "layout": LAYOUTS,
    "destinations": ("same", "one", "others"),
    "call": ("plain", "out", "in place", "bound", "bound out", "started", "start_reduce"),
    "weights": WEIGHTS,
}
"""What a case may be, the simplest first."""

VARIED = ("precision", "algorithm", "lowering", "layout", "destinations", "call", "weights")
"""What differs between cases with the same inputs."""

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
    def is_possible(self) -> bool:
        """Whether the library offers it, and the model knows what it gives."""
        return (
            can_hold(self.backend, self.dtype, self.layout)
            and is_reducible(self)
            and not (BACKENDS[self.backend].is_immutable and self.call in ("out", "in place", "bound out"))
            and not (self.call == "in place" and not self._fits_in_place)
            and not (self.algorithm == "users_own" and self.weights != "none")
        )

    @property
    def _fits_in_place(self) -> bool:
        return (
            self.destinations == "same"
            and result_dtype_of(self) == self.dtype
            and self.layout in ("contiguous", "shifted")
        )


def is_reducible(case: Any) -> bool:
    """Whether there is such a reduction of these numbers, and the model knows what it gives."""
    if not is_defined(case.op, case.dtype):
        return False
    if case.op.startswith("TRIMMED_MEAN") and case.replicas <= 2 * int(case.op[-2]):
        return False
    if case.precision == "fast" and not is_of_ranks(case.op):
        # Any order may overflow on the way, or not.
        return case.weights == "none" and case.numbers not in ("special", "bits")
    return case.weights == "none" or (case.op in ("SUM", "MEAN") and case.numbers in WEIGHTED_NUMBERS)


def random_cases(choose: random.Random) -> Iterator[Case]:
    """Cases that are possible."""
    return random_draws(Case, FIELDS, VARIED, choose)


def failure_of(case: Case) -> str | None:
    """What is wrong; None if nothing is."""
    row = BACKENDS[case.backend]
    inputs = [
        [laid_out(row, array, case.layout, replica) for array in leaves]
        for replica, leaves in enumerate(drawn(Inputs.of(case)))
    ]
    before = bits_of(row, inputs)
    try:
        results, outs = _reduced(case, row, inputs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if outs is not None and list(map(id, chain(*results))) != list(map(id, chain(*outs))):
        return "out= was not what came back"
    if case.call != "in place" and before != bits_of(row, inputs):
        return "an input was written to"
    for leaf in range(len(case.shapes)):
        for place, tree in enumerate(results):
            wrong = wrong_result(case, leaf, memory_of(row, tree[leaf]))
            if wrong:
                return f"leaf {leaf} at destination {place}: {wrong}"
    return None


def _reduced(case: Case, row: BackendRow, inputs: list[list[Any]]) -> tuple[list[Any], list[Any] | None]:
    options = cd.CommunicationOptions(precision=case.precision, lowering=case.lowering)
    ops = algorithm(case.algorithm)
    common: dict[str, Any] = {"options": options}
    if case.weights != "none":
        common["weights"] = weights_of(Inputs.of(case), case.weights)
    where = {"same": None, "one": "cpu:0", "others": ["cpu:5", "cpu:1"]}[case.destinations]
    outs = None
    if case.call in ("out", "in place", "bound out"):
        dtype = NUMPY_DTYPES[result_dtype_of(case)]
        number = {"same": case.replicas, "one": 1, "others": 2}[case.destinations]
        made = [[row.make(np.zeros(shape, dtype)) for shape in case.shapes] for _ in range(number)]
        outs = inputs if case.call == "in place" else made
        common["out"] = outs[0] if case.destinations == "one" else outs
    if case.call == "start_reduce":
        value = cd.PerReplica(inputs)
        target = {"same": value, "one": "cpu:0", "others": placed("cpu:5", "cpu:1")}[case.destinations]
        return list(components_of(ops.start_reduce(case.op, value, target, **common).wait())), outs
    if case.call in ("bound", "bound out", "started"):
        bound = cd.bind(inputs, case.op, where, algorithm=ops, **common)
        bound()
        found = bound.start().wait() if case.call == "started" else bound()
    elif where is None:
        found = cd.all_reduce(inputs, case.op, algorithm=ops, **common)
    else:
        found = cd.reduce(inputs, case.op, where, algorithm=ops, **common)
    return [found] if case.destinations == "one" else list(found), outs


_made: dict[str, list[Any]] = {}


def algorithm(name: str) -> cd.CrossDeviceOps:
    """One that may have made some calls before."""
    left = _made.setdefault(name, [])
    if not left:
        left += [ALGORITHMS[name].make()] * USES_PER_ALGORITHM
    return left.pop()

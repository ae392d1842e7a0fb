"""One random reduce-scatter, all-gather or all-to-all as data, in one process or between several."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import crossdevice as cd
from conformance.oracle import NUMPY_DTYPES
from conformance.rows import components_of
from fuzz.cases import FIELDS, algorithm, is_reducible
from fuzz.inputs import (
    BACKENDS,
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
from fuzz.process_cases import SHARES, is_by_partial_results

PART_FIELDS: dict[str, tuple[Any, ...]] = {
    **{name: FIELDS[name] for name in ("backend", "dtype")},
    "kind": ("all_gather", "reduce_scatter", "all_to_all"),
    **{name: FIELDS[name] for name in ("op", "precision", "algorithm", "lowering")},
    "shares": ((2,), (1,), (3,), (4,), (5,), *itertools.chain(*SHARES.values())),
    "shapes": (((4,),), ((0,),), ((7,),), ((3, 5),), ((2, 3, 4),), ((5,), (5, 2), (5, 3, 2))),
    "numbers": FIELDS["numbers"],
    "axis": (0, 1, -1),
    "lengths": ("equal", "different"),
    "sizes": ("even", "given", "of each"),
    "layout": FIELDS["layout"],
    "call": ("plain", "out", "known", "known out", "bound", "bound out", "started", "bound and started"),
    "weights": FIELDS["weights"],
}
PART_VARIED = ("kind", "precision", "algorithm", "lowering", "axis", "lengths", "sizes", "layout", "call")


@dataclasses.dataclass(frozen=True)
class PartCase:
    """A call in which each replica gets, or gives, parts; the seed decides numbers and lengths."""

    backend: str
    dtype: str
    kind: str
    op: str
    precision: str
    algorithm: str
    lowering: str
    shares: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    numbers: str
    axis: int
    lengths: str
    sizes: str
    layout: str
    call: str
    weights: str
    seed: int

    @property
    def replicas(self) -> int:
        """Those of all ranks."""
        return sum(self.shares)

    @property
    def is_possible(self) -> bool:
        """Whether the library offers it, and the model knows what it gives."""
        between, reduces = len(self.shares) > 1, self.kind == "reduce_scatter"
        if not all(-len(shape) <= self.axis < len(shape) for shape in self.shapes):
            return False
        has_one_length = len({shape[self.axis] for shape in self.shapes}) == 1
        return (
            can_hold(self.backend, self.dtype, self.layout)
            and not (BACKENDS[self.backend].is_immutable and self.call.endswith("out"))
            and not (between and (self.backend not in ("numpy", "torch") or self.algorithm != "one_device"))
            and (is_reducible(self) if reduces else self.weights == "none")
            and not (self.algorithm == "users_own" and self.weights != "none")
            and not (reduces and (self.lengths == "different" or self.sizes == "of each"))
            and not (self.kind == "all_gather" and self.sizes != "even")
            and not (self.sizes == "given" and (self.lengths == "different" or not has_one_length))
            and not (self.sizes == "of each" and not has_one_length)
        )

    def length(self, replica: int, leaf: int) -> int:
        """How much a replica has along the axis."""
        whole = self.shapes[leaf][self.axis]
        if self.lengths == "equal":
            return whole
        number = 0 if self.sizes == "of each" else leaf  # one list of sizes serves all leaves
        return int(np.random.default_rng([self.seed, 3, replica, number]).integers(0, whole, endpoint=True))

    def parts(self, replica: int, leaf: int) -> list[int]:
        """The lengths of a replica's parts, one for each replica."""
        length, count = self.length(replica, leaf), self.replicas
        if self.sizes == "even":
            return [length // count + (number < length % count) for number in range(count)]
        number = replica if self.sizes == "of each" else 0
        cuts = np.random.default_rng([self.seed, 2, number]).integers(0, length, count - 1, endpoint=True)
        return np.diff([0, *np.sort(cuts), length]).tolist()


def random_part_cases(choose: random.Random, shares: Sequence[tuple[int, ...]]) -> Iterator[PartCase]:
    """Cases of these shares."""
    options = {**PART_FIELDS, "shares": shares}
    if len(shares[0]) > 1:
        options |= {"algorithm": ("one_device",), "backend": ("numpy", "torch")}
    return random_draws(PartCase, options, PART_VARIED, choose)


def part_failure_here(case: PartCase) -> str | None:
    """What is wrong in one process; None if nothing is."""
    return checked_parts(case, algorithm(case.algorithm), 0)[0]


def checked_parts(case: PartCase, ops: cd.CrossDeviceOps, rank: int) -> tuple[str | None, int]:
    """What is wrong with the parts of this rank's replicas, if anything; each rank has its own bits."""
    row = BACKENDS[case.backend]
    own = range(sum(case.shares[:rank]), sum(case.shares[: rank + 1]))
    trees = [
        [laid_out(row, array, case.layout, number) for array in _brought(case, replica)]
        for number, replica in enumerate(own)
    ]
    before = bits_of(row, trees)
    outs = None
    if case.call.endswith("out"):
        dtype = NUMPY_DTYPES[result_dtype_of(case) if case.kind == "reduce_scatter" else case.dtype]
        outs = [
            [row.make(np.zeros(_elements(case, replica, leaf)[1], dtype)) for leaf in range(len(case.shapes))]
            for replica in own
        ]
    try:
        found = components_of(_called(case, ops, trees, outs, own))
    except Exception as error:
        return f"{type(error).__name__}: {error}", 0
    if before != bits_of(row, trees):
        return "an input was written to", 0
    for (replica, tree), leaf in itertools.product(zip(own, found, strict=True), range(len(case.shapes))):
        if outs is not None and tree[leaf] is not outs[replica - own.start][leaf]:
            return "out= was not what came back", 0
        wrong = _wrong_part(case, replica, leaf, memory_of(row, tree[leaf]))
        if wrong is not None:
            return f"leaf {leaf} of replica {replica}: {wrong}", 0
    return None, 0


def _called(
    case: PartCase, ops: cd.CrossDeviceOps, trees: list[Any], outs: list[Any] | None, own: range
) -> Any:
    options = cd.CommunicationOptions(precision=case.precision, lowering=case.lowering)
    common: dict[str, Any] = {"out": outs if outs is None or len(outs) > 1 else outs[0]}
    if case.sizes == "given":
        common["sizes"] = case.parts(0, 0)
    elif case.sizes == "of each":
        common["sizes"] = [case.parts(replica, 0) for replica in own]
    calls: Any = {"bound": ops.bound, "started": ops.started}.get(case.call.partition(" ")[0], ops)
    call = getattr(calls, case.kind)
    if case.kind == "reduce_scatter":
        call = partial(call, case.op)
        if case.weights != "none":
            common["weights"] = weights_of(Inputs.of(case), case.weights)[own.start : own.stop]
    call = partial(call, cd.PerReplica(trees), case.axis, options, **common)
    if case.call.startswith("known"):
        call()
    found = call()
    if case.call == "started":
        return found.wait()
    if case.call.startswith("bound"):
        found()
        return found.start().wait() if case.call == "bound and started" else found()
    return found


def _brought(case: PartCase, replica: int) -> list[np.ndarray]:
    """The arrays of a replica, as long as they are."""
    whole = drawn(Inputs.of(case))[replica]
    if case.kind == "reduce_scatter":
        return whole
    return [np.take(array, range(case.length(replica, leaf)), case.axis) for leaf, array in enumerate(whole)]


def _elements(case: PartCase, replica: int, leaf: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """What a replica gets of a leaf, and its shape: bytes that move, or the numbers of reduced elements."""
    if case.kind == "reduce_scatter":
        shape = case.shapes[leaf]
        every = np.arange(np.prod(shape, dtype=int)).reshape(shape)
        part = _part(case, every, 0, leaf, replica)
    else:
        arrays = [_brought(case, each)[leaf] for each in range(case.replicas)]
        if case.kind == "all_to_all":
            arrays = [_part(case, array, each, leaf, replica) for each, array in enumerate(arrays)]
        part = np.concatenate(arrays, case.axis)
    return part, part.shape


def _part(case: PartCase, array: np.ndarray, source: int, leaf: int, target: int) -> np.ndarray:
    parts = case.parts(source, leaf)
    start = sum(parts[:target])
    return np.take(array, range(start, start + parts[target]), case.axis)


def _wrong_part(case: PartCase, replica: int, leaf: int, found: np.ndarray) -> str | None:
    right, shape = _elements(case, replica, leaf)
    if found.shape != shape:
        return f"shape {found.shape}, expected {shape}"
    if case.kind != "reduce_scatter":
        is_same = (found.dtype, found.tobytes()) == (right.dtype, right.tobytes())
        return None if is_same else f"{found} instead of {right}"
    at = right.reshape(-1)
    wrong = wrong_result(case, leaf, found, at)
    is_right = wrong is None or (len(case.shares) > 1 and is_by_partial_results(case, leaf, found, at))
    return None if is_right else wrong

"""Calls as linear maps of arrays, each with its transpose, and as their library records them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from crossdevice.backends.protocol import Array, Autograd, LinearMap
from crossdevice.backends.registry import backend_of_type
from crossdevice.errors import OutError
from crossdevice.execution.reading.outputs import wrapped
from crossdevice.execution.reading.shards import part_lengths, read_sizes_of_all
from crossdevice.execution.reading.values import Leaf, Value
from crossdevice.values.device import Device, host_device
from crossdevice.values.distributed import (
    DistributedValues,
    Mirrored,
    PerReplica,
    components_of,
    destinations_on,
)
from crossdevice.values.nesting import flatten
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp


class Calls(NamedTuple):
    """The calls of an algorithm that compute derivatives; between processes, all ranks make them."""

    batch_reduce: Callable[..., list[Any]]
    gather: Callable[..., Any]
    reduce_scatter: Callable[..., Any]
    all_to_all: Callable[..., Any]
    rank: int | None = None
    """Which of several processes this is; None if there is only one."""


Shapes: TypeAlias = tuple[tuple[int, ...], ...]
"""The shapes of the arrays of one column."""


class Placement(NamedTuple):
    """Sources and destinations of one leaf."""

    sources: tuple[Device, ...]
    targets: tuple[Device, ...]


@dataclasses.dataclass(frozen=True)
class Combination:
    """Sums or means of columns of arrays, each on its targets; the gradient is a sum over all targets.

    A broadcast is the sum of one.
    """

    calls: Calls
    places: tuple[Placement, ...]
    options: CommunicationOptions
    op: ReduceOp = ReduceOp.SUM
    divisors: tuple[int, ...] | None = None
    """What sums are divided by, where that is not the number of sources."""

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        """One batch."""
        pairs = _placed(arrays, self.places)
        results = map(components_of, self.calls.batch_reduce(self.op, pairs, self.options))
        if self.divisors is None:
            return [array for own in results for array in own]
        return [array / divisor for own, divisor in zip(results, self.divisors, strict=True) for array in own]

    def transposed(self) -> Combination:
        """Gradients of all targets are added for each source, and divided as the mean was."""
        places = tuple(Placement(place.targets, place.sources) for place in self.places)
        counts = [len(place.sources) for place in self.places]
        is_square = self.calls.rank is None and counts == [len(place.targets) for place in self.places]
        if self.op is ReduceOp.SUM or is_square:
            return dataclasses.replace(self, places=places)
        divisors = tuple(_of_all(self.calls, counts, self.options))
        return dataclasses.replace(self, places=places, op=ReduceOp.SUM, divisors=divisors)


@dataclasses.dataclass(frozen=True)
class Concatenation:
    """Columns of arrays end to end along an axis, on all targets; the gradient is made of slices."""

    calls: Calls
    places: tuple[Placement, ...]
    options: CommunicationOptions
    axis: int
    shapes: Sequence[Shapes]
    """For each column, the shapes of its arrays in this process."""
    op: ReduceOp = ReduceOp.SUM
    """If it is MEAN, results are divided by the number of targets: the transpose of parts of a mean."""

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        """One gather for each column."""
        divisors = [1] * len(self.places)
        if self.op is ReduceOp.MEAN:
            divisors = _of_all(self.calls, [len(place.targets) for place in self.places], self.options)
        return [
            array if divisor == 1 else array / divisor
            for pair, divisor in zip(_placed(arrays, self.places), divisors, strict=True)
            for array in components_of(self.calls.gather(*pair, self.axis, self.options))
        ]

    def transposed(self) -> SumsOfSlices:
        """Every source gets its own slice of the sum over all targets."""
        return SumsOfSlices(self, tuple(map(self._slices, self.places, self.shapes)))

    def _slices(self, place: Placement, shapes: Sequence[tuple[int, ...]]) -> Slices:
        rank, own = self.calls.rank, tuple(shape[self.axis] for shape in shapes)
        if rank is None:
            return Slices(0, own, is_all_gather=False)
        is_all_gather = place.sources == place.targets
        rows = self.calls.gather(
            np.array([(rank, length, is_all_gather) for length in own]), host_device(0), options=self.options
        )
        lengths = tuple(int(length) for length in rows[:, 1])
        return Slices(int((rows[:, 0] < rank).sum()), lengths, bool(rows[:, 2].all()))


class Slices(NamedTuple):
    """The slices of one column of a concatenation, over all processes."""

    first: int
    """The first of this process."""
    lengths: tuple[int, ...]
    is_all_gather: bool
    """Whether, between processes, each source is a target too, and there are no others."""


@dataclasses.dataclass(frozen=True)
class SumsOfSlices:
    """The transpose of a concatenation: a reduce-scatter."""

    concatenation: Concatenation
    slices: tuple[Slices, ...]

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        """Reduce-scatters what was gathered everywhere, and sums the rest in one batch.

        A gather to some devices has no reduce-scatter: between processes all of its slices are summed
        everywhere, and those of others dropped.
        """
        whole = self.concatenation
        columns = _split(arrays, [len(place.targets) for place in whole.places])
        pairs: list[tuple[PerReplica, Device]] = []
        found: list[Array | None] = []
        own: list[int] = []
        for column, place, (first, lengths, is_all_gather) in zip(
            columns, whole.places, self.slices, strict=True
        ):
            if is_all_gather:
                value = PerReplica.of(column, place.targets)
                found += components_of(
                    whole.calls.reduce_scatter(whole.op, value, whole.axis, whole.options, sizes=lengths)
                )
                continue
            start = 0
            for number, length in enumerate(lengths):
                replica = number - first
                is_own = 0 <= replica < len(place.sources)
                if is_own:
                    own.append(len(pairs))
                    found.append(None)
                parts = tuple(_slice(array, whole.axis, start, start + length) for array in column)
                pairs.append((PerReplica.of(parts, place.targets), place.sources[replica if is_own else 0]))
                start += length
        sums = whole.calls.batch_reduce(whole.op, pairs, whole.options) if pairs else []
        summed = iter([sums[number] for number in own])
        return [next(summed) if array is None else array for array in found]

    def transposed(self) -> Concatenation:
        """The concatenation."""
        return self.concatenation


@dataclasses.dataclass(frozen=True)
class PartsExchange:
    """An all-to-all inside one process; its transpose sends every part back to where it came from."""

    all_to_all: Callable[..., Any]
    places: tuple[Placement, ...]
    axis: int
    lengths: Callable[[], list[list[Sequence[int]]]]
    """For each column and source, the lengths of the parts that go to the targets."""

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        """One all-to-all for each column."""
        return [
            array
            for (value, _), sizes in zip(_placed(arrays, self.places), self.lengths(), strict=True)
            for array in components_of(self.all_to_all(value, self.axis, sizes=sizes))
        ]

    def transposed(self) -> PartsExchange:
        """Targets become sources."""
        back: list[list[Sequence[int]]] = [list(zip(*sizes, strict=True)) for sizes in self.lengths()]
        return dataclasses.replace(self, lengths=lambda: back)


def lengths_of_parts(columns: Sequence[Shapes], axis: int, sizes: Any) -> list[list[Sequence[int]]]:
    """For each column and array, the lengths of the parts it is cut into."""
    return [
        [
            part_lengths(shape[axis], len(shapes), given)
            for shape, given in zip(shapes, read_sizes_of_all(sizes, len(shapes)), strict=True)
        ]
        for shapes in columns
    ]


def _of_all(calls: Calls, counts: list[int], options: CommunicationOptions) -> list[int]:
    """The counts of all processes, added."""
    if calls.rank is None:
        return counts
    rows = calls.gather(np.array([counts]), host_device(0), options=options)
    return [int(count) for count in rows.sum(axis=0)]


def _placed(arrays: Sequence[Array], places: Sequence[Placement]) -> list[tuple[PerReplica, Any]]:
    """Columns of arrays as values, and where their results go."""
    columns = _split(arrays, [len(place.sources) for place in places])
    return [
        (PerReplica.of(column, place.sources), destinations_on(place.targets))
        for column, place in zip(columns, places, strict=True)
    ]


def _split(arrays: Sequence[Array], counts: Sequence[int]) -> Iterator[tuple[Array, ...]]:
    remaining = iter(arrays)
    return (tuple(islice(remaining, count)) for count in counts)


def _slice(array: Array, axis: int, start: int, stop: int) -> Array:
    return array[(slice(None),) * (axis % array.ndim) + (slice(start, stop),)]


@dataclasses.dataclass(frozen=True)
class RecordedLeaves:
    """The leaves of some values that their library records; results of others are returned as they are."""

    autograd: Autograd
    placed: Sequence[tuple[Value, tuple[Device, ...]]]
    picked: Sequence[tuple[int, int]]
    """For each recorded leaf, the number of its value and the number of the leaf in it."""

    @property
    def places(self) -> tuple[Placement, ...]:
        """Sources and destinations of each leaf."""
        return tuple(Placement(self.placed[i][0].devices, self.placed[i][1]) for i, _ in self.picked)

    @property
    def shapes(self) -> list[Shapes]:
        """The shapes of the arrays of each leaf."""
        return list(map(_shapes_of, self._columns))

    @property
    def _columns(self) -> list[tuple[Array, ...]]:
        return [self.leaf(i, k).arrays for i, k in self.picked]

    def called(
        self,
        run: Callable[[], Sequence[Any]],
        linear: LinearMap,
        kind: type[DistributedValues] = Mirrored,
        shapes: list[Any] | None = None,
    ) -> list[Any]:
        """Calls `run` for all values and records it as a linear map of the leaves.

        The shapes of the results are appended to `shapes`.
        """
        columns: list[list[tuple[Array, ...]]] = []

        def run_flat() -> list[Array]:
            columns.extend(
                _of_leaves(result, value) for result, (value, _) in zip(run(), self.placed, strict=True)
            )
            if shapes is not None:
                shapes.extend(_shapes_of(columns[i][k]) for i, k in self.picked)
            return [array for i, k in self.picked for array in columns[i][k]]

        arrays = [array for column in self._columns for array in column]
        results = iter(self.autograd.linear_call(run_flat, linear, arrays))
        for i, k in self.picked:
            columns[i][k] = tuple(islice(results, len(columns[i][k])))
        return [
            wrapped(own, value.structure, devices, kind)
            for own, (value, devices) in zip(columns, self.placed, strict=True)
        ]

    def leaf(self, i: int, k: int) -> Leaf:
        """Leaf k of value i."""
        return self.placed[i][0].leaves[k]


def recorded_leaves(
    placed: Sequence[tuple[Value, tuple[Device, ...]]], outs: Sequence[Any]
) -> RecordedLeaves | None:
    """The leaves of values with a recorded array; None if there are none.

    If there are any, `out` is refused: what was recorded of its arrays would no longer be true.
    """
    picked: list[tuple[int, int]] = []
    found = None
    for i, (value, _) in enumerate(placed):
        for k, leaf in enumerate(value.leaves):
            autograd = _autograd_of(leaf.arrays)
            if autograd is not None:
                picked.append((i, k))
                found = autograd
    if found is None:
        return None
    recorded = RecordedLeaves(found, placed, picked)
    if any(out is not None for out in outs):
        raise OutError(
            f"out was given for a value{recorded.leaf(*picked[0]).at_path} that requires a gradient; "
            "results that are differentiated are new arrays: leave out= away, or turn recording off "
            "(torch.no_grad(), detach())"
        )
    return recorded


def _autograd_of(arrays: Sequence[Any]) -> Autograd | None:
    """The autograd of their library, if it records any of them."""
    backend = backend_of_type(type(arrays[0]))
    autograd = None if backend is None else backend.autograd
    return autograd if autograd is not None and any(map(autograd.is_recorded, arrays)) else None


def _of_leaves(result: Any, value: Value) -> list[tuple[Array, ...]]:
    """For each leaf, its results on all destinations."""
    components = components_of(result)
    if value.structure is None:
        return [tuple(components)]
    return list(zip(*(flatten(component)[0] for component in components), strict=True))


def _shapes_of(arrays: Sequence[Array]) -> Shapes:
    return tuple(tuple(array.shape) for array in arrays)

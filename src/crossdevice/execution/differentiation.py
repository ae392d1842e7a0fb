"""Calls on arrays that their library records, to differentiate them: all of them are linear maps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from crossdevice.backends.protocol import Array, Autograd, LinearMap
from crossdevice.backends.registry import backend_of_type
from crossdevice.errors import OutError
from crossdevice.execution.reading.outputs import wrapped
from crossdevice.execution.reading.values import Leaf, Value, read_value
from crossdevice.values.device import Device, host_device
from crossdevice.values.distributed import DistributedValues, Mirrored, PerReplica, components_of
from crossdevice.values.nesting import flatten
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp


class Calls(NamedTuple):
    """Of an algorithm what derivatives are made of; between processes, all ranks make these calls."""

    batch_reduce: Callable[..., list[Any]]
    gather: Callable[..., Any]
    rank: int | None = None
    """Which of several processes this is; None if there is only one."""


class Place(NamedTuple):
    """Where one leaf comes from, and where its results go."""

    sources: tuple[Device, ...]
    targets: tuple[Device, ...]


@dataclasses.dataclass(frozen=True)
class RecordedLeaves:
    """The leaves of some values that their library records; results of others are only passed on."""

    autograd: Autograd
    placed: Sequence[tuple[Value, tuple[Device, ...]]]
    picked: Sequence[tuple[int, int]]
    """Of each leaf the number of its value, and its number in that."""

    @property
    def _places(self) -> tuple[Place, ...]:
        return tuple(Place(self.placed[i][0].devices, self.placed[i][1]) for i, _ in self.picked)

    @property
    def _columns(self) -> list[tuple[Array, ...]]:
        return [self.leaf(i, k).arrays for i, k in self.picked]

    def reduced(
        self, run: Callable[[], Sequence[Any]], calls: Calls, op: ReduceOp, options: CommunicationOptions
    ) -> list[Any]:
        """What `run` returns for all values, recorded as their SUM or MEAN."""
        return self._called(run, Combination(calls, self._places, options, op))

    def gathered(
        self, run: Callable[[], Sequence[Any]], calls: Calls, axis: int, options: CommunicationOptions
    ) -> list[Any]:
        """What `run` returns for all values, recorded as their replicas end to end."""
        shapes = tuple(tuple(tuple(array.shape) for array in column) for column in self._columns)
        return self._called(run, Concatenation(calls, self._places, options, axis, shapes))

    def scattered(
        self,
        run: Callable[[], Sequence[Any]],
        calls: Calls,
        op: ReduceOp,
        axis: int,
        options: CommunicationOptions,
    ) -> list[Any]:
        """What `run` returns for all values, recorded as parts of their SUM or MEAN along the axis."""
        shapes: list[Any] = []  # known when the parts are
        whole = Concatenation(calls, self._places, options, axis, shapes, op)
        return self._called(run, SumsOfSlices(whole, ()), PerReplica, shapes)

    def _called(
        self,
        run: Callable[[], Sequence[Any]],
        linear: LinearMap,
        kind: type[DistributedValues] = Mirrored,
        shapes: list[Any] | None = None,
    ) -> list[Any]:
        """What `run` returns; `shapes` gets those of its results."""
        columns: list[list[tuple[Array, ...]]] = []

        def run_flat() -> list[Array]:
            columns.extend(
                _of_leaves(result, value) for result, (value, _) in zip(run(), self.placed, strict=True)
            )
            if shapes is not None:
                shapes.extend(tuple(tuple(array.shape) for array in columns[i][k]) for i, k in self.picked)
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
        """By the number of its value, and its number in that."""
        return self.placed[i][0].leaves[k]


def recorded_leaves(
    placed: Sequence[tuple[Value, tuple[Device, ...]]], outs: Sequence[Any]
) -> RecordedLeaves | None:
    """The leaves of values as read of which some array is recorded; None if there are none.

    Memory to write to is refused then: what was recorded of it would not be true any more.
    """
    picked: list[tuple[int, int]] = []
    found = None
    for i, (value, _) in enumerate(placed):
        for k, leaf in enumerate(value.leaves):
            autograd = _autograd_of(leaf)
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


def read_recorded_leaves(
    placed: Sequence[tuple[Any, tuple[Device, ...] | None]], outs: Sequence[Any]
) -> RecordedLeaves | None:
    """The same of values that have not been read; None stands for the devices that a value is on."""
    if not any(_may_be_recorded(value) for value, _ in placed):
        return None
    read = [(read_value(value), devices) for value, devices in placed]
    return recorded_leaves([(value, devices or value.devices) for value, devices in read], outs)


def _autograd_of(leaf: Leaf) -> Autograd | None:
    backend = backend_of_type(type(leaf.arrays[0]))
    if backend is None or backend.autograd is None:
        return None
    return backend.autograd if any(map(backend.autograd.is_recorded, leaf.arrays)) else None


def _may_be_recorded(value: Any) -> bool:
    for component in components_of(value):
        leaves = [component] if hasattr(component, "dtype") else flatten(component)[0]
        for leaf in leaves:
            backend = backend_of_type(type(leaf))
            if backend is not None and backend.autograd is not None:
                return backend.autograd.is_recording()
    return False


def _of_leaves(result: Any, value: Value) -> list[tuple[Array, ...]]:
    """Of each leaf the results on all destinations."""
    components = components_of(result)
    if value.structure is None:
        return [tuple(components)]
    return list(zip(*(flatten(component)[0] for component in components), strict=True))


# -------------------------------------------------------------------- the maps


@dataclasses.dataclass(frozen=True)
class Combination:
    """Sums or means of columns of arrays, each on its targets; the gradient is a sum over all targets.

    A broadcast is the sum of one.
    """

    calls: Calls
    places: tuple[Place, ...]
    options: CommunicationOptions
    op: ReduceOp = ReduceOp.SUM
    divisors: tuple[int, ...] | None = None
    """What sums are divided by, where that is not the number of sources."""

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        """One batch."""
        columns = _split(arrays, [len(place.sources) for place in self.places])
        pairs = [
            (PerReplica.of(column, place.sources), _on(place.targets))
            for column, place in zip(columns, self.places, strict=True)
        ]
        results = map(components_of, self.calls.batch_reduce(self.op, pairs, self.options))
        if self.divisors is None:
            return [array for own in results for array in own]
        return [array / divisor for own, divisor in zip(results, self.divisors, strict=True) for array in own]

    def transposed(self) -> Combination:
        """Each source counts for every target, divided as the mean was."""
        places = tuple(Place(place.targets, place.sources) for place in self.places)
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
    places: tuple[Place, ...]
    options: CommunicationOptions
    axis: int
    shapes: Sequence[tuple[tuple[int, ...], ...]]
    """Of each column those of its arrays in this process."""
    op: ReduceOp = ReduceOp.SUM
    """If it is MEAN, results are divided by the number of targets: the transpose of parts of a mean."""

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        """One gather for each column."""
        columns = _split(arrays, [len(place.sources) for place in self.places])
        divisors = [1] * len(self.places)
        if self.op is ReduceOp.MEAN:
            divisors = _of_all(self.calls, [len(place.targets) for place in self.places], self.options)
        return [
            array if divisor == 1 else array / divisor
            for column, place, divisor in zip(columns, self.places, divisors, strict=True)
            for array in components_of(
                self.calls.gather(
                    PerReplica.of(column, place.sources), _on(place.targets), self.axis, self.options
                )
            )
        ]

    def transposed(self) -> SumsOfSlices:
        """Every source gets its own slice of the sum over all targets."""
        return SumsOfSlices(self, tuple(map(self._slices, self.shapes)))

    def _slices(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, tuple[int, ...]]:
        """Which slice is the first of this process, and the lengths of all slices of all processes."""
        rank, own = self.calls.rank, tuple(shape[self.axis] for shape in shapes)
        if rank is None:
            return 0, own
        rows = self.calls.gather(
            np.array([(rank, length) for length in own]), host_device(0), options=self.options
        )
        return int((rows[:, 0] < rank).sum()), tuple(int(length) for length in rows[:, 1])


@dataclasses.dataclass(frozen=True)
class SumsOfSlices:
    """The transpose of a concatenation: a reduce-scatter."""

    concatenation: Concatenation
    slices: tuple[tuple[int, tuple[int, ...]], ...]

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        """One batch; between processes all slices are summed everywhere, and those of others dropped."""
        whole = self.concatenation
        columns = _split(arrays, [len(place.targets) for place in whole.places])
        pairs: list[tuple[PerReplica, Device]] = []
        own: list[int] = []
        for column, place, (first, lengths) in zip(columns, whole.places, self.slices, strict=True):
            start = 0
            for number, length in enumerate(lengths):
                replica = number - first
                is_own = 0 <= replica < len(place.sources)
                if is_own:
                    own.append(len(pairs))
                parts = tuple(_slice(array, whole.axis, start, start + length) for array in column)
                pairs.append((PerReplica.of(parts, place.targets), place.sources[replica if is_own else 0]))
                start += length
        sums = whole.calls.batch_reduce(whole.op, pairs, whole.options)
        return [sums[number] for number in own]

    def transposed(self) -> Concatenation:
        """The concatenation."""
        return self.concatenation


def _of_all(calls: Calls, counts: list[int], options: CommunicationOptions) -> list[int]:
    """Sums of counts over all processes."""
    if calls.rank is None:
        return counts
    rows = calls.gather(np.array([counts]), host_device(0), options=options)
    return [int(count) for count in rows.sum(axis=0)]


def _split(arrays: Sequence[Array], counts: Sequence[int]) -> Iterator[tuple[Array, ...]]:
    remaining = iter(arrays)
    return (tuple(islice(remaining, count)) for count in counts)


def _slice(array: Array, axis: int, start: int, stop: int) -> Array:
    return array[(slice(None),) * (axis % array.ndim) + (slice(start, stop),)]


def _on(devices: tuple[Device, ...]) -> PerReplica:
    return PerReplica.of((None,) * len(devices), devices)

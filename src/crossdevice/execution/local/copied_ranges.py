"""Calls that copy, in one process: each result is made of ranges of inputs, end to end along an axis."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import HOST_MEMORY, Array, Backend
from crossdevice.execution.local.passes import in_sequence, is_view_of
from crossdevice.execution.local.planning import Planner
from crossdevice.execution.reading.leaf_spec import Columns, Dense, LeafSpec, Out, Outs
from crossdevice.execution.reading.outputs import (
    are_apart,
    check_array,
    check_overlaps,
    delivered,
    read_out,
    wrapped,
    written_view,
)
from crossdevice.execution.reading.shards import Gathering, check_gather, part_lengths, read_all_to_all
from crossdevice.execution.reading.values import Leaf, Value, one_backend
from crossdevice.execution.tracing import READING, Work, flight_recorder, now, transfer
from crossdevice.kernels.host.fused_pass import bound_batch, fused_batch
from crossdevice.kernels.host.resources.pool import result_pool
from crossdevice.values.device import Device
from crossdevice.values.distributed import DistributedValues, Mirrored, PerReplica
from crossdevice.values.dtypes import ITEM_BYTES
from crossdevice.values.recipe import COPYING
from crossdevice.values.weights import Weights, refuse_weights

MIN_PASS_BYTES = 1 << 18
"""Below this, the library's own copies take less time than preparing a pass."""


class Piece(NamedTuple):
    """A range of one input along the axis."""

    source: int
    start: int
    stop: int


class _Move(NamedTuple):
    """Bytes `start` to `stop` of an input, and where they begin in each of these results."""

    source: int
    start: int
    stop: int
    targets: Sequence[tuple[int, int]]


@dataclasses.dataclass(frozen=True, eq=False)
class CopiedLeaf:
    """All of a leaf but its elements: where its inputs are, and of which of their ranges results consist."""

    backend: Backend
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    axis: int
    devices: tuple[Device, ...]
    destinations: tuple[Device, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    """For each destination, what is put end to end there."""
    path: str = ""
    is_broadcast: bool = False
    """Whether there is one input, whose elements all go to every destination: of any shape, also of none."""

    @functools.cached_property
    def result_shapes(self) -> list[tuple[int, ...]]:
        """The shape of the result on each destination."""
        first = self.shapes[0]
        if self.is_broadcast:
            return [first] * len(self.destinations)
        lengths = [sum(piece.stop - piece.start for piece in own) for own in self.pieces]
        return [(*first[: self.axis], length, *first[self.axis + 1 :]) for length in lengths]

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes of all inputs; 0 for dtypes without a known size, such as strings."""
        return sum(map(math.prod, self.shapes)) * ITEM_BYTES.get(self.dtype, 0)

    @functools.cached_property
    def spec(self) -> LeafSpec:
        """The places of arrays and results; its shape is that of the first result."""
        return LeafSpec(self.backend, self.dtype, self.result_shapes[0], self.devices, self.destinations)

    @functools.cached_property
    def is_of_ranges(self) -> bool:
        """True if pieces are ranges of the host's memory."""
        before = self.shapes[0][: self.axis]
        memories = (self.backend.memory_of(device) for device in (*self.devices, *self.destinations))
        return self.dtype in ITEM_BYTES and math.prod(before) == 1 and set(memories) == {HOST_MEMORY}

    @functools.cached_property
    def _moves(self) -> list[_Move]:
        """Each piece once, with all results that it goes to."""
        first = self.shapes[0]
        row_bytes = ITEM_BYTES[self.dtype] * (1 if self.is_broadcast else math.prod(first[self.axis + 1 :]))
        found: dict[Piece, list[tuple[int, int]]] = {}
        for number, pieces in enumerate(self.pieces):
            offset = 0
            for piece in pieces:
                found.setdefault(piece, []).append((number, offset))
                offset += (piece.stop - piece.start) * row_bytes
        return [
            _Move(source, start * row_bytes, stop * row_bytes, targets)
            for (source, start, stop), targets in found.items()
            if start < stop and row_bytes
        ]

    def tasks(
        self, views: Sequence[NDArray[Any]], flats: Sequence[NDArray[Any]]
    ) -> list[tuple[list[NDArray[Any]], list[NDArray[Any]]]]:
        """Passes over the host's memory that make these results of these inputs."""
        inputs, outputs = ([flat.view(np.uint8) for flat in these] for these in (views, flats))
        return [
            (
                [inputs[source][start:stop]],
                [outputs[number][offset : offset + stop - start] for number, offset in targets],
            )
            for source, start, stop, targets in self._moves
        ]

    def run(self, arrays: Sequence[Array], out: Out) -> tuple[Array, ...]:
        """The result on each destination, in new memory or in `out`, which is not what is read."""
        if self._takes_a_pass:
            return self._in_one_pass(arrays, out)
        return self._copies(arrays[0], out) if self.is_broadcast else self._joined(arrays, out)

    @functools.cached_property
    def _takes_a_pass(self) -> bool:
        # A library whose arrays cannot be written to may share one instead of copying it.
        copies = not (self.is_broadcast and self.backend.is_immutable)
        return copies and self.is_of_ranges and self.num_bytes >= MIN_PASS_BYTES

    def _in_one_pass(self, arrays: Sequence[Array], out: Out) -> tuple[Array, ...]:
        """Reads each array once."""
        backend = self.backend
        views = list(map(backend.host_view, arrays))
        if out is None:
            sizes = [(math.prod(shape), views[0].dtype) for shape in self.result_shapes]
            flats = result_pool.empty_batch(sizes, on_lines=backend.is_immutable)
        else:
            flats = list(map(written_view, repeat(backend), out))
        started = now()
        fused_batch(self.tasks(views, flats), COPYING)
        stopped = now()
        for work in [way for _, way, _ in self._targets] if self.is_broadcast else [self._joining]:
            flight_recorder.events.append((work, started, stopped, 1))
        if out is None:
            return tuple(map(backend.from_host, flats, self.result_shapes, self.destinations))
        backend.mark_written(out)
        return tuple(out)

    def _joined(self, arrays: Sequence[Array], out: Out) -> tuple[Array, ...]:
        """Leaves it to the library to put parts end to end."""
        backend, results = self.backend, []
        are_views = self.spec.shares_host_memory and not backend.is_immutable
        for target, sources in self._sources:
            started = now()
            parts = []
            for source, cut, moving in sources:
                part = arrays[source]
                if cut is not None and are_views:
                    part = part[cut]
                elif cut is not None:
                    with backend.working_on(self.devices[source]):
                        part = part[cut]
                if moving is not None:
                    part = _brought(part, backend, moving, target)
                parts.append(part)
            results.append(backend.concat(parts, self.axis, target))
            flight_recorder.events.append((self._joining, started, now(), 1))
        return tuple(results) if out is None else delivered(results, out, backend)

    @functools.cached_property
    def _sources(self) -> list[tuple[Device, list[tuple[int, Any, Work | None]]]]:
        """For each result its device, and its pieces: an input, how it is cut, and the way it has to go."""
        memory_of, before = self.backend.memory_of, (slice(None),) * self.axis
        found = []
        for pieces, target in zip(self.pieces, self.destinations, strict=True):
            sources: list[tuple[int, Any, Work | None]] = []
            for source, start, stop in pieces:
                shape, device = self.shapes[source], self.devices[source]
                is_whole = (start, stop) == (0, shape[self.axis])
                cut = None if is_whole else (*before, slice(start, stop), ...)
                moving = None
                if memory_of(device) != memory_of(target):
                    elements = math.prod((*shape[: self.axis], stop - start, *shape[self.axis + 1 :]))
                    moving = transfer(device, target, elements * ITEM_BYTES.get(self.dtype, 0))
                sources.append((source, cut, moving))
            found.append((target, sources))
        return found

    def _copies(self, array: Array, out: Out) -> tuple[Array, ...]:
        """One array on every destination."""
        backend, events, results = self.backend, flight_recorder.events, []
        for number, (target, moving, shares_memory) in enumerate(self._targets):
            started = now()
            if out is None:
                into = backend.copy(array, target)
            else:
                into = out[number]
                if into is not array:
                    backend.write(into, array if shares_memory else backend.copy(array, target))
            events.append((moving, started, now(), 1))
            results.append(into)
        return tuple(results)

    @functools.cached_property
    def _targets(self) -> list[tuple[Device, Work, bool]]:
        """For each destination the way to it, and whether it has the memory of the one input."""
        (source,), memory_of = self.devices, self.backend.memory_of
        return [
            (target, transfer(source, target, self.num_bytes), memory_of(source) == memory_of(target))
            for target in self.destinations
        ]

    @functools.cached_property
    def _joining(self) -> Work:
        return Work("pack", f"join along axis {self.axis}", self.destinations)


def _brought(array: Array, backend: Backend, moving: Work, target: Device) -> Array:
    started = now()
    copied = backend.copy(array, target)
    flight_recorder.events.append((moving, started, now(), 1))
    return copied


class PreparedCopies:
    """A call that copies, without its arrays."""

    def __init__(self, name: str, leaves: Sequence[CopiedLeaf], plan: str = "") -> None:
        self._leaves = leaves
        devices = dict.fromkeys(device for leaf in leaves for device in (*leaf.devices, *leaf.destinations))
        self._work = Work("copy", name, tuple(devices), sum(leaf.num_bytes for leaf in leaves), plan)
        self._is_broadcast = name == "broadcast"
        self._writing = Work("copy", f"{name} into out", *self._work[2:])

    def run(self, columns: Columns, outs: Outs, weights: Weights | None = None) -> list[tuple[Array, ...]]:
        """For each leaf its result on each destination, written to `outs` where given."""
        refuse_weights(weights, "copies have none")
        started = now()
        work = self._work if all(out is None for out in outs) else self._writing
        late = work is not self._work and not self._are_apart(columns, outs)
        try:
            results = [
                leaf.run(arrays, None if late else out)
                for leaf, arrays, out in zip(self._leaves, columns, outs, strict=True)
            ]
            if late:
                results = [
                    delivered(made, out, leaf.backend)
                    for leaf, made, out in zip(self._leaves, results, outs, strict=True)
                ]
        except Exception as error:
            flight_recorder.events.append((work, started, now(), 1))
            flight_recorder.dump_after(error)
            raise
        flight_recorder.events.append((work, started, now(), 1))
        return results

    def _are_apart(self, columns: Columns, outs: Outs) -> bool:
        """True if `outs` may be written to while inputs are read."""
        if self._is_broadcast:
            return True  # in place it is the same
        leaves = [
            Dense(arrays, leaf.spec, out)
            for leaf, arrays, out in zip(self._leaves, columns, outs, strict=True)
        ]
        return all(leaf.spec.shares_host_memory for leaf in leaves) and are_apart(leaves)

    def flat_passes(self) -> None:
        """None: ranges of inputs and of results differ."""

    def bind(self, columns: Columns, outs: Columns, weights: Weights | None = None) -> Callable[[], Any]:
        """A function that copies these arrays into those of `outs` whenever it is called."""
        refuse_weights(weights, "copies have none")
        views = [
            list(map(leaf.backend.host_view, arrays)) if leaf.is_of_ranges else []
            for leaf, arrays in zip(self._leaves, columns, strict=True)
        ]
        are_read = all(
            own and all(map(is_view_of, own, arrays, repeat(leaf.backend)))
            for own, leaf, arrays in zip(views, self._leaves, columns, strict=True)
        )
        if not are_read or not self._are_apart(columns, outs):
            return functools.partial(self.run, columns, outs)
        tasks = []
        counted: dict[Backend, list[Array]] = {}
        for leaf, own, out in zip(self._leaves, views, outs, strict=True):
            tasks += leaf.tasks(own, list(map(written_view, repeat(leaf.backend), out)))
            if leaf.backend.counts_writes:
                counted.setdefault(leaf.backend, []).extend(out)
        works: list[Callable[[], Any]] = [*bound_batch(tasks, COPYING)]
        works += [functools.partial(backend.mark_written, arrays) for backend, arrays in counted.items()]
        return in_sequence(works)

    def check_outs(self, columns: Columns, outs: Outs) -> None:
        """Refuses memory that does not fit results, or overlaps other memory.

        Results of all but broadcasts are complete before what is read is written to.
        """
        written = []
        for leaf, arrays, out in zip(self._leaves, columns, outs, strict=True):
            if out is None:
                continue
            for position, (array, shape) in enumerate(zip(out, leaf.result_shapes, strict=True)):
                check_array(
                    array, position, dataclasses.replace(leaf.spec, shape=shape), leaf.dtype, leaf.path
                )
            written.append(Dense(arrays if leaf.is_broadcast else (), leaf.spec, out))
        check_overlaps(written)


class CheckedCopies:
    """A gather, a broadcast or an all-to-all that has passed every check."""

    weights: Weights | None = None
    is_dense = True

    def __init__(
        self,
        name: str,
        placed: Sequence[tuple[Value, tuple[Device, ...]]],
        leaves: Sequence[Sequence[CopiedLeaf]],
        outs: Sequence[Any],
        plan: str = "",
    ) -> None:
        self._values = [value for value, _ in placed]
        self.container: type[DistributedValues] = PerReplica if name == "all_to_all" else Mirrored
        self.places = [(len(value.leaves), destinations) for value, destinations in placed]
        all_leaves = list(itertools.chain.from_iterable(leaves))
        read_outs = [
            found
            for (value, destinations), out in zip(placed, outs, strict=True)
            for found in ([None] * len(value.leaves) if out is None else read_out(out, value, destinations))
        ]
        columns = [leaf.arrays for value in self._values for leaf in value.leaves]
        self.dense = [
            Dense(arrays, leaf.spec, out, path=leaf.path)
            for arrays, leaf, out in zip(columns, all_leaves, read_outs, strict=True)
        ]
        has_one_length = name == "broadcast" and all(leaf.dtype in ITEM_BYTES for leaf in all_leaves)
        self.bytes_of_results = [leaf.num_bytes for leaf in all_leaves] if has_one_length else None
        self._prepared = PreparedCopies(name, all_leaves, plan)
        self._prepared.check_outs(columns, read_outs)

    @property
    def check_outs(self) -> Callable[[Columns, Outs], None]:
        """The check of memory for the results of another call like this."""
        return self._prepared.check_outs

    def prepared(self, planner: Planner) -> PreparedCopies:
        """The call without its arrays; nothing of it is planned."""
        del planner
        return self._prepared

    def run(self, planner: Planner) -> list[Any]:
        """The wrapped result of each value."""
        del planner
        columns, outs = [leaf.arrays for leaf in self.dense], [leaf.out for leaf in self.dense]
        return self.wrapped(self._prepared.run(columns, outs))

    def wrapped(self, results: Iterable[Sequence[Any]]) -> list[Any]:
        """The results of all leaves, as one value for each that was read."""
        left = iter(results)
        return [
            wrapped([next(left) for _ in range(number)], value.structure, destinations, self.container)
            for value, (number, destinations) in zip(self._values, self.places, strict=True)
        ]


def checked_gather(
    placed: Sequence[tuple[Value, tuple[Device, ...]]], outs: Sequence[Any], axis: int
) -> CheckedCopies:
    """Checks values, each to be put end to end on its destinations."""
    started = now()
    leaves = []
    for value, destinations in placed:
        of_value = []
        for leaf in value.leaves:
            gathering = check_gather(leaf, value.devices, destinations, axis)
            shapes = gathering.shapes
            whole = tuple([Piece(k, 0, shape[gathering.axis]) for k, shape in enumerate(shapes)])
            pieces = (whole,) * len(destinations)
            of_value.append(_copied(leaf, gathering, value.devices, destinations, pieces))
        leaves.append(of_value)
    checked = CheckedCopies("gather", placed, leaves, outs, f"axis {axis}")
    flight_recorder.events.append((READING, started, now(), 1))
    return checked


def checked_all_to_all(values: Sequence[Value], outs: Sequence[Any], axis: int, sizes: Any) -> CheckedCopies:
    """Checks values whose parts go from each replica to all replicas."""
    started = now()
    moves = [read_all_to_all(value, axis, sizes, out) for value, out in zip(values, outs, strict=True)]
    leaves = []
    for value, gatherings, of_replicas, _ in moves:
        of_value = []
        for leaf, gathering in zip(value.leaves, gatherings, strict=True):
            parts = [
                _parts(k, part_lengths(shape[gathering.axis], len(value.devices), own))
                for k, (shape, own) in enumerate(zip(gathering.shapes, of_replicas, strict=True))
            ]
            pieces = tuple(zip(*parts, strict=True))
            of_value.append(_copied(leaf, gathering, value.devices, value.devices, pieces))
        leaves.append(of_value)
    placed = [(move.value, move.value.devices) for move in moves]
    checked = CheckedCopies("all_to_all", placed, leaves, outs)
    flight_recorder.events.append((READING, started, now(), 1))
    return checked


def checked_broadcast(value: Value, destinations: tuple[Device, ...], out: Any) -> CheckedCopies:
    """Checks a value of one replica, to be copied to each destination."""
    started = now()
    leaves = []
    for leaf in value.leaves:
        backend = one_backend(leaf.arrays, value.devices, leaf.path, destinations)
        (array,) = leaf.arrays
        gathering = Gathering(leaf.arrays, backend, 0)
        size = math.prod(backend.shape_of(array))
        pieces = ((Piece(0, 0, size),),) * len(destinations)
        copied = _copied(leaf, gathering, value.devices, destinations, pieces)
        leaves.append(dataclasses.replace(copied, is_broadcast=True))
    checked = CheckedCopies("broadcast", [(value, destinations)], [leaves], [out])
    flight_recorder.events.append((READING, started, now(), 1))
    return checked


def _parts(source: int, lengths: Sequence[int]) -> list[Piece]:
    edges = itertools.pairwise(itertools.accumulate(lengths, initial=0))
    return [Piece(source, start, stop) for start, stop in edges]


def _copied(
    leaf: Leaf,
    gathering: Gathering,
    devices: tuple[Device, ...],
    destinations: tuple[Device, ...],
    pieces: tuple[tuple[Piece, ...], ...],
) -> CopiedLeaf:
    _, backend, axis = gathering
    return CopiedLeaf(
        backend, gathering.dtype, gathering.shapes, axis, devices, destinations, pieces, leaf.path
    )

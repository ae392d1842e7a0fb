"""Calls that were made before: values with known signatures need no reading and no checks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from types import NoneType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import optree

from crossdevice.backends.protocol import Array
from crossdevice.backends.registry import backend_named, backend_of_type
from crossdevice.execution.collective import Collective
from crossdevice.execution.local.host_passes import FlatPasses
from crossdevice.execution.local.planning import Planner
from crossdevice.execution.local.prepared import CheckedCall, Prepared
from crossdevice.execution.signature_cache import SignatureCache
from crossdevice.kernels.host.fixed_arrays import Separation, Signature
from crossdevice.kernels.host.fused_pass import (
    Pointers,
    place_of,
    pointers_of,
    selected_kernels,
)
from crossdevice.kernels.host.work_list import WORD_BYTES
from crossdevice.values.device import Device
from crossdevice.values.distributed import DistributedValues
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights

MAX_ALIKE = 64
"""Calls that are kept under one key: trees of one structure whose arrays have other shapes."""

MAX_BEFORE = 8
"""Calls that are compared before the one that fits; one that is found later comes first from then on."""


class Structure(NamedTuple):
    """The structure of one pair's result."""

    tree: Any
    is_around: bool
    """Whether its leaves are distributed values; else each replica has such a tree."""
    given: Sequence[Any] | None = None
    """The trees of `out`, which are those of results."""


class Flattened(NamedTuple):
    """The arrays of a call, leaf by leaf and replica by replica, and the key of calls like it."""

    key: Hashable
    leaves: tuple[Array, ...]
    structures: Sequence[Structure | None]
    """For each pair; None for one array per replica."""
    outs: tuple[Array, ...] | None
    """Leaf by leaf and destination by destination; in place, the very tuple of `leaves`."""
    arrays: tuple[Array, ...]
    """The leaves and then the outs; in place, the leaves."""


class KnownCall:
    """A prepared call of dense arrays: everything but the arrays."""

    fits: Look
    """Whether all arrays of a call have the signatures of those before."""

    def __init__(self, prepared: Prepared, call: CheckedCall, flattened: Flattened) -> None:
        self._prepared, self._check_outs, self._container = prepared, call.check_outs, call.container
        self._specs = [leaf.spec for leaf in call.dense]
        self._num_leaves = [number for number, _ in call.places]
        self._destinations = [destinations for _, destinations in call.places]
        self.fits = _look_at(flattened)
        self._has_scalars = any(isinstance(array, np.generic) for array in flattened.leaves)
        self._flat: FlatPasses | None = None
        self._separation: Separation | None = None
        backends = {spec.backend for spec in self._specs}
        if len(backends) == 1 and all(spec.shares_host_memory for spec in self._specs):
            (backend,) = backends
            if backend.are_flat(self._as_arrays(flattened.arrays)):
                self._flat = prepared.flat_passes()
                if flattened.outs is not None:
                    self._separation = self._compiled_look_at_memory(call.bytes_of_results)

    def _compiled_look_at_memory(self, bytes_of_results: Sequence[int] | None) -> Separation | None:
        if bytes_of_results is None or selected_kernels() != "numba":
            return None
        return Separation(
            [
                (len(spec.devices), spec.num_bytes, len(spec.destinations), num_bytes)
                for spec, num_bytes in zip(self._specs, bytes_of_results, strict=True)
            ]
        )

    def _as_arrays(self, leaves: tuple[Array, ...]) -> tuple[Array, ...]:
        """NumPy's scalars, which have no memory of their own to be read, as arrays."""
        if not self._has_scalars:
            return leaves
        return tuple([np.asarray(leaf) if isinstance(leaf, np.generic) else leaf for leaf in leaves])

    def run(self, flattened: Flattened, weights: Weights | None = None) -> list[Any]:
        """Makes the call with arrays that fit."""
        _, leaves, structures, outs, arrays = flattened
        if self._has_scalars:
            leaves, arrays = self._as_arrays(leaves), self._as_arrays(arrays)
        pointers = None if outs is None else self._check_apart(leaves, outs, arrays)
        results = None if self._flat is None else self._flat.run(leaves, outs, weights, pointers)
        if results is None:
            columns = _columns(leaves, [len(spec.devices) for spec in self._specs])
            numbers = [len(spec.destinations) for spec in self._specs]
            written = [None] * len(numbers) if outs is None else _columns(outs, numbers)
            results = tuple(chain.from_iterable(self._prepared.run(columns, written, weights)))
        if len(structures) == 1 and structures[0] is None:
            return [results[0] if len(results) == 1 else self._container.of(results, self._destinations[0])]
        return self._wrapped(results, structures)

    def _wrapped(self, results: tuple[Array, ...], structures: Sequence[Structure | None]) -> list[Any]:
        wrapped: list[Any] = []
        start = entry = 0
        for structure in structures:
            destinations = self._destinations[entry]
            number = len(destinations)
            if structure is None:
                entry += 1
                stop = start + number
                wrapped.append(
                    results[start] if number == 1 else self._container.of(results[start:stop], destinations)
                )
            elif structure.is_around:
                leaves = []
                for _ in range(structure.tree.num_leaves):
                    stop = start + len(self._destinations[entry])
                    own = results[start:stop]
                    leaves.append(
                        own[0] if len(own) == 1 else self._container.of(own, self._destinations[entry])
                    )
                    start, entry = stop, entry + 1
                wrapped.append(structure.tree.unflatten(leaves))
            else:
                stop = start + number * self._num_leaves[entry]
                entry += 1
                trees = structure.given
                if trees is None:
                    unflatten = structure.tree.unflatten
                    trees = [unflatten(results[first:stop:number]) for first in range(start, start + number)]
                wrapped.append(trees[0] if number == 1 else self._container.of(tuple(trees), destinations))
            start = stop
        return wrapped

    def _check_apart(
        self, leaves: tuple[Array, ...], outs: tuple[Array, ...], arrays: tuple[Array, ...]
    ) -> Pointers | None:
        """Refuses memory that overlaps other memory; returns pointers to all if kernels can read them."""
        if self._separation is not None:
            backend = self._specs[0].backend
            pointers = pointers_of(backend.pointers_to(arrays))
            if pointers is not None:
                place = place_of(pointers)
                written_place = place if outs is leaves else place + len(leaves) * WORD_BYTES
                if self._separation.holds(place, written_place) and (
                    not backend.counts_writes or backend.announce_write(outs)
                ):
                    return pointers
            # Else an array that only its library can read, or one that is refused below.
        # As in a first call, which says what is wrong.
        columns = _columns(leaves, [len(spec.devices) for spec in self._specs])
        self._check_outs(columns, _columns(outs, [len(spec.destinations) for spec in self._specs]))
        return None


def _columns(arrays: tuple[Array, ...], numbers: Sequence[int]) -> list[tuple[Array, ...]]:
    columns, start = [], 0
    for number in numbers:
        columns.append(arrays[start : start + number])
        start += number
    return columns


class KnownCalls:
    """The calls of one runner by their signatures; `hits` counts those that were found again.

    Only dense arrays, bare or in trees, are kept, read as they are. Numbers, variables and sparse rows are
    read in every call; what was prepared for them is kept all the same, by the planner.
    """

    def __init__(self) -> None:
        self._calls: SignatureCache[list[KnownCall]] = SignatureCache()
        self.hits = 0

    def find(
        self, collective: Collective, pairs: Sequence[tuple[Any, Any]], outs: Sequence[Any]
    ) -> tuple[Flattened | None, KnownCall | None]:
        """Looks a call up by its signature.

        Returns None twice for a call that cannot be kept, and its arrays and None for a new one.
        """
        _, op, options, axis, _, _ = collective
        if not (
            isinstance(op, (str, ReduceOp, NoneType))
            and (options is None or isinstance(options, CommunicationOptions))
            and type(axis) is int  # others that are equal to one may have to be refused
        ):
            return None, None
        try:
            flattened = _flattened([collective], pairs, outs)
            if flattened is None:
                return None, None
            alike = self._calls.get(flattened.key, [])
            for position, known in enumerate(alike):
                if known.fits(flattened.arrays):
                    self.hits += 1
                    if position >= MAX_BEFORE:
                        alike[:] = [known, *(other for other in alike if other is not known)]
                    return flattened, known
        # An array of another library among others, an array that is recorded, trees that differ, a tree that
        # contains itself: the call is read, and refused if need be.
        except (AttributeError, RuntimeError, ValueError, TypeError):
            return None, None
        return flattened, None

    def keep(self, flattened: Flattened, call: CheckedCall, planner: Planner) -> None:
        """Keeps what is prepared for a call, unless something of it was not read as it is."""
        arrays = tuple(chain.from_iterable(leaf.arrays for leaf in call.dense))
        outs = tuple(chain.from_iterable(leaf.out or () for leaf in call.dense))
        if not (
            call.is_dense and _are_same(arrays, flattened.leaves) and _are_same(outs, flattened.outs or ())
        ):
            return
        prepared = call.prepared(planner)
        if prepared is not None:
            alike = self._calls.setdefault(flattened.key, [])
            if len(alike) == MAX_ALIKE:
                alike.clear()
            alike.append(KnownCall(prepared, call, flattened))


def _are_same(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


ITSELF = ("the value itself",)
"""The destination of an all-reduce: its devices are in the key already, or follow from its arrays."""


def _flattened(
    key: list[Hashable], pairs: Sequence[tuple[Any, Any]], outs: Sequence[Any]
) -> Flattened | None:
    """The arrays of a call, as they are; None if some value or destination is not of the kinds that are kept.

    The key says everything but what an array looks like: that of the first stands for those of all.
    """
    columns: list[Sequence[Array]] = []
    structures: list[Structure | None] = []
    out_columns: list[Sequence[Array]] = []
    for (value, destinations), out in zip(pairs, outs, strict=True):
        is_distributed = isinstance(value, DistributedValues)
        values = value._values if is_distributed else (value,)  # a bare array is the only replica
        if not values:
            return None  # refused where it is read
        where: Hashable
        if destinations is value:
            where, number = ITSELF, len(values)
        elif type(destinations) is str:
            where, number = destinations, 1
        elif isinstance(destinations, DistributedValues):
            where = destinations.devices
            number = len(where)
        elif isinstance(destinations, Device):
            where, number = destinations, 1
        else:
            return None
        kind = type(values[0])
        if kind is np.ndarray or _is_array_type(kind):
            columns.append(values)
            structures.append(None)
            key += (where, value._given_devices if is_distributed else None, len(values), out is None)
            if out is not None:
                out_columns.append((out,) if number == 1 and type(out) is kind else _components(out, number))
            continue
        first, tree = optree.tree_flatten(values[0])
        if not is_distributed and first and isinstance(first[0], DistributedValues):
            if out is not None:
                return None
            columns += [each._values for each in first]
            structures.append(tuple.__new__(Structure, (tree, True, None)))
            key += (where, tree, *[(each._given_devices, len(each._values)) for each in first])
            continue
        own = [first, *map(tree.flatten_up_to, values[1:])]
        columns += zip(*own, strict=True)
        given = None if out is None else _components(out, number)
        structures.append(tuple.__new__(Structure, (tree, False, given)))
        key += (where, value._given_devices if is_distributed else None, len(values), tree, out is None)
        if given is not None:
            written = list(map(tree.flatten_up_to, given))
            out_columns += zip(*written, strict=True)
    if not columns or not columns[0]:
        return None
    backend = backend_of_type(type(columns[0][0]))
    if backend is None:
        return None
    key.append(backend.signature(columns[0][0]))
    if out_columns and len(out_columns) != len(columns):
        return None  # only some results have memory
    outputs = None
    if out_columns:
        outputs = tuple(out_columns[0]) if len(out_columns) == 1 else tuple(chain.from_iterable(out_columns))
    arrays = tuple(columns[0]) if len(columns) == 1 else tuple(chain.from_iterable(columns))
    # Most tuples that differ do so from the first array on, which is found in less time than all.
    if outputs is not None and arrays[0] is outputs[0] and _are_same(arrays, outputs):
        outputs = arrays
    every = arrays if outputs is None or outputs is arrays else arrays + outputs
    # What Flattened(...) makes, in less than half of the time.
    return tuple.__new__(Flattened, (tuple(key), arrays, structures, outputs, every))


def _is_array_type(kind: type[Any]) -> bool:
    return backend_of_type(kind) is not None and not issubclass(kind, (list, tuple, dict))


def _components(out: Any, number: int) -> Sequence[Any]:
    if isinstance(out, DistributedValues):
        found: Sequence[Any] = out._values
    else:
        found = out if number > 1 and isinstance(out, (list, tuple)) else (out,)
    if len(found) != number:
        raise ValueError
    return found


Look: TypeAlias = "Callable[[tuple[Any, ...]], bool]"


def _look_at(flattened: Flattened) -> Look:
    """Tells whether other arrays have the signatures of these, one by one."""
    _, leaves, _, outs, arrays = flattened
    kinds = {type(array) for array in arrays}
    numpy = backend_named("numpy")
    if selected_kernels() == "numba" and all(backend_of_type(kind) is numpy for kind in kinds):
        first_written = None if outs is None else 0 if outs is leaves else len(leaves)
        return Signature(arrays, first_written=first_written).fits
    backends = [backend_of_type(kind) for kind in kinds]
    if len(backends) == 1 and backends[0] is not None:
        return backends[0].look_at(arrays)
    readers = [backend_of_type(type(array)).signature for array in arrays]  # type: ignore[union-attr]
    known = [read(array) for read, array in zip(readers, arrays, strict=True)]
    return lambda found: [read(array) for read, array in zip(readers, found, strict=True)] == known

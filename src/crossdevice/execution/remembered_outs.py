"""Memory to write to that was checked before: what looks the same fits again, and can only have moved."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from crossdevice.backends.protocol import Array, Backend
from crossdevice.errors import OutError
from crossdevice.execution.reading.leaf_spec import Dense
from crossdevice.execution.reading.outputs import out_components
from crossdevice.execution.reading.overlaps import check_overlaps


def can_recognise(backend: Backend, array: Array) -> bool:
    """Whether outputs beside such an array can be known again: looks must know the layout."""
    return backend.look_of([array], with_layout=True).knows_layout


class FittingArrays(NamedTuple):
    """Arrays that look like those of a call made before."""

    columns: Sequence[Sequence[Array]]
    """Of each leaf its inputs."""
    outs: Sequence[Sequence[Array] | None]
    """Of each leaf its outputs; the column itself where that is reduced in place."""
    apart: Sequence[Array]
    """All inputs, and the outputs that are not among those of their leaf."""


class RememberedOuts:
    """Outputs that passed every check, by all that decided it: how arrays look, which are written, and where.

    That an array is the same object as in another call says nothing: objects and addresses are used again.
    """

    def __init__(self, leaves: Sequence[Dense]) -> None:
        """Of checked leaves of one library that `can_recognise` them, some with outputs."""
        columns, outs = [leaf.arrays for leaf in leaves], [leaf.out for leaf in leaves]
        self._specs = [leaf.spec for leaf in leaves]
        self._replicas = [_replicas_in(out, column) for out, column in zip(outs, columns, strict=True)]
        self._are_in_place = [
            replicas == tuple(range(len(column)))
            for replicas, column in zip(self._replicas, columns, strict=True)
        ]
        self._backend = self._specs[0].backend
        apart = self._apart(columns, outs)
        self.look = self._backend.look_of(apart, with_layout=True)
        self._addresses: list[int] = []
        are_compared = self._apart(
            [[spec.shares_memory] * len(spec.devices) for spec in self._specs],
            [[spec.shares_memory] * len(spec.destinations) for spec in self._specs],
        )
        self._compared = np.flatnonzero(are_compared)
        bounds = [self._backend.address_range(apart[number]) for number in self._compared]
        places = np.array(self._backend.addresses_of(apart), np.int64)[self._compared]
        self._reaches = np.array(bounds, np.int64).reshape(-1, 2).T - places

    def fitting(self, columns: Sequence[Sequence[Array]], outs: Sequence[Any]) -> FittingArrays | None:
        """The arrays of leaves and of each one's `out`; None if all must be checked as in a first call."""
        given: list[Sequence[Array] | None] = []
        for number, (column, out) in enumerate(zip(columns, outs, strict=True)):
            try:
                found = None if out is None else out_components(out, self._specs[number].destinations)
            except OutError:
                return None
            if _replicas_in(found, column) != self._replicas[number]:
                return None
            given.append(column if self._are_in_place[number] else found)
        apart = self._apart(columns, given)
        return FittingArrays(columns, given, apart) if self.look.fits(apart) else None

    def check_memory(self, arrays: FittingArrays) -> None:
        """Refuses outputs that overlap, as in a first call; arrays that have not moved are known not to."""
        addresses = self._backend.addresses_of(arrays.apart)
        if addresses == self._addresses:
            return
        starts, ends = np.array(addresses, np.int64)[self._compared] + self._reaches
        order = np.lexsort((ends, starts))
        if (ends[order[:-1]] > starts[order[1:]]).any():  # inputs among themselves may
            check_overlaps(list(map(Dense, arrays.columns, self._specs, arrays.outs)))
        self._addresses = addresses

    def _apart(
        self, columns: Sequence[Sequence[Array]], outs: Sequence[Sequence[Array] | None]
    ) -> list[Array]:
        apart = list(itertools.chain.from_iterable(columns))
        for out, replicas, is_in_place in zip(outs, self._replicas, self._are_in_place, strict=True):
            if replicas and out is not None and not is_in_place:
                apart += [array for array, replica in zip(out, replicas, strict=True) if replica is None]
        return apart


def _replicas_in(out: Sequence[Array] | None, arrays: Sequence[Array]) -> tuple[int | None, ...]:
    """For each output the replica whose array it is, None for new memory; nothing without outputs."""
    if out is None:
        return ()
    if out is arrays:
        return tuple(range(len(arrays)))
    replicas = {id(array): replica for replica, array in enumerate(arrays)}
    return tuple([replicas.get(id(array)) for array in out])

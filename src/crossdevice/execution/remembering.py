"""Calls that were made before: plain values with known signatures need no reading and no checks."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from types import NoneType
from typing import Any

from crossdevice.backends.protocol import Array, Look
from crossdevice.backends.registry import backend_of_type
from crossdevice.execution.local.prepared import PreparedReduction
from crossdevice.execution.reading.leaf_spec import Dense, LeafSpec
from crossdevice.execution.reading.outputs import check_out, out_components
from crossdevice.execution.reading.overlaps import check_overlaps
from crossdevice.execution.remembered_outs import FittingArrays, RememberedOuts, can_recognise
from crossdevice.values.device import Device
from crossdevice.values.distributed import DistributedValues, Mirrored, PerReplica
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp


class RememberedCall:
    """A prepared reduction of one dense leaf, with all it takes to check `out` and wrap the result."""

    __slots__ = ("_dtype", "_look", "_outs", "_prepared", "_spec")

    def __init__(self, prepared: PreparedReduction, spec: LeafSpec, dtype: str) -> None:
        self._prepared = prepared
        self._spec = spec
        self._dtype = dtype
        self._outs: RememberedOuts | None = None
        self._look: Look | None = None

    def as_recent(
        self, op: Any, value: DistributedValues, destinations: Any, options: Any
    ) -> RecentCall | None:
        """This call, made once more, as the most recent one; None where that would not save time."""
        if self._spec.shared_gpu is None:
            return None
        if self._look is None:
            self._look = self._spec.backend.look_of(value.values)
        if not self._look.knows_layout:
            return None
        return RecentCall(self, op, value, destinations, options, self._look)

    def __call__(self, arrays: Sequence[Array], out: Any, look: Look | None = None) -> Any:
        """Reduces one array per replica, into the arrays of `out` unless it is None."""
        outs: Sequence[Sequence[Array] | None] = (None,)
        if out is not None:
            outs, look = self._checked(arrays, out)
        (results,) = self._prepared.run((arrays,), outs, look)
        return results[0] if len(results) == 1 else Mirrored.of(results, self._spec.destinations)

    def _checked(
        self, arrays: Sequence[Array], out: Any
    ) -> tuple[Sequence[Sequence[Array] | None], Look | None]:
        """The arrays of `out`, and how all look if that is known."""
        known = self._outs
        fitting = None if known is None else known.fitting((arrays,), (out,))
        if known is not None and fitting is not None:
            known.check_memory(fitting)
            return fitting.outs, known.look
        outs = out_components(out, self._spec.destinations)
        check_out(outs, self._spec, self._dtype, "")
        leaf = Dense(arrays, self._spec, outs)
        check_overlaps([leaf])
        self._outs = RememberedOuts([leaf]) if can_recognise(self._spec.backend, arrays[0]) else None
        return (outs,), None


class RecentCall:
    """The last call of a program that makes the same one over and over: known by how its arrays look."""

    __slots__ = ("_call", "_devices", "_look", "_op", "_options", "_where")

    def __init__(
        self,
        call: RememberedCall,
        op: Any,
        value: DistributedValues,
        destinations: Any,
        options: Any,
        look: Look,
    ) -> None:
        """Of a call whose `call_key` is not None, after it was made."""
        self._call, self._op, self._options, self._look = call, op, options, look
        self._devices = value.devices
        self._where = destinations is value or _where(destinations)

    def fits(self, op: Any, value: Any, destinations: Any, options: Any) -> bool:
        """Whether this is the same call, but for the elements."""
        return (
            op is self._op
            and options is self._options
            and isinstance(value, DistributedValues)
            and value.given_devices == self._devices
            and (destinations is value or _where(destinations)) == self._where
            and self._look.fits(value.values)
        )

    def __call__(self, arrays: Sequence[Array], out: Any) -> Any:
        """Reduces one array per replica, into the arrays of `out` unless it is None."""
        return self._call(arrays, out, self._look)


class RememberedBatch:
    """A prepared reduction of a batch of dense leaves, each a value of its own."""

    def __init__(
        self,
        prepared: PreparedReduction,
        leaves: Sequence[Dense],
        pairs: Sequence[tuple[DistributedValues, Any]],
    ) -> None:
        """Of pairs that have been reduced already and are plain; their leaves say which have outputs."""
        specs = [leaf.spec for leaf in leaves]
        self._prepared = prepared
        self._outs = RememberedOuts(leaves) if any(leaf.out is not None for leaf in leaves) else None
        self._look = (
            specs[0].backend.look_of([array for leaf in leaves for array in leaf.arrays])
            if self._outs is None
            else self._outs.look
        )
        self._nothing = [None] * len(pairs)
        self._lengths = [len(spec.devices) for spec in specs]
        self._devices = [spec.devices for spec in specs]
        # Where values are that have not been told; None if those must be told, to be where these are.
        self._untold = [
            spec.devices if PerReplica(value.values).devices == spec.devices else None
            for spec, (value, _) in zip(specs, pairs, strict=True)
        ]
        self._destinations = [spec.destinations for spec in specs]
        self._targets = [target is value or _where(target) for value, target in pairs]

    def fitting(self, pairs: Sequence[tuple[Any, Any]], outs: Sequence[Any]) -> FittingArrays | None:
        """The arrays of each pair and its `out`; None if they are not as they were."""
        try:
            columns = [value.values for value, _ in pairs]
            devices = [
                value.given_devices or untold for (value, _), untold in zip(pairs, self._untold, strict=True)
            ]
        except AttributeError:  # not all of them are distributed values
            return None
        targets = [target is value or _where(target) for value, target in pairs]
        if devices != self._devices or targets != self._targets or [*map(len, columns)] != self._lengths:
            return None
        if self._outs is not None:
            return self._outs.fitting(columns, outs)
        arrays = list(itertools.chain.from_iterable(columns))
        return FittingArrays(columns, self._nothing, arrays) if self._look.fits(arrays) else None

    def __call__(self, arrays: FittingArrays) -> list[Any]:
        """Reduces arrays that fit, unless the memory to write to overlaps."""
        if self._outs is not None:
            self._outs.check_memory(arrays)
        results = self._prepared.run(arrays.columns, arrays.outs, self._look)
        return [
            result[0] if len(result) == 1 else Mirrored.of(result, destinations)
            for result, destinations in zip(results, self._destinations, strict=True)
        ]


def batch_key(
    reduce_op: Any, pairs: Sequence[tuple[Any, Any]], options: Any, outs: Sequence[Any]
) -> Hashable | None:
    """Under which a batch is remembered, one for each key; None for calls not worth remembering."""
    if len(pairs) < 2 or not isinstance(reduce_op, (str, ReduceOp)):
        return None
    if not isinstance(options, (CommunicationOptions, NoneType)):
        return None
    ends = [value.values[0] for value, _ in (pairs[0], pairs[-1]) if _has_components(value)]
    backends = [backend_of_type(type(array)) for array in ends]
    try:
        seen = [None if b is None else b.signature(a) for a, b in zip(ends, backends, strict=True)]
    except (AttributeError, RuntimeError):  # numbers, or arrays without a device
        return None
    if None in seen or len(seen) < 2:
        return None
    written = [None if out is None else out is value for (value, _), out in zip(pairs, outs, strict=True)]
    return (reduce_op, options, *seen, *written)


def is_plain_batch(pairs: Sequence[tuple[Any, Any]], outs: Sequence[Any]) -> bool:
    """Whether all are distributed values, with destinations and outputs that can be known again."""
    if not all(
        isinstance(value, DistributedValues) and (target is value or _where(target) is not None)
        for value, target in pairs
    ):
        return False
    first = pairs[0][0].values[0]
    backend = backend_of_type(type(first))
    return all(out is None for out in outs) or (backend is not None and can_recognise(backend, first))


def _has_components(value: Any) -> bool:
    return isinstance(value, DistributedValues) and bool(value.values)


def _where(destinations: Any) -> Hashable | None:
    """Where results go, in a form that can be compared; None if there is none."""
    if isinstance(destinations, DistributedValues):
        return destinations.devices
    return destinations if isinstance(destinations, (str, Device)) else None


def call_key(reduce_op: Any, value: Any, destinations: Any, options: Any) -> Hashable | None:
    """What two calls must share to be the same but for the elements; None for calls not worth remembering."""
    if not isinstance(value, DistributedValues) or not value.values:
        return None
    if not isinstance(reduce_op, (str, ReduceOp)):
        return None
    if not isinstance(options, (CommunicationOptions, NoneType)):
        return None
    backend = backend_of_type(type(value.values[0]))
    where: Hashable
    if destinations is value:
        where = None
    elif isinstance(destinations, str):
        where = destinations
    elif isinstance(destinations, DistributedValues):
        where = destinations.devices
    else:
        return None
    if backend is None:
        return None
    try:
        return (reduce_op, options, value.given_devices, where, *map(backend.signature, value.values))
    except (AttributeError, RuntimeError):  # not all are arrays of that library
        return None

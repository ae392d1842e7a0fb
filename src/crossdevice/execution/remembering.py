"""Calls that were made before: plain values with known signatures need no reading and no checks."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from types import NoneType
from typing import Any, NamedTuple

from crossdevice.backends.protocol import Array
from crossdevice.backends.registry import backend_of_type
from crossdevice.execution.leaf_spec import Dense, LeafSpec
from crossdevice.execution.outputs import check_out, out_components
from crossdevice.execution.overlaps import check_overlaps
from crossdevice.execution.reduction import PreparedReduction
from crossdevice.values.device import Device
from crossdevice.values.distributed import DistributedValues, Mirrored, PerReplica
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp


class RememberedCall:
    """A prepared reduction of one dense leaf, with all it takes to check `out` and wrap the result."""

    __slots__ = ("_dtype", "_prepared", "_seen", "_spec")

    def __init__(self, prepared: PreparedReduction, spec: LeafSpec, dtype: str) -> None:
        self._prepared = prepared
        self._spec = spec
        self._dtype = dtype
        self._seen: tuple[Any, ...] = ()

    def __call__(self, arrays: Sequence[Array], out: Any) -> Any:
        """Reduces one array per replica, into the arrays of `out` unless it is None."""
        outs = None if out is None else self._checked(arrays, out)
        (results,) = self._prepared.run((arrays,), (outs,))
        return results[0] if len(results) == 1 else Mirrored.of(results, self._spec.destinations)

    def _checked(self, arrays: Sequence[Array], out: Any) -> Sequence[Array]:
        """The arrays of `out`; what looks and lies as it did in the last call needs no second look."""
        outs = out_components(out, self._spec.destinations)
        backend = self._spec.backend
        try:
            seen = tuple((backend.signature(a), backend.address_range(a)) for a in (*arrays, *outs))
        except (AttributeError, RuntimeError):  # not all are arrays of that library, on the host
            seen = ()
        if not seen or seen != self._seen:
            check_out(outs, self._spec, self._dtype, "")
            check_overlaps([Dense(arrays, self._spec, outs)])
            self._seen = seen
        return outs


class _Pair(NamedTuple):
    """What a pair of a batch must have to be the one that was there before."""

    devices: tuple[Device, ...]
    needs_devices: bool
    """Whether the value must be told them: by itself it would be on others."""
    destinations: tuple[Device, ...]
    where: Hashable | None
    """What the destinations were; None for the value itself."""


class RememberedBatch:
    """A prepared reduction of a batch of dense leaves, each a value of its own, into new memory."""

    def __init__(
        self,
        prepared: PreparedReduction,
        specs: Sequence[LeafSpec],
        pairs: Sequence[tuple[DistributedValues, Any]],
    ) -> None:
        """Of pairs that have been reduced already, whose `batch_key` is not None."""
        self._prepared = prepared
        self._look = specs[0].backend.look_of([array for value, _ in pairs for array in value.values])
        self._nothing = [None] * len(pairs)
        self._pairs = [
            _Pair(
                spec.devices,
                PerReplica(value.values).devices != spec.devices,
                spec.destinations,
                _where(value, destinations),
            )
            for spec, (value, destinations) in zip(specs, pairs, strict=True)
        ]

    def columns_of(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Array, ...]] | None:
        """The arrays of each pair; None if they are not as they were."""
        columns = []
        for (value, destinations), known in zip(pairs, self._pairs, strict=True):
            if not isinstance(value, DistributedValues) or len(value.values) != len(known.devices):
                return None
            given = value.given_devices
            if given is None:
                if known.needs_devices:
                    return None
            elif given is not known.devices and given != known.devices:
                return None
            if (
                (destinations is not value)
                if known.where is None
                else _where(value, destinations) != known.where
            ):
                return None
            columns.append(value.values)
        return columns if self._look.fits([*itertools.chain.from_iterable(columns)]) else None

    def __call__(self, columns: Sequence[tuple[Array, ...]]) -> list[Any]:
        """Reduces arrays that `columns_of` has looked at."""
        results = self._prepared.run(columns, self._nothing, self._look)
        return [
            result[0] if len(result) == 1 else Mirrored.of(result, pair.destinations)
            for result, pair in zip(results, self._pairs, strict=True)
        ]


def batch_key(reduce_op: Any, pairs: Sequence[tuple[Any, Any]], options: Any) -> Hashable | None:
    """Under which a batch is remembered; None for one that is not worth it, or cannot be."""
    if len(pairs) < 2 or not isinstance(reduce_op, (str, ReduceOp)):
        return None
    if not isinstance(options, (CommunicationOptions, NoneType)):
        return None
    return reduce_op, options, len(pairs)


def is_plain_batch(pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Whether all are distributed values with destinations that can be compared."""
    return all(
        isinstance(value, DistributedValues) and (target is value or _where(value, target) is not None)
        for value, target in pairs
    )


def _where(value: Any, destinations: Any) -> Hashable | None:
    """What says where results go, in a form that can be compared; None for the value itself, and others."""
    if destinations is value:
        return None
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

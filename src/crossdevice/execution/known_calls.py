"""Calls that were made before: values with known signatures need no reading and no checks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from types import NoneType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.numpy_backend import NumpyBackend
from crossdevice.backends.protocol import Array
from crossdevice.backends.registry import backend_of_type
from crossdevice.execution.local.batch import CheckedBatch
from crossdevice.execution.local.prepared import PreparedReduction
from crossdevice.execution.processes.dense_call import DenseCall
from crossdevice.execution.reading.leaf_spec import Columns, Dense
from crossdevice.execution.reading.outputs import check_outs, out_components
from crossdevice.execution.signature_cache import SignatureCache
from crossdevice.kernels.host.fixed_arrays import compiled_are_alike
from crossdevice.kernels.host.work_list import TUPLE_HEADER_BYTES
from crossdevice.values.device import Device
from crossdevice.values.distributed import DistributedValues, Mirrored
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights

Prepared: TypeAlias = PreparedReduction | DenseCall
"""Reduces dense arrays of the signatures it was made for."""


class KnownCall:
    """A prepared batch of plain values: everything but the arrays."""

    __slots__ = ("_are_flat", "_prepared", "_result_dtypes", "_specs")

    def __init__(self, prepared: Prepared, leaves: Sequence[Dense], dtypes: Sequence[str]) -> None:
        self._prepared, self._result_dtypes = prepared, dtypes
        self._specs = [leaf.spec for leaf in leaves]
        self._are_flat = all(leaf.spec.backend.are_flat(leaf.arrays) for leaf in leaves)

    def run(self, columns: Columns, outs: Sequence[Any], weights: Weights | None = None) -> list[Any]:
        """Reduces arrays that have the signatures of those before; `outs` are checked as in a first call."""
        if len(outs) == 1 and type(outs[0]) is np.ndarray and _is_apart(outs[0], columns[0]):
            outs = [outs]  # one leaf with one destination: the list is its `out`
        else:
            for out in outs:
                if out is not None:
                    outs = self._checked(columns, outs)
                    break
        results = self._prepared.run(columns, outs, weights, are_flat=self._are_flat)
        if len(results) == 1 == len(results[0]):  # before a comprehension, which is a call
            return [*results[0]]
        return [
            result[0] if len(result) == 1 else Mirrored.of(result, spec.destinations)
            for result, spec in zip(results, self._specs, strict=True)
        ]

    def _checked(self, columns: Columns, outs: Sequence[Any]) -> list[Sequence[Array] | None]:
        written = [
            None if out is None else out_components(out, spec.destinations)
            for out, spec in zip(outs, self._specs, strict=True)
        ]
        check_outs(list(map(Dense, columns, self._specs, written)), self._result_dtypes)
        return written


def _is_apart(out: NDArray[Any], arrays: Sequence[Array]) -> bool:
    """Whether an ndarray of known signature can be the `out` of a lone replica."""
    return (
        len(arrays) == 1
        and out.flags.writeable
        and (out is arrays[0] or not np.may_share_memory(out, arrays[0]))
    )


Found: TypeAlias = "tuple[Hashable | None, KnownCall | None, Columns]"
"""The key of a call (None: it is not kept), the known call (None: there is none), and its arrays."""

NOT_KEPT: Found = (None, None, ())

ITSELF = ("the value itself",)
"""The destination of an all-reduce: its devices are in the key already, or follow from its arrays."""


class KnownCalls:
    """The calls of one algorithm by their signatures; `hits` counts those that were found again.

    Only plain values are kept: dense arrays, read as they are. Numbers, variables, nested structures and
    sparse rows are read in every call; what was prepared for them is kept all the same, by the planner.
    """

    def __init__(self, *, keeps: bool) -> None:
        """`keeps` is False for algorithms whose calls cannot be repeated: those with hooks of their own."""
        self._keeps = keeps
        self._calls: SignatureCache[KnownCall] = SignatureCache()
        self.hits = 0

    def find(
        self,
        op: Any,
        pairs: Sequence[tuple[Any, Any]],
        options: Any,
        outs: Sequence[Any] = (),
        num_weights: int | None = None,
    ) -> Found:
        """Looks a call up by its signature; the values of its weights do not matter."""
        if not (
            self._keeps
            and isinstance(op, (str, ReduceOp))
            and isinstance(options, (CommunicationOptions, NoneType))
        ):
            return NOT_KEPT
        columns: list[Sequence[Array]] = []
        key: list[Hashable] = [op, options, num_weights]
        for value, destinations in pairs:
            if type(value) is np.ndarray and type(destinations) is str:
                columns.append((value,))
                key += (destinations, None, 1, NumpyBackend.signature(value))
                continue
            is_distributed = isinstance(value, DistributedValues)
            values = value.values if is_distributed else (value,)  # a bare array is the only replica
            kind = type(values[0]) if values else NoneType
            backend = backend_of_type(kind)
            where = ITSELF if destinations is value else _where(destinations)
            if where is None or backend is None:
                return NOT_KEPT
            columns.append(values)
            key += (where, value.given_devices if is_distributed else None, len(values))
            if kind is np.ndarray and self._are_alike(id(values) + TUPLE_HEADER_BYTES, len(values)):
                key.append(backend.signature(values[0]))
                continue
            try:
                key += map(backend.signature, values)
            except (AttributeError, RuntimeError):  # not all are arrays of that library
                return NOT_KEPT
        # Memory of another dtype makes it another call; an ndarray that was not seen before is checked.
        for out in outs:
            if out is not None:
                key.append(NumpyBackend.signature(out) if type(out) is np.ndarray else _dtype_of(out))
        signature = tuple(key)
        known = self._calls.get(signature)
        if known is not None:
            self.hits += 1
        return signature, known, columns

    @functools.cached_property
    def _are_alike(self) -> Callable[[int, int], bool]:
        return compiled_are_alike() or (lambda _place, _number: False)

    def keep(self, key: Hashable, batch: CheckedBatch, prepared: Prepared) -> None:
        """Keeps what was prepared for a batch of plain values."""
        self._calls[key] = KnownCall(prepared, batch.dense, batch.result_dtypes)


def _dtype_of(out: Any) -> Any:
    if isinstance(out, DistributedValues):
        out = out.values
    if isinstance(out, (list, tuple)) and out:
        out = out[0]
    return getattr(out, "dtype", None)


def _where(destinations: Any) -> Hashable | None:
    """The destinations in a form that can be compared; None for all that calls are not kept for."""
    if isinstance(destinations, DistributedValues):
        return destinations.devices
    return destinations if isinstance(destinations, (str, Device)) else None

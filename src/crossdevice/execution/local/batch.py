"""A batch of reductions: everything is checked, then everything is run, then results are wrapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from crossdevice.backends.protocol import Array, Backend
from crossdevice.errors import OutError
from crossdevice.execution.local.accumulation import accumulate
from crossdevice.execution.local.prepared import PreparedReduction
from crossdevice.execution.local.sparse import SparseReduction, check_sparse, densified
from crossdevice.execution.reading.leaf_spec import Dense, LeafSpec
from crossdevice.execution.reading.outputs import check_out, read_out, wrapped
from crossdevice.execution.reading.overlaps import check_overlaps
from crossdevice.execution.reading.values import Leaf, Value, backend_of, check_dense
from crossdevice.execution.signature_cache import SignatureCache
from crossdevice.execution.tracing import READING, Work, flight_recorder, now, recorded
from crossdevice.values.device import Device
from crossdevice.values.dtypes import check_reducible, result_dtype
from crossdevice.values.indexed_slices import IndexedSlices
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp


class Request(NamedTuple):
    """One value to be reduced to some devices, into `out` unless that is None."""

    value: Value
    destinations: tuple[Device, ...]
    out: Any = None


class Algorithm(Protocol):
    """What a batch asks of the algorithm that runs it."""

    reduce_to_device: Device | None
    accumulation_fn: Callable[[tuple[Any, ...]], Any] | None

    def prepared(
        self, specs: tuple[LeafSpec, ...], op: ReduceOp, options: CommunicationOptions
    ) -> PreparedReduction:
        """The prepared reduction of a batch, kept from one call to the next."""


def check_batch(
    requests: Sequence[Request], op: ReduceOp, options: CommunicationOptions
) -> list[list[Dense | SparseReduction]]:
    """The leaves of each request after every check, also of the memory they are to be written to."""
    checked = [checked_leaves(request, op, options) for request in requests]
    written = [leaf for leaves in checked for leaf in leaves if isinstance(leaf, Dense)]
    if any(leaf.out is not None for leaf in written):
        check_overlaps(written)
    return checked


def reduce_batch(
    requests: Sequence[Request], op: ReduceOp, options: CommunicationOptions, algorithm: Algorithm
) -> list[Any]:
    """The wrapped result of each request."""
    started = now()
    checked = check_batch(requests, op, options)
    flight_recorder.events.append((READING, started, now(), 1))
    if algorithm.reduce_to_device is not None:
        for backend in {_backend_of(leaf) for leaves in checked for leaf in leaves}:
            backend.check_device(algorithm.reduce_to_device)
    dense = [leaf for leaves in checked for leaf in leaves if isinstance(leaf, Dense)]
    reduced = iter(reduce_dense(dense, op, options, algorithm))
    answers = []
    for request, leaves in zip(requests, checked, strict=True):
        at = algorithm.reduce_to_device or request.destinations[0]
        results = [
            leaf.run(at, request.destinations) if isinstance(leaf, SparseReduction) else next(reduced)
            for leaf in leaves
        ]
        answers.append(wrapped(results, request.value.structure, request.destinations))
    return answers


def checked_leaves(
    request: Request, op: ReduceOp, options: CommunicationOptions
) -> list[Dense | SparseReduction]:
    """A request's leaves after every check; nothing has been computed."""
    value, destinations, out = request
    outs: Sequence[Any] = [None] * len(value.leaves) if out is None else read_out(out, value, destinations)
    return [
        _checked(leaf, value.devices, destinations, o, op, options)
        for leaf, o in zip(value.leaves, outs, strict=True)
    ]


def _checked(
    leaf: Leaf,
    devices: tuple[Device, ...],
    destinations: tuple[Device, ...],
    out: Sequence[Array] | None,
    op: ReduceOp,
    options: CommunicationOptions,
) -> Dense | SparseReduction:
    if leaf.is_sparse:
        if all(isinstance(array, IndexedSlices) for array in leaf.arrays):
            if out is not None:
                raise OutError(
                    f"out cannot hold IndexedSlices{leaf.at_path}: their number of rows is not known"
                )
            sparse = check_sparse(leaf, devices, op, options.precision)
            for device in destinations:
                sparse.backend.check_device(device)
            return sparse
        leaf = densified(leaf, devices)
    spec = _spec_of(leaf, devices, destinations, op)
    if out is not None:
        check_out(out, spec, result_dtype(spec.dtype, op), leaf.path)
    return Dense(leaf.arrays, spec, out)


def _backend_of(leaf: Dense | SparseReduction) -> Backend:
    return leaf.spec.backend if isinstance(leaf, Dense) else leaf.backend


def _spec_of(
    leaf: Leaf, devices: tuple[Device, ...], destinations: tuple[Device, ...], op: ReduceOp
) -> LeafSpec:
    """The leaf's spec; leaves whose arrays have known signatures have been checked before."""
    backend = backend_of(leaf.arrays[0], 0, leaf.path)
    try:
        key = (op, devices, destinations, *map(backend.signature, leaf.arrays))
    except (AttributeError, RuntimeError):  # an array of another library, or one without a shape
        return _checked_spec(leaf, devices, destinations, op)
    known = _known_specs.get(key)
    if known is None:
        known = _checked_spec(leaf, devices, destinations, op)
        _known_specs[key] = known
    return known


_known_specs: SignatureCache[LeafSpec] = SignatureCache(most=1 << 14)


def _checked_spec(
    leaf: Leaf, devices: tuple[Device, ...], destinations: tuple[Device, ...], op: ReduceOp
) -> LeafSpec:
    backend = check_dense(leaf, devices)
    dtype = backend.dtype_of(leaf.arrays[0])
    check_reducible(dtype, op, f"replica 0 ({devices[0]}){leaf.at_path}")
    for device in destinations:
        backend.check_device(device)
    return LeafSpec(backend, dtype, backend.shape_of(leaf.arrays[0]), devices, destinations)


def reduce_dense(
    dense: Sequence[Dense], op: ReduceOp, options: CommunicationOptions, algorithm: Algorithm
) -> list[tuple[Array, ...]]:
    """For each checked leaf its result on each destination."""
    if not dense:
        return []
    function = algorithm.accumulation_fn
    if function is None:
        prepared = algorithm.prepared(tuple(leaf.spec for leaf in dense), op, options)
        return prepared.run([leaf.arrays for leaf in dense], [leaf.out for leaf in dense])
    results = []
    for arrays, spec, out in dense:
        at = algorithm.reduce_to_device or spec.destinations[0]
        devices = (*spec.devices, at, *spec.destinations)
        with recorded(Work("reduce", f"accumulation_fn {op.name}", devices, spec.num_bytes)):
            answers = accumulate(function, arrays, spec, op, options.precision, at)
        if out is not None:
            check_out(answers, spec, spec.backend.dtype_of(out[0]), "accumulation_fn's result")
            for target, answer in zip(out, answers, strict=True):
                spec.backend.write(target, answer)
        results.append(answers if out is None else tuple(out))
    return results

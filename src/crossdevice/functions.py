"""Functions for people who want no classes: plain lists in, plain lists out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.errors import ConversionError, DestinationError
from crossdevice.execution.bound import BoundReduction
from crossdevice.execution.local.sparse import to_dense as _to_dense
from crossdevice.values.distributed import DistributedValues, PerReplica, components_of, destinations_on
from crossdevice.values.indexed_slices import IndexedSlices
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp

DEFAULT_ALGORITHM = "direct"
"""On shared memory all algorithms become the same fused pass; elsewhere this one never sends partial sums."""


def all_reduce(
    values: Sequence[Any] | DistributedValues,
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    algorithm: str | CrossDeviceOps = DEFAULT_ALGORITHM,
    options: CommunicationOptions | None = None,
    out: Any = None,
    weights: Any = None,
) -> list[Any]:
    """Combines one array or tree per replica; every replica gets the result, in its own memory.

    `weights` has a number for each replica, by which it is multiplied; a mean is divided by their sum.

    >>> [float(total) for total in all_reduce([1.0, 2.0, 6.0], "mean")]
    [3.0, 3.0, 3.0]
    """
    value = _per_replica(values)
    result = _ops(algorithm).reduce(
        op, value, value, options, out=_only(out, len(value.values)), weights=weights
    )
    return _listed(result)


def reduce(
    values: Sequence[Any] | DistributedValues,
    op: ReduceOp | str = ReduceOp.SUM,
    destinations: Any = "cpu:0",
    *,
    algorithm: str | CrossDeviceOps = DEFAULT_ALGORITHM,
    options: CommunicationOptions | None = None,
    out: Any = None,
    weights: Any = None,
) -> Any:
    """Combines one array or tree per replica; the result goes to a device, or to a list of devices.

    `weights` has a number for each replica, by which it is multiplied: any real numbers for a sum; none that
    is negative for a mean, which is divided by their sum.

    >>> float(reduce([1.0, 2.0], "max"))
    2.0
    >>> float(reduce([1.0, 5.0], "mean", weights=[3, 1])), float(reduce([1.0, 5.0], "sum", weights=[2, -0.5]))
    (2.0, -0.5)
    """
    value = _per_replica(values)
    if isinstance(destinations, (list, tuple)):
        out = _only(out, len(destinations))
    result = _ops(algorithm).reduce(op, value, _placed(destinations), options, out=out, weights=weights)
    return _unwrapped(result, destinations)


def bind(
    values: Sequence[Any] | DistributedValues,
    op: ReduceOp | str = ReduceOp.SUM,
    destinations: Any = None,
    *,
    algorithm: str | CrossDeviceOps = DEFAULT_ALGORITHM,
    options: CommunicationOptions | None = None,
    out: Any = None,
    weights: Any = None,
) -> BoundReduction:
    """Prepares a reduction of these arrays, to be run many times; see `BoundReduction`.

    It returns what `all_reduce` returns, or what `reduce` returns if `destinations` are given.

    >>> import numpy as np
    >>> arrays = [np.float32([1, 2]), np.float32([3, 4])]
    >>> total = bind(arrays, "sum", "cpu:0")
    >>> arrays[0][:] = 5
    >>> total()
    array([8., 9.], dtype=float32)
    """
    value = _per_replica(values)
    is_listed = destinations is None or isinstance(destinations, (list, tuple))
    if is_listed:
        out = _only(out, len(value.values if destinations is None else destinations))
    target = value if destinations is None else _placed(destinations)
    bound = _ops(algorithm).bind(op, value, target, options, out=out, weights=weights)
    return bound.with_results(lambda result: _unwrapped(result, [])) if is_listed else bound


def broadcast(value: Any, destinations: Any) -> Any:
    """Copies a value to a device, or to each of a list of devices.

    >>> [float(copy) for copy in broadcast(2.0, ["cpu:0", "cpu:1"])]
    [2.0, 2.0]
    """
    return _unwrapped(_ops(DEFAULT_ALGORITHM).broadcast(value, _placed(destinations)), destinations)


def gather(values: Sequence[Any] | DistributedValues, destinations: Any = "cpu:0", axis: int = 0) -> Any:
    """Concatenates one array or tree per replica along `axis`, on a device or a list of devices.

    >>> gather([[1, 2], [3]])
    array([1, 2, 3], dtype=int32)
    """
    result = _ops(DEFAULT_ALGORITHM).gather(_per_replica(values), _placed(destinations), axis)
    return _unwrapped(result, destinations)


def reduce_scatter(
    values: Sequence[Any] | DistributedValues,
    op: ReduceOp | str = ReduceOp.SUM,
    *,
    axis: int = 0,
    sizes: Sequence[int] | None = None,
    algorithm: str | CrossDeviceOps = DEFAULT_ALGORITHM,
    options: CommunicationOptions | None = None,
    out: Any = None,
    weights: Any = None,
) -> list[Any]:
    """Combines one array or tree per replica; each replica gets its own part of the result along `axis`.

    Parts are as equal as possible, the longer ones first, unless `sizes` has their lengths. `weights` has a
    number for each replica, as in `reduce`.

    >>> reduce_scatter([[1, 2, 3], [10, 20, 30]])
    [array([11, 22], dtype=int32), array([33], dtype=int32)]
    """
    value = _per_replica(values)
    out = _only(out, len(value.values))
    ops = _ops(algorithm)
    return _listed(ops.reduce_scatter(op, value, axis, options, sizes=sizes, out=out, weights=weights))


def all_gather(values: Sequence[Any] | DistributedValues, *, axis: int = 0, out: Any = None) -> list[Any]:
    """Concatenates one array or tree per replica along `axis`; every replica gets all, in its own memory.

    >>> all_gather([[1, 2], [3]])
    [array([1, 2, 3], dtype=int32), array([1, 2, 3], dtype=int32)]
    """
    value = _per_replica(values)
    return _listed(_ops(DEFAULT_ALGORITHM).all_gather(value, axis, out=_only(out, len(value.values))))


def all_to_all(
    values: Sequence[Any] | DistributedValues,
    *,
    axis: int = 0,
    sizes: Sequence[int] | Sequence[Sequence[int]] | None = None,
    out: Any = None,
) -> list[Any]:
    """Cuts each replica's array or tree along `axis` into a part for each replica, which gets these in order.

    Parts are as equal as possible, the longer ones first, unless `sizes` has their lengths: one list for all
    replicas, or one for each.

    >>> all_to_all([[1, 2], [3, 4]])
    [array([1, 3], dtype=int32), array([2, 4], dtype=int32)]
    """
    value = _per_replica(values)
    out = _only(out, len(value.values))
    return _listed(_ops(DEFAULT_ALGORITHM).all_to_all(value, axis, sizes=sizes, out=out))


def to_dense(slices: IndexedSlices) -> Any:
    """Converts IndexedSlices to a dense array; rows with the same index are added.

    >>> import numpy as np
    >>> to_dense(IndexedSlices(np.float32([1, 2, 3]), np.array([0, 2, 2]), dense_shape=(4,)))
    array([1., 0., 5., 0.], dtype=float32)
    """
    return _to_dense(slices)


def _ops(algorithm: str | CrossDeviceOps) -> CrossDeviceOps:
    if isinstance(algorithm, CrossDeviceOps):
        return algorithm
    return _made(algorithm)


@functools.cache  # known calls and plans are kept by the object, so calls have to share it
def _made(algorithm: str) -> CrossDeviceOps:
    made: CrossDeviceOps = ALGORITHMS.load(algorithm)()
    return made


def _per_replica(values: Any) -> DistributedValues:
    if isinstance(values, DistributedValues):
        return values
    if not isinstance(values, (list, tuple)):
        raise ConversionError(
            f"values is a {type(values).__name__}; expected a list with one value per replica"
        )
    return PerReplica(values)


def _placed(destinations: Any) -> Any:
    """A list of devices as something that has them."""
    if not isinstance(destinations, (list, tuple)):
        return destinations
    if not destinations:
        raise DestinationError("destinations is an empty list; expected at least one device")
    return destinations_on(destinations)


def _only(out: Any, num_results: int) -> Any:
    """The one array of a list of one; anything else as it is."""
    return out[0] if num_results == 1 and isinstance(out, (list, tuple)) and len(out) == 1 else out


def _unwrapped(result: Any, destinations: Any) -> Any:
    return _listed(result) if isinstance(destinations, (list, tuple)) else result


def _listed(result: Any) -> list[Any]:
    return list(components_of(result))

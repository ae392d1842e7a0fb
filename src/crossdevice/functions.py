"""Functional API on plain lists."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.errors import ConversionError, DestinationError
from crossdevice.execution.bound import BoundCall
from crossdevice.execution.local.sparse import to_dense as _to_dense
from crossdevice.values.distributed import (
    DistributedValues,
    IndexedSlices,
    PerReplica,
    components_of,
    destinations_on,
)
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.quantities import kind_text
from crossdevice.values.reduce_op import ReduceOp

DEFAULT_ALGORITHM = "direct"
"""Default algorithm: the fused pass on shared memory; elsewhere it never sends partial sums."""


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

    Args:
        values: one array or tree of arrays per replica, in a list or as a DistributedValues.
        op: `"sum"`, `"mean"`, `"min"`, `"max"`, `"prod"`, `"median"`, a `ReduceOp` or a `trimmed_mean`.
        algorithm: the name of an algorithm (`"direct"`, `"ring"`, ...), or an object of its class.
        options: precision, deadline, packing and more; None takes the defaults of `CommunicationOptions`.
        out: arrays for the results instead of new ones, one per replica; pass `values` itself to reduce in
            place.
        weights: a number for each replica, by which it is multiplied; a mean is divided by their sum.

    Returns:
        A list with the result of each replica. All have the same bits.

    Raises:
        MismatchError: replicas differ in shape, dtype, structure, device or library; the message names the
            odd one out.
        DtypeError: the operation is not defined for this dtype.
        ReduceOpError: the operation is unknown.
        OptionError: an option, a weight or a size is outside its range; or the algorithm is unknown.
        ConversionError: something cannot be read as an array.
        OutError: `out` does not fit the results.

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

    Args:
        values: one array or tree of arrays per replica, in a list or as a DistributedValues.
        op: `"sum"`, `"mean"`, `"min"`, `"max"`, `"prod"`, `"median"`, a `ReduceOp` or a `trimmed_mean`.
        destinations: a device (`"cpu:0"`), or a list of devices.
        algorithm: the name of an algorithm (`"direct"`, `"ring"`, ...), or an object of its class.
        options: precision, deadline, packing and more; None takes the defaults of `CommunicationOptions`.
        out: an array for the result instead of a new one; for a list of destinations, a list of arrays.
        weights: a number for each replica, by which it is multiplied: any real numbers for a sum; for a
            mean, which is divided by their sum, none that is negative.

    Returns:
        The result on one device; for a list of destinations, a list of results.

    Raises:
        MismatchError: replicas differ in shape, dtype, structure, device or library; the message names the
            odd one out.
        DtypeError: the operation is not defined for this dtype.
        ReduceOpError: the operation is unknown.
        OptionError: an option, a weight or a size is outside its range; or the algorithm is unknown.
        ConversionError: something cannot be read as an array.
        DeviceError: a device name cannot be read, or there is no such device.
        OutError: `out` does not fit the results.

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
) -> BoundCall:
    """Prepares a reduction of these arrays, to be run many times; see `BoundCall`.

    Args:
        values: one array or tree of arrays per replica, in a list or as a DistributedValues.
        op: `"sum"`, `"mean"`, `"min"`, `"max"`, `"prod"`, `"median"`, a `ReduceOp` or a `trimmed_mean`.
        destinations: a device or a list of devices, as in `reduce`; None gives every replica the result, as
            in `all_reduce`.
        algorithm: the name of an algorithm (`"direct"`, `"ring"`, ...), or an object of its class.
        options: precision, deadline, packing and more; None takes the defaults of `CommunicationOptions`.
        out: arrays for the results. Without them the bound reduction owns its results and overwrites them
            in each call.
        weights: a number for each replica, by which it is multiplied.

    Returns:
        A `BoundCall`. Calling it returns what `all_reduce` would, or `reduce` if `destinations` are
        given.

    Raises:
        MismatchError: replicas differ in shape, dtype, structure, device or library; the message names the
            odd one out.
        DtypeError: the operation is not defined for this dtype.
        ReduceOpError: the operation is unknown.
        OptionError: an option, a weight or a size is outside its range; or the algorithm is unknown.
        ConversionError: something cannot be read as an array.
        DeviceError: a device name cannot be read, or there is no such device.
        OutError: `out` does not fit the results.

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

    Args:
        value: an array or a tree of arrays.
        destinations: a device (`"cpu:0"`), or a list of devices.

    Returns:
        The copy on one device; for a list of destinations, a list of copies.

    Raises:
        ConversionError: something cannot be read as an array.
        DeviceError: a device name cannot be read, or there is no such device.
        DestinationError: `destinations` names no device.

    >>> [float(copy) for copy in broadcast(2.0, ["cpu:0", "cpu:1"])]
    [2.0, 2.0]
    """
    return _unwrapped(_ops(DEFAULT_ALGORITHM).broadcast(value, _placed(destinations)), destinations)


def gather(values: Sequence[Any] | DistributedValues, destinations: Any = "cpu:0", axis: int = 0) -> Any:
    """Concatenates one array or tree per replica along `axis`, on a device or a list of devices.

    Args:
        values: one array or tree of arrays per replica, in a list or as a DistributedValues.
        destinations: a device (`"cpu:0"`), or a list of devices.
        axis: the axis along which arrays are concatenated. Sizes along it may differ.

    Returns:
        The whole array on one device; for a list of destinations, a list of them.

    Raises:
        MismatchError: replicas differ in shape, dtype, structure, device or library; the message names the
            odd one out.
        ConversionError: something cannot be read as an array.
        DeviceError: a device name cannot be read, or there is no such device.
        DestinationError: `destinations` names no device.

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
    """Combines one array or tree per replica; each replica gets its own slice of the result along `axis`.

    Args:
        values: one array or tree of arrays per replica, in a list or as a DistributedValues.
        op: `"sum"`, `"mean"`, `"min"`, `"max"`, `"prod"`, `"median"`, a `ReduceOp` or a `trimmed_mean`.
        axis: the axis along which the result is split.
        sizes: the length of each replica's slice. Without it slices are as equal as possible, the longer
            ones first.
        algorithm: the name of an algorithm (`"direct"`, `"ring"`, ...), or an object of its class.
        options: precision, deadline, packing and more; None takes the defaults of `CommunicationOptions`.
        out: an array for each replica's slice instead of new ones.
        weights: a number for each replica, as in `reduce`.

    Returns:
        A list with each replica's slice.

    Raises:
        MismatchError: replicas differ in shape, dtype, structure, device or library; the message names the
            odd one out.
        DtypeError: the operation is not defined for this dtype.
        ReduceOpError: the operation is unknown.
        OptionError: an option, a weight or a size is outside its range; or the algorithm is unknown.
        ConversionError: something cannot be read as an array.
        OutError: `out` does not fit the results.

    >>> reduce_scatter([[1, 2, 3], [10, 20, 30]])
    [array([11, 22], dtype=int32), array([33], dtype=int32)]
    """
    value = _per_replica(values)
    out = _only(out, len(value.values))
    ops = _ops(algorithm)
    return _listed(ops.reduce_scatter(op, value, axis, options, sizes=sizes, out=out, weights=weights))


def all_gather(values: Sequence[Any] | DistributedValues, *, axis: int = 0, out: Any = None) -> list[Any]:
    """Concatenates one array or tree per replica along `axis`; every replica gets all, in its own memory.

    Args:
        values: one array or tree of arrays per replica, in a list or as a DistributedValues.
        axis: the axis along which arrays are concatenated. Sizes along it may differ.
        out: an array for each replica's result instead of new ones.

    Returns:
        A list with the whole array of each replica.

    Raises:
        MismatchError: replicas differ in shape, dtype, structure, device or library; the message names the
            odd one out.
        ConversionError: something cannot be read as an array.
        OutError: `out` does not fit the results.

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
    """Splits each replica's array along `axis`; part `i` goes to replica `i`.

    Args:
        values: one array or tree of arrays per replica, in a list or as a DistributedValues.
        axis: the axis along which arrays are split, and parts joined in the order of the replicas they come
            from.
        sizes: lengths of the parts: one list for all replicas, or one for each. Without it parts are as
            equal as possible, the longer ones first.
        out: an array for each replica's result instead of new ones.

    Returns:
        A list with what each replica received.

    Raises:
        MismatchError: replicas differ in shape, dtype, structure, device or library; the message names the
            odd one out.
        OptionError: an option, a weight or a size is outside its range; or the algorithm is unknown.
        ConversionError: something cannot be read as an array.
        OutError: `out` does not fit the results.

    >>> all_to_all([[1, 2], [3, 4]])
    [array([1, 3], dtype=int32), array([2, 4], dtype=int32)]
    """
    value = _per_replica(values)
    out = _only(out, len(value.values))
    return _listed(_ops(DEFAULT_ALGORITHM).all_to_all(value, axis, sizes=sizes, out=out))


def to_dense(slices: IndexedSlices) -> Any:
    """Converts IndexedSlices to a dense array; rows with the same index are added.

    Args:
        slices: the rows, and the shape of the whole array in `dense_shape`.

    Returns:
        A dense array of the same library and device; rows that do not occur are zero.

    Raises:
        ConversionError: these are not IndexedSlices, or have no `dense_shape`.
        MismatchError: an index is outside of `dense_shape`.

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
        raise ConversionError(f"values is {kind_text(values)}; expected a list with one value per replica")
    return PerReplica(values)


def _placed(destinations: Any) -> Any:
    """Wraps a list of devices as a destination."""
    if not isinstance(destinations, (list, tuple)):
        return destinations
    if not destinations:
        raise DestinationError("destinations is an empty list; expected at least one device")
    return destinations_on(destinations)


def _only(out: Any, num_results: int) -> Any:
    """Returns the one array of a list of one; anything else unchanged."""
    return out[0] if num_results == 1 and isinstance(out, (list, tuple)) and len(out) == 1 else out


def _unwrapped(result: Any, destinations: Any) -> Any:
    return _listed(result) if isinstance(destinations, (list, tuple)) else result


def _listed(result: Any) -> list[Any]:
    return list(components_of(result))

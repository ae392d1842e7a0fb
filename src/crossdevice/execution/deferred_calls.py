"""The calls of an algorithm that are not made at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from functools import partial
from typing import Any, Generic, TypeVar

from crossdevice.errors import OptionError
from crossdevice.execution.collective import Call, Collective, hashable_sizes, one_value, value_of_replicas
from crossdevice.execution.reading.structures import checked_outs, checked_pairs
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp

Deferred = TypeVar("Deferred")


class DeferredCalls(Generic[Deferred]):
    """The collectives of an algorithm, under their names and with their arguments, prepared or started.

    `ops.bound` prepares each for its arrays and returns a `BoundCall`; `ops.started` starts it and
    returns a `Pending`. What these give is what the method of `CrossDeviceOps` returns.

    Args:
        ops: the algorithm.
        defer: what is done with a call, and a function that makes it in full.

    >>> import numpy as np
    >>> from crossdevice import DirectAllReduce, PerReplica
    >>> ops, value = DirectAllReduce(), PerReplica([np.float32([1, 2]), np.float32([3, 4])])
    >>> bound = ops.bound.reduce_scatter("sum", value)
    >>> bound().values
    (array([4.], dtype=float32), array([6.], dtype=float32))
    >>> ops.started.all_to_all(value).wait().values
    (array([1., 3.], dtype=float32), array([2., 4.], dtype=float32))
    """

    def __init__(self, ops: Any, defer: Callable[[Call, Callable[[], Any]], Deferred]) -> None:
        self._ops, self._defer = ops, defer

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        *,
        out: Any = None,
        weights: Any = None,
    ) -> Deferred:
        """Defers a `reduce`."""
        weights = copy(weights)  # a list may change before the call is made
        call = Call(
            Collective("reduce", reduce_op, options), [(per_replica_value, destinations)], [out], weights
        )
        arguments = reduce_op, per_replica_value, destinations, options
        return self._defer(call, partial(self._ops.reduce, *arguments, out=out, weights=weights))

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        *,
        out: Sequence[Any] | None = None,
        weights: Any = None,
    ) -> Deferred:
        """Defers a `batch_reduce`."""
        weights = copy(weights)  # a list may change before the call is made
        pairs = checked_pairs(value_destination_pairs)  # an iterator can be read once
        outs = checked_outs(out, len(pairs))
        call = Call(Collective("batch_reduce", reduce_op, options), pairs, outs, weights)
        later = partial(self._ops.batch_reduce, reduce_op, pairs, options, out=out, weights=weights)
        return self._defer(call, later)

    def broadcast(
        self,
        tensor: Any,
        destinations: Any,
        *,
        options: CommunicationOptions | None = None,
        out: Any = None,
        from_rank: int | None = None,
    ) -> Deferred:
        """Defers a `broadcast`; `from_rank` is for algorithms that work between processes."""
        later = partial(self._ops.broadcast, tensor, destinations, options=options, out=out)
        if from_rank is not None:
            if not hasattr(self._ops, "value_of_rank"):
                raise OptionError(
                    f"from_rank={from_rank!r} with {type(self._ops).__name__}, which works in this process "
                    "alone; leave it out, or take a CollectiveAllReduce"
                )
            later = partial(later, from_rank=from_rank)
        pairs = [(one_value(tensor), destinations)]
        call = Call(Collective("broadcast", None, options), pairs, [out], is_of_rank=from_rank is not None)
        return self._defer(call, later)

    def gather(
        self,
        per_replica_value: Any,
        destinations: Any,
        axis: int = 0,
        options: CommunicationOptions | None = None,
        *,
        out: Any = None,
    ) -> Deferred:
        """Defers a `gather`."""
        value = per_replica_value
        call = Call(Collective("gather", None, options, axis), [(value, destinations)], [out])
        return self._defer(call, partial(self._ops.gather, value, destinations, axis, options, out=out))

    def all_gather(
        self,
        per_replica_value: Any,
        axis: int = 0,
        options: CommunicationOptions | None = None,
        *,
        out: Any = None,
    ) -> Deferred:
        """Defers an `all_gather`."""
        value = value_of_replicas(per_replica_value)
        call = Call(Collective("gather", None, options, axis), [(value, value)], [out])
        return self._defer(call, partial(self._ops.all_gather, value, axis, options, out=out))

    def reduce_scatter(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        axis: int = 0,
        options: CommunicationOptions | None = None,
        *,
        sizes: Sequence[int] | None = None,
        out: Any = None,
        weights: Any = None,
    ) -> Deferred:
        """Defers a `reduce_scatter`."""
        weights = copy(weights)  # a list may change before the call is made
        value, lengths = per_replica_value, hashable_sizes(sizes)
        call = Call(
            Collective("reduce_scatter", reduce_op, options, axis, lengths), [(value, value)], [out], weights
        )
        arguments = reduce_op, value, axis, options
        later = partial(self._ops.reduce_scatter, *arguments, sizes=lengths, out=out, weights=weights)
        return self._defer(call, later)

    def all_to_all(
        self,
        per_replica_value: Any,
        axis: int = 0,
        options: CommunicationOptions | None = None,
        *,
        sizes: Sequence[int] | Sequence[Sequence[int]] | None = None,
        out: Any = None,
    ) -> Deferred:
        """Defers an `all_to_all`."""
        value, lengths = per_replica_value, hashable_sizes(sizes)
        call = Call(Collective("all_to_all", None, options, axis, lengths), [(value, value)], [out])
        return self._defer(call, partial(self._ops.all_to_all, value, axis, options, sizes=lengths, out=out))

"""The public calls in which each replica gets, or gives, a part: reduce-scatter, all-gather, all-to-all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from crossdevice.execution.differentiation import read_recorded_leaves
from crossdevice.execution.linear_maps import (
    Calls,
    Concatenation,
    PartsExchange,
    SumsOfSlices,
    lengths_of_parts,
)
from crossdevice.execution.local.all_to_all import read_all_to_all
from crossdevice.execution.local.scattering import Scatter, per_replica, read_scatter
from crossdevice.execution.processes.between_processes import BetweenProcesses
from crossdevice.execution.reading.structures import is_placed, spread_pairs
from crossdevice.values.distributed import PerReplica, as_distributed
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.replica_scope import check_cross_replica


class ShardedCalls:
    """The calls of `CrossDeviceOps` with a part for each replica, made of its reductions and gathers."""

    if TYPE_CHECKING:  # of CrossDeviceOps
        batch_reduce: Callable[..., list[Any]]
        gather: Callable[..., Any]
        _checked_op: Callable[[ReduceOp | str], ReduceOp]
        _checked_factors: Callable[[Any, ReduceOp], tuple[float, ...]]
        _chosen_options: Callable[[CommunicationOptions | None], CommunicationOptions]
        _differentiates: Callable[[ReduceOp], bool]

        @property
        def _between(self) -> BetweenProcesses | None: ...

        @property
        def _calls(self) -> Calls: ...

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
    ) -> Any:
        """Combines the replicas of a value; each replica gets its own slice of the result along `axis`.

        Under `accurate` and `exact` a part has the bits that `reduce` gives it. Under `fast` each part is
        added in the order of its own plan.

        Args:
            reduce_op: the operation, as in `reduce`.
            per_replica_value: a DistributedValues, or a structure of them.
            axis: the axis along which the result is split.
            options: precision, deadline, packing and more; None takes the defaults.
            sizes: the length of each replica's part. Without it parts are as equal as possible, the longer
                ones first, as those of `numpy.array_split`.
            out: an array for the part of each replica instead of new ones. Between processes, it is checked
                when the number of all replicas, and so the length of the parts, is known.
            weights: a number for each replica, as in `reduce`.

        Returns:
            A PerReplica on the devices of the value; the bare part if the value has one replica here.

        Raises:
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            DtypeError: the operation is not defined for this dtype.
            ReduceOpError: the operation is unknown.
            OptionError: an option, a weight or a size is outside its range; or the algorithm is unknown.
            ConversionError: something cannot be read as an array.
            OutError: `out` does not fit the results.
            ContextError: the call is made inside a replica function; use `get_replica_context()` there.
            DeadlineError: other processes did not come in time.
            ProcessGroupError: a process of the group was lost.

        >>> import numpy as np
        >>> from crossdevice import DirectAllReduce, PerReplica
        >>> value = PerReplica([np.float32([1, 2, 3]), np.float32([10, 20, 30])])
        >>> DirectAllReduce().reduce_scatter("sum", value).values
        (array([11., 22.], dtype=float32), array([33.], dtype=float32))
        """
        check_cross_replica("reduce_scatter")
        op, chosen = self._checked_op(reduce_op), self._chosen_options(options)
        values, outs, rebuilt = _spread(per_replica_value, out)
        factors = None if weights is None else self._checked_factors(weights, op)

        def run() -> list[Any]:
            scatters = [
                read_scatter(value, op, axis, sizes, into, factors)
                for value, into in zip(values, outs, strict=True)
            ]
            return self._reduce_scatter(op, scatters, chosen, factors)

        recorded = read_recorded_leaves([(value, None) for value in values], outs)
        if recorded is None or factors is not None or not self._differentiates(op):
            return rebuilt(run())[0]
        shapes: list[Any] = []  # known when the parts are
        whole = Concatenation(self._calls, recorded.places, chosen, axis, shapes, op)
        return rebuilt(recorded.called(run, SumsOfSlices(whole, ()), PerReplica, shapes))[0]

    def all_gather(
        self,
        per_replica_value: Any,
        axis: int = 0,
        options: CommunicationOptions | None = None,
        *,
        out: Any = None,
    ) -> Any:
        """Concatenates the replicas of a value along `axis`, on the device of each; sizes there may differ.

        It is the inverse of `reduce_scatter`: together they are an all-reduce.

        Args:
            per_replica_value: a DistributedValues, or a structure of them.
            axis: the axis along which arrays are concatenated.
            options: a deadline between processes; None takes the defaults.
            out: an array for each replica instead of new ones.

        Returns:
            A Mirrored on the devices of the value; the bare array if the value has one replica here.

        Raises:
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            ConversionError: something cannot be read as an array.
            OutError: `out` does not fit the results.
            ContextError: the call is made inside a replica function; use `get_replica_context()` there.
            DeadlineError: other processes did not come in time.
            ProcessGroupError: a process of the group was lost.

        >>> from crossdevice import DirectAllReduce, PerReplica
        >>> DirectAllReduce().all_gather(PerReplica([[1, 2], [3]])).values
        (array([1, 2, 3], dtype=int32), array([1, 2, 3], dtype=int32))
        """
        check_cross_replica("all_gather")
        value = as_distributed(per_replica_value)
        if not is_placed(value):
            value = PerReplica([value])
        return self.gather(value, value, axis, options, out=out)

    def all_to_all(
        self,
        per_replica_value: Any,
        axis: int = 0,
        options: CommunicationOptions | None = None,
        *,
        sizes: Sequence[int] | Sequence[Sequence[int]] | None = None,
        out: Any = None,
    ) -> Any:
        """Splits each replica's arrays along `axis`; part `i` goes to replica `i`.

        A replica's parts are put end to end along `axis`, in the order of the replicas they come from.

        Args:
            per_replica_value: a DistributedValues, or a structure of them.
            axis: the axis along which arrays are split and joined.
            options: a deadline between processes; None takes the defaults.
            sizes: the lengths of the parts, one for each replica they go to: a list for all replicas, or a
                list of lists, one for each replica they come from. Without it, as in `reduce_scatter`.
            out: an array for each replica instead of new ones; between processes it is checked afterwards.

        Returns:
            A PerReplica on the devices of the value; the bare array if the value has one replica here.

        Raises:
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            OptionError: an option, a weight or a size is outside its range; or the algorithm is unknown.
            ConversionError: something cannot be read as an array.
            OutError: `out` does not fit the results.
            ContextError: the call is made inside a replica function; use `get_replica_context()` there.
            DeadlineError: other processes did not come in time.
            ProcessGroupError: a process of the group was lost.

        >>> from crossdevice import DirectAllReduce, PerReplica
        >>> DirectAllReduce().all_to_all(PerReplica([[1, 2], [3, 4]])).values
        (array([1, 3], dtype=int32), array([2, 4], dtype=int32))
        """
        check_cross_replica("all_to_all")
        values, outs, rebuilt = _spread(per_replica_value, out)
        chosen = self._chosen_options(options)

        def run() -> list[Any]:
            moves = [
                read_all_to_all(value, axis, sizes, into) for value, into in zip(values, outs, strict=True)
            ]
            if self._between is not None:
                return self._between.all_to_all(moves, chosen)
            return [move.run() for move in moves]

        recorded = read_recorded_leaves([(value, None) for value in values], outs)
        if recorded is None or self._calls.rank is not None:  # the sizes of other processes are not known
            return rebuilt(run())[0]
        lengths = functools.partial(lengths_of_parts, recorded.shapes, axis, sizes)
        linear = PartsExchange(self.all_to_all, recorded.places, axis, lengths)
        return rebuilt(recorded.called(run, linear, PerReplica))[0]

    # ---------------------------------------------------------------- inside one process, or between several

    def _reduce_scatter(
        self,
        op: ReduceOp,
        scatters: Sequence[Scatter],
        options: CommunicationOptions,
        factors: tuple[float, ...] | None,
    ) -> list[Any]:
        """In one process, a batch of reductions of one part to one device each, so each is proved."""
        if self._between is not None:
            return self._between.reduce_scatter(scatters, op, options, factors)
        pairs = [pair for scatter in scatters for pair in scatter.pairs()]
        outs = [out for scatter in scatters for out in scatter.outs]
        parts = iter(self.batch_reduce(op, pairs, options, out=outs, weights=factors))
        return [
            per_replica([next(parts) for _ in scatter.value.devices], scatter.value.devices)
            for scatter in scatters
        ]


def _spread(value: Any, out: Any) -> tuple[list[Any], list[Any], Callable[[list[Any]], list[Any]]]:
    """The distributed values of a structure, the `out` of each, and the function that rebuilds it."""
    spread, outs, rebuilt = spread_pairs([(value, None)], [out])
    return [each for each, _ in spread], outs, rebuilt

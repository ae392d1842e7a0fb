"""The public calls that prepare or start a reduction instead of waiting for its results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from crossdevice.execution.bound import BoundReduction, bind_batch, bind_between_processes, side_streams_of
from crossdevice.execution.local.batch import CheckedBatch, read_requests
from crossdevice.execution.local.planning import Planner
from crossdevice.execution.pending import THIS_PROCESS, Pending, start
from crossdevice.execution.processes.between_processes import BetweenProcesses
from crossdevice.execution.reading.structures import checked_outs, checked_pairs
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.replica_scope import check_cross_replica


class Call(NamedTuple):
    """Arguments of `reduce`; without destinations, those of `batch_reduce`."""

    reduce_op: ReduceOp | str
    value: Any
    destinations: Any
    options: CommunicationOptions | None
    out: Any
    weights: Any


class PreparedCalls:
    """The calls of `CrossDeviceOps` that prepare a reduction, or start it and return."""

    if TYPE_CHECKING:  # of CrossDeviceOps
        reduce: Callable[..., Any]
        batch_reduce: Callable[..., list[Any]]
        _checked_op: Callable[[ReduceOp | str], ReduceOp]
        _checked_factors: Callable[[Any, ReduceOp], tuple[float, ...]]
        _chosen_options: Callable[[CommunicationOptions | None], CommunicationOptions]

        @property
        def _between(self) -> BetweenProcesses | None: ...

        @property
        def _runs_locally(self) -> bool: ...

        @property
        def _planner(self) -> Planner: ...

    def bind(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any = None,
        options: CommunicationOptions | None = None,
        *,
        out: Any = None,
        weights: Any = None,
    ) -> BoundReduction:
        """Prepares a reduction of these arrays, with these weights, to be run many times by `bound()`.

        All checks and preparations are done now. Results are written to the same memory in each call:
        to `out`, or to memory that the bound reduction owns.

        Args:
            reduce_op: the operation, as in `reduce`.
            value: what `reduce` takes; or, without `destinations`, the pairs that `batch_reduce` takes.
            destinations: the devices for the result, as in `reduce`.
            options: precision, deadline, packing and more; None takes the defaults.
            out: arrays for the results, as in `reduce` or `batch_reduce`.
            weights: a number for each replica, as in `reduce`.

        Returns:
            A `BoundReduction`. Calling it returns the results; `start()` runs it while Python goes on.

        Raises:
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            DtypeError: the operation is not defined for this dtype.
            ReduceOpError: the operation is unknown.
            OptionError: an option, a weight or a size is outside its range; or the algorithm is unknown.
            ConversionError: something cannot be read as an array.
            DestinationError: `destinations` names no device.
            OutError: `out` does not fit the results.
            ContextError: the call is made inside a replica function; use `get_replica_context()` there.

        >>> import numpy as np
        >>> from crossdevice import DirectAllReduce, PerReplica
        >>> gradients = PerReplica([np.float32([1, 2]), np.float32([3, 4])])
        >>> bound = DirectAllReduce().bind("sum", gradients, gradients, out=gradients)
        >>> bound().values[1]
        array([4., 6.], dtype=float32)
        """
        check_cross_replica("bind")
        if destinations is None:
            value = checked_pairs(value)  # which may be an iterator, and is read again below
            out = checked_outs(out, len(value))
        call = Call(reduce_op, value, destinations, options, out, weights)
        batch, answer_of = self._checked(call)
        if self._runs_locally:
            return bind_batch(batch, self._planner, answer_of)
        between = self._between
        if between is not None:
            between.group.check_usable()
            bound = bind_between_processes(batch, between, answer_of)
            if bound is not None:
                return bound
        checked = call._replace(reduce_op=batch.op, options=batch.options, weights=batch.factors)
        return BoundReduction(self._later(checked), owner=self._owner_of_started)

    def start_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any = None,
        options: CommunicationOptions | None = None,
        *,
        out: Any = None,
        weights: Any = None,
    ) -> Pending:
        """Starts a reduction and returns at once; `pending.wait()` gives what `reduce` would return.

        Arrays must not be written to before `wait` has returned.

        Args:
            reduce_op: the operation, as in `reduce`.
            value: what `reduce` takes; or, without `destinations`, the pairs that `batch_reduce` takes.
            destinations: the devices for the result, as in `reduce`.
            options: precision, deadline, packing and more; None takes the defaults.
            out: arrays for the results, as in `reduce` or `batch_reduce`.
            weights: a number for each replica, as in `reduce`.

        Returns:
            A `Pending`. Between processes its checks run later, and `wait` raises what they find.

        Raises:
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            DtypeError: the operation is not defined for this dtype.
            ReduceOpError: the operation is unknown.
            OptionError: an option, a weight or a size is outside its range; or the algorithm is unknown.
            ConversionError: something cannot be read as an array.
            DestinationError: `destinations` names no device.
            OutError: `out` does not fit the results.
            ContextError: the call is made inside a replica function; use `get_replica_context()` there.

        >>> import numpy as np
        >>> from crossdevice import DirectAllReduce, PerReplica
        >>> gradients = PerReplica([np.float32([1, 2]), np.float32([3, 4])])
        >>> pending = DirectAllReduce().start_reduce("sum", gradients, "cpu:0")
        >>> pending.wait()
        array([4., 6.], dtype=float32)
        """
        check_cross_replica("start_reduce")
        call = Call(reduce_op, value, destinations, options, out, weights)
        if not self._runs_locally:
            # Other processes or a user's own hook: all of the call is made in its turn, its checks too.
            return start(self._later(call), self._owner_of_started)
        batch, answer_of = self._checked(call)
        return start(lambda: answer_of(batch.run(self._planner)), side=side_streams_of(batch))

    def _checked(self, call: Call) -> tuple[CheckedBatch, Callable[[list[Any]], Any]]:
        """The checked batch of a call, and the function that makes its return value of the results."""
        is_batch = call.destinations is None
        pairs = checked_pairs(call.value) if is_batch else [(call.value, call.destinations)]
        outs = checked_outs(call.out, len(pairs)) if is_batch else [call.out]
        op, chosen = self._checked_op(call.reduce_op), self._chosen_options(call.options)
        requests, rebuilt = read_requests(pairs, outs)
        factors = None if call.weights is None else self._checked_factors(call.weights, op)
        batch = CheckedBatch(requests, op, chosen, factors=factors)
        return batch, rebuilt if is_batch else lambda results: rebuilt(results)[0]

    def _later(self, call: Call) -> Callable[[], Any]:
        """The plain call, as a function without arguments."""
        op, value, destinations, options, out, weights = call
        if destinations is None:
            return functools.partial(self.batch_reduce, op, value, options, out=out, weights=weights)
        return functools.partial(self.reduce, op, value, destinations, options, out=out, weights=weights)

    @property
    def _owner_of_started(self) -> object:
        """The owner of started calls: those of one owner run one after the other."""
        return THIS_PROCESS

"""The base of all algorithms: the public calls, and what a subclass may override."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from crossdevice.costs.timing import Round
from crossdevice.costs.topology import Topology
from crossdevice.errors import CrossDeviceError
from crossdevice.execution.bound import BoundCall
from crossdevice.execution.collective import Call, Collective, hashable_sizes, one_value, value_of_replicas
from crossdevice.execution.deferred_calls import DeferredCalls
from crossdevice.execution.differentiation import Calls
from crossdevice.execution.fingerprints import check_same as check_replicas_same
from crossdevice.execution.local.batch import CheckedBatch, Request, read_requests
from crossdevice.execution.local.copying import copied_to
from crossdevice.execution.local.hooks import HOOKS, Hooks
from crossdevice.execution.pending import Pending
from crossdevice.execution.reading.outputs import read_destinations
from crossdevice.execution.reading.structures import checked_outs, checked_pairs
from crossdevice.execution.reading.values import read_value
from crossdevice.execution.runner import LocalRunner
from crossdevice.plans.builder import PlanBuilder
from crossdevice.plans.packing import Packing
from crossdevice.plans.steps import Buffer
from crossdevice.values.device import Device
from crossdevice.values.distributed import PerReplica
from crossdevice.values.options import DEFAULT_OPTIONS, CommunicationOptions, either
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.replica_scope import check_cross_replica


class _MissingPlanError(CrossDeviceError, NotImplementedError):
    """An algorithm that does not say how it makes a sum."""


class Settings:
    """Public attributes as settings; cached properties are cleared when a setting changes."""

    packing: Packing = Packing()

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets the attribute and clears cached properties."""
        object.__setattr__(self, name, value)
        self._forget(name)

    def __delattr__(self, name: str) -> None:
        """Deletes it, so that the class's default counts again."""
        object.__delattr__(self, name)
        self._forget(name)

    def __repr__(self) -> str:
        """Returns its class with the settings that are not the defaults."""
        settings = [
            f"{name}={value!r}"
            for name, parameter in inspect.signature(type(self)).parameters.items()
            if (value := getattr(self, name, parameter.default)) is not DEFAULT_OPTIONS
            and repr(value) != repr(parameter.default)
        ]
        return f"{type(self).__name__}({', '.join(settings)})"

    @property
    def num_packs(self) -> int:
        """The number of packs into which a batch is split; 0 if something else decides."""
        return self.packing.num_packs

    @num_packs.setter
    def num_packs(self, num_packs: int) -> None:
        self.packing = dataclasses.replace(self.packing, num_packs=num_packs)

    def __getstate__(self) -> dict[str, Any]:
        """Returns its settings; cached properties are computed again."""
        return {name: value for name, value in self.__dict__.items() if not self._is_prepared(name)}

    def _forget(self, changed: str) -> None:
        if not changed.startswith("_"):
            for name in [*filter(self._is_prepared, self.__dict__)]:
                self.__dict__.pop(name, None)

    def _is_prepared(self, name: str) -> bool:
        """Tells an attribute that was prepared from the settings from a setting."""
        return isinstance(getattr(type(self), name, None), functools.cached_property)


class CrossDeviceOps(Settings):
    """Combines values of several devices (reduce, batch_reduce, gather) and copies them (broadcast).

    `reduce_scatter`, `all_gather` and `all_to_all` do the same with a part for each replica.

    Nested structures are accepted wherever a value is, and the result has the same structure: a
    PerReplica of dicts becomes a Mirrored of dicts, a dict of PerReplicas becomes a dict of Mirrored.

    To write an algorithm, override `plan_sum`. To replace the arithmetic, override
    `reduce_implementation`; the two other `*_implementation` hooks are for batches and broadcasts.

    >>> import numpy as np
    >>> from crossdevice import PerReplica, RingAllReduce
    >>> value = PerReplica([np.float32([1, 2]), np.float32([3, 4])])
    >>> RingAllReduce().reduce("mean", value, "cpu:0")
    array([2., 3.], dtype=float32)
    """

    reduce_to_device: Device | None = None
    uses_engine: bool = False
    """True if its plans contain engine steps where `build.has_engine` is true."""
    accumulation_fn: Callable[[tuple[Any, ...]], Any] | None = None

    # ---------------------------------------------------------------- what an algorithm says

    def plan_sum(
        self,
        build: PlanBuilder,  # noqa: ARG002
        destinations: Sequence[Device],  # noqa: ARG002
    ) -> Sequence[Buffer]:
        """Plans one pack; returns a buffer on each destination with the sum of all `build.inputs`."""
        raise _MissingPlanError(
            f"{type(self).__name__} overrides neither plan_sum nor reduce_implementation; expected plan_sum, "
            "which returns a buffer with the sum on each destination, such as "
            "`[build.add(build.inputs, at=device) for device in destinations]`"
        )

    def plan_rounds(self, topology: Topology, num_bytes: float) -> Sequence[Round] | None:  # noqa: ARG002
        """Returns the rounds of an all-reduce, to time it on thousands of devices; None if unknown."""
        return None

    def fallback_reason(self, devices: Sequence[Device]) -> str | None:  # noqa: ARG002
        """Returns the reason this algorithm cannot be used on these devices; None if it can."""
        return None

    # ---------------------------------------------------------------- the public calls

    def check_same(self, value: Any) -> None:
        """Raises BitsMismatchError unless all replicas of a distributed value hold the same bits.

        The message names the replicas in the minority, and the leaves in which they differ.

        Args:
            value: a DistributedValues, or a structure of them.

        Raises:
            BitsMismatchError: replicas differ.

        >>> from crossdevice import Mirrored, RingAllReduce
        >>> RingAllReduce().check_same(Mirrored([[1.0, 2.0], [1.0, 2.0]]))
        """
        check_replicas_same(value)

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
        out: Any = None,
        weights: Any = None,
    ) -> Any:
        """Combines the replicas of a value and puts the result on each destination.

        Args:
            reduce_op: `"sum"`, `"mean"`, `"min"`, `"max"`, `"prod"`, `"median"`, a `ReduceOp` or a
                `trimmed_mean`.
            per_replica_value: a DistributedValues; anything array-like counts as one replica.
            destinations: the devices for the result, given as a DistributedValues, variable, array or
                device string. Pass the value itself for an all-reduce.
            options: precision, deadline, packing and more; None takes the defaults.
            experimental_hints: the older name of `options`.
            out: arrays for the result instead of new ones; pass the value itself to reduce in place.
            weights: a number for each replica, by which it is multiplied. SUM takes any real numbers; MEAN
                divides by their sum. Products and sums are wide, and rounded once, also under `"fast"`.

        Returns:
            A bare array for one destination device, a Mirrored for several.

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
            DeadlineError: other processes did not come in time.
            ProcessGroupError: a process of the group was lost.

        >>> import numpy as np
        >>> from crossdevice import DirectAllReduce, PerReplica
        >>> value = PerReplica([np.float32([1, 2]), np.float32([3, 4])])
        >>> DirectAllReduce().reduce("sum", value, value).values[1]
        array([4., 6.], dtype=float32)
        """
        check_cross_replica("reduce")
        chosen = options if experimental_hints is None else either(options, experimental_hints)
        # What Collective("reduce", reduce_op, chosen) makes, in less than half of the time.
        call = tuple.__new__(Collective, ("reduce", reduce_op, chosen, 0, None, None))
        return self._runner.run(call, [(per_replica_value, destinations)], [out], weights)[0]

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
        out: Sequence[Any] | None = None,
        weights: Any = None,
    ) -> list[Any]:
        """Reduces many values at once, in shared packs and passes.

        Args:
            reduce_op: the operation, as in `reduce`.
            value_destination_pairs: a list or other iterable of (value, destinations), each as in `reduce`.
            options: precision, deadline, packing and more; None takes the defaults.
            experimental_hints: the older name of `options`.
            out: arrays for the results instead of new ones, one entry per pair.
            weights: a number for each replica, as in `reduce`; it counts for all values.

        Returns:
            A list with what `reduce` would return for each pair.

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
            DeadlineError: other processes did not come in time.
            ProcessGroupError: a process of the group was lost.

        >>> from crossdevice import DirectAllReduce, PerReplica
        >>> a, b = PerReplica([1.0, 2.0]), PerReplica([3.0, 4.0])
        >>> [float(total) for total in DirectAllReduce().batch_reduce("sum", [(a, "cpu:0"), (b, "cpu:1")])]
        [3.0, 7.0]
        """
        check_cross_replica("batch_reduce")
        chosen = options if experimental_hints is None else either(options, experimental_hints)
        pairs = checked_pairs(value_destination_pairs)
        call = tuple.__new__(Collective, ("batch_reduce", reduce_op, chosen, 0, None, None))
        return self._runner.run(call, pairs, checked_outs(out, len(pairs)), weights)

    def broadcast(
        self,
        tensor: Any,
        destinations: Any,
        *,
        options: CommunicationOptions | None = None,
        out: Any = None,
    ) -> Any:
        """Copies a value to each destination; a destination variable is not written.

        With `share_results` in the options, destinations in the value's own memory get the value itself
        instead of a copy, read-only if the library supports it.

        Args:
            tensor: an array, or a structure of arrays; the first component of a Mirrored.
            destinations: the devices for the copies, as in `reduce`.
            options: only `share_results` counts, and `timeout_seconds` between processes.
            out: arrays for the copies instead of new ones.

        Returns:
            A bare array for one destination device, a Mirrored for several.

        Raises:
            ConversionError: something cannot be read as an array.
            DestinationError: `destinations` names no device.
            OutError: `out` does not fit the results.
            ContextError: the call is made inside a replica function; use `get_replica_context()` there.

        >>> from crossdevice import DirectAllReduce, PerReplica
        >>> [float(copy) for copy in DirectAllReduce().broadcast(2.0, PerReplica([0.0, 0.0])).values]
        [2.0, 2.0]
        """
        check_cross_replica("broadcast")
        call = Collective("broadcast", None, options)
        return self._runner.run(call, [(one_value(tensor), destinations)], [out])[0]

    def gather(
        self,
        per_replica_value: Any,
        destinations: Any,
        axis: int = 0,
        options: CommunicationOptions | None = None,
        *,
        out: Any = None,
    ) -> Any:
        """Concatenates the replicas of a value along `axis`, on each destination; sizes there may differ.

        Args:
            per_replica_value: a DistributedValues, or a structure of them; dtypes and all other sizes have
                to agree.
            destinations: the devices for the result, as in `reduce`.
            axis: the axis along which arrays are concatenated.
            options: a deadline between processes; None takes the defaults.
            out: arrays for the result instead of new ones.

        Returns:
            A bare array for one destination device, a Mirrored for several.

        Raises:
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            ConversionError: something cannot be read as an array.
            DestinationError: `destinations` names no device.
            OutError: `out` does not fit the results.
            ContextError: the call is made inside a replica function; use `get_replica_context()` there.
            DeadlineError: other processes did not come in time.
            ProcessGroupError: a process of the group was lost.

        >>> from crossdevice import DirectAllReduce, PerReplica
        >>> DirectAllReduce().gather(PerReplica([[1, 2], [3]]), "cpu:0")
        array([1, 2, 3], dtype=int32)
        """
        check_cross_replica("gather")
        call = Collective("gather", None, options, axis)
        return self._runner.run(call, [(per_replica_value, destinations)], [out])[0]

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
        call = Collective("reduce_scatter", reduce_op, options, axis, hashable_sizes(sizes))
        return self._runner.run(call, [(per_replica_value, per_replica_value)], [out], weights)[0]

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
        value = value_of_replicas(per_replica_value)
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
        call = Collective("all_to_all", None, options, axis, hashable_sizes(sizes))
        return self._runner.run(call, [(per_replica_value, per_replica_value)], [out])[0]

    def bind(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any = None,
        options: CommunicationOptions | None = None,
        *,
        out: Any = None,
        weights: Any = None,
    ) -> BoundCall:
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
            A `BoundCall`. Calling it returns the results; `start()` runs it while Python goes on.

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
        if destinations is None:
            return self.bound.batch_reduce(reduce_op, value, options, out=out, weights=weights)
        return self.bound.reduce(reduce_op, value, destinations, options, out=out, weights=weights)

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
        if destinations is None:
            return self.started.batch_reduce(reduce_op, value, options, out=out, weights=weights)
        return self.started.reduce(reduce_op, value, destinations, options, out=out, weights=weights)

    @property
    def bound(self) -> DeferredCalls[BoundCall]:
        """The calls of this algorithm, each prepared for its arrays, to be made many times.

        `reduce`, `batch_reduce`, `broadcast`, `gather`, `all_gather`, `reduce_scatter` and `all_to_all` take
        what the methods of these names take, and return a `BoundCall`. Calling that returns what the method
        returns, in the same memory each time: in `out`, or in memory that the bound call owns.

        >>> import numpy as np
        >>> from crossdevice import DirectAllReduce, PerReplica
        >>> value = PerReplica([np.float32([1, 2]), np.float32([3])])
        >>> gather = DirectAllReduce().bound.gather(value, "cpu:0")
        >>> value.values[1][:] = 9
        >>> gather()
        array([1., 2., 9.], dtype=float32)
        """
        return DeferredCalls(self, self._bind)

    @property
    def started(self) -> DeferredCalls[Pending]:
        """The calls of this algorithm, each started while Python goes on.

        They have the names and arguments of those of `bound`, and return a `Pending`: its `wait` returns what
        the method returns. Arrays must not be written to before. Between processes checks run later, too, and
        `wait` raises what they find.

        >>> import numpy as np
        >>> from crossdevice import DirectAllReduce, PerReplica
        >>> pending = DirectAllReduce().started.all_gather(PerReplica([np.ones(1), np.zeros(2)]))
        >>> pending.wait().values[1]
        array([1., 0., 0.])
        """
        return DeferredCalls(self, self._start)

    def explain(
        self,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        reduce_op: ReduceOp | str = ReduceOp.SUM,
    ) -> str:
        """Describes what `reduce` would do with this value; nothing is computed.

        Args:
            per_replica_value: the value, as for `reduce`.
            destinations: the devices for the result, as for `reduce`.
            options: the options, as for `reduce`.
            reduce_op: the operation, as for `reduce`.

        Returns:
            Text with the algorithm, why it was chosen, its steps and the bytes it sends.

        Raises:
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            DtypeError: the operation is not defined for this dtype.
            ReduceOpError: the operation is unknown.
            OptionError: an option, a weight or a size is outside its range; or the algorithm is unknown.
            ConversionError: something cannot be read as an array.
            DestinationError: `destinations` names no device.

        >>> from crossdevice import DirectAllReduce, PerReplica
        >>> print(DirectAllReduce().explain(PerReplica([1.0, 2.0]), "cpu:0").splitlines()[0])
        DirectAllReduce: SUM of 2 replicas, precision accurate
        """
        runner = self._runner
        op, chosen = runner.checked_op(reduce_op), runner.options_of(options)
        requests, _ = read_requests([(per_replica_value, destinations)], [None])
        return "\n\n".join(runner.explained(request, op, chosen) for request in requests)

    # ---------------------------------------------------------------- hooks for subclasses

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions,
    ) -> Any:
        """Reduces one value; a subclass may override it. In a direct call, `options` may be None.

        Args:
            reduce_op: the operation, always a member of `ReduceOp` in calls that come from `reduce`.
            per_replica_value: the checked value.
            destinations: what the caller gave.
            options: the options of the call.

        Returns:
            What `reduce` is to return for this value.

        Raises:
            OutError: a subclass returned something that does not fit; the message names the hook.
        """
        request = Request(read_value(per_replica_value), read_destinations(destinations))
        runner = self._runner
        op, chosen = runner.checked_op(reduce_op), runner.options_of(options)
        return CheckedBatch([request], op, chosen).run(runner.planner)[0]

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Reduces many values; a subclass may override it. One by one if it overrides only the above.

        Args:
            reduce_op: the operation.
            value_destination_pairs: the checked values, each with what the caller gave as its destinations.
            options: the options of the call.

        Returns:
            A list with the result for each pair.

        Raises:
            OutError: a subclass returned something that does not fit; the message names the hook.
        """
        runner = self._runner
        op, chosen = runner.checked_op(reduce_op), runner.options_of(options)
        value_destination_pairs = checked_pairs(value_destination_pairs)
        if "reduce_implementation" in self._hooks.overridden:
            return [
                self.reduce_implementation(op, value, destinations, chosen)
                for value, destinations in value_destination_pairs
            ]
        requests = [
            Request(read_value(value), read_destinations(destinations))
            for value, destinations in value_destination_pairs
        ]
        return CheckedBatch(requests, op, chosen).run(runner.planner)

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Copies one value to each destination device; a subclass may override it.

        Args:
            tensor: the value to copy.
            destinations: what the caller gave.

        Returns:
            A bare array for one destination device, a Mirrored for several.

        Raises:
            DestinationError: `destinations` names no device.
        """
        return copied_to(tensor, read_destinations(destinations))

    # ---------------------------------------------------------------- how calls are made

    @functools.cached_property
    def _runner(self) -> LocalRunner:
        """Makes the calls; forgotten as soon as a setting changes."""
        return LocalRunner(self, self._hooks, lambda: self._calls)

    def _bind(self, call: Call, later: Callable[[], Any]) -> BoundCall:
        """Prepares a call; `later` makes it in full."""
        check_cross_replica("bind")
        return self._runner.bind(call, later)

    def _start(self, call: Call, later: Callable[[], Any]) -> Pending:
        """Starts a call; `later` makes it in full."""
        check_cross_replica("start")
        return self._runner.start(call, later)

    @property
    def _calls(self) -> Calls:
        """The calls that compute derivatives."""
        return Calls(self.batch_reduce, self.gather, self.reduce_scatter, self.all_to_all)

    def _within_process(self) -> CrossDeviceOps:
        """Returns the same algorithm with the same options, for the replicas of this process alone."""
        return self

    @property
    def _hooks(self) -> Hooks:
        return Hooks(
            self.reduce_implementation,
            self.batch_reduce_implementation,
            self.broadcast_implementation,
            frozenset(
                name for name in HOOKS if getattr(type(self), name) is not getattr(CrossDeviceOps, name)
            ),
        )


class PackedOps(CrossDeviceOps):
    """An algorithm that has one setting: the number of packs into which a batch is split."""

    def __init__(self, num_packs: int = 1) -> None:
        self.packing = Packing(num_packs)

"""Calls that combine and copy values under a strategy, for authors of optimizers and loops."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import optree

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.errors import ContextError, ConversionError, ReduceOpError
from crossdevice.execution.bound import BoundCall
from crossdevice.execution.reading.outputs import read_destinations
from crossdevice.execution.reading.structures import checked_pairs
from crossdevice.strategies.data.regrouping import (
    checked_arguments,
    in_our_classes,
    is_array,
    map_structure,
    regroup,
    spread,
)
from crossdevice.strategies.running.place import check_cross_replica_of, current_context, update_of
from crossdevice.strategies.variables.distributed_variable import (
    DistributedVariable,
    ReplicaVariable,
    refuse_per_replica,
)
from crossdevice.strategies.variables.variable import backend_of_variable
from crossdevice.values.delegation import PlacedArray
from crossdevice.values.device import Device
from crossdevice.values.distributed import DistributedValues, Mirrored
from crossdevice.values.nesting import NUMBERS
from crossdevice.values.options import CommunicationOptions, either
from crossdevice.values.quantities import kind_text
from crossdevice.values.reduce_op import ReduceOp, VariableSynchronization

if TYPE_CHECKING:
    from crossdevice.strategies.base import Strategy

_IDEMPOTENT = (ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX)
"""Operations that give x for any number of equal x."""


class StrategyExtended:
    """The type of `strategy.extended`; every reduction uses the strategy's `cross_device_ops`.

    Args:
        devices: the devices of the replicas of this process.
        cross_device_ops: the algorithm of all reductions.
        num_replicas: the number of replicas of all processes.

    >>> from crossdevice import MirroredStrategy, PerReplica
    >>> extended = MirroredStrategy(["cpu:0", "cpu:1"]).extended
    >>> extended.worker_devices
    (Device('cpu:0'), Device('cpu:1'))
    >>> float(extended.reduce_to("sum", PerReplica([1.0, 2.0]), "cpu:0"))
    3.0
    """

    def __init__(
        self, devices: tuple[Device, ...], cross_device_ops: CrossDeviceOps, num_replicas: int | None = None
    ) -> None:
        self._devices = devices
        self._cross_device_ops = cross_device_ops
        self._num_replicas = len(devices) if num_replicas is None else num_replicas
        self._owner: weakref.ref[Strategy] | None = None

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """The algorithm that all reductions of the strategy use."""
        return self._cross_device_ops

    @property
    def worker_devices(self) -> tuple[Device, ...]:
        """The device of each replica of this process."""
        return self._devices

    experimental_require_static_shapes = False
    """TensorFlow's name; shapes of arrays are always known."""

    experimental_should_init = True
    """TensorFlow's name; variables are made with their values in every process."""

    @property
    def experimental_between_graph(self) -> bool:
        """TensorFlow's name: True if there are replicas in other processes."""
        return self._num_replicas > len(self._devices)

    @property
    def should_checkpoint(self) -> bool:
        """True in the process that saves, which has the first replica."""
        strategy = self._strategy
        return strategy is None or strategy.first_replica == 0

    should_save_summary = should_checkpoint
    """The same for logs."""

    @property
    def num_replicas(self) -> int:
        """Number of replicas in all processes."""
        return self._num_replicas

    parameter_devices = worker_devices
    """The device of each copy of a variable."""

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
        weights: Any = None,
    ) -> Any:
        """Combines each distributed value of a structure and puts the result on `destinations`.

        A value that is the same on all replicas (a Mirrored, or one that is not distributed) is its own
        mean, minimum and maximum, and is returned unchanged. Its sum is refused, except for zeros.

        Args:
            reduce_op: the operation, as in `CrossDeviceOps.reduce`.
            value: a distributed value, or a structure of them.
            destinations: the devices for the result, as in `CrossDeviceOps.reduce`.
            options: precision, deadline and more; None takes the defaults.
            experimental_hints: the older name of `options`.
            weights: a number for each replica of this process, as in `CrossDeviceOps.reduce`.

        Returns:
            A bare array for one destination device, a Mirrored for several.

        Raises:
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            DtypeError: the operation is not defined for this dtype.
            ReduceOpError: the operation is unknown, or a sum of a value that is not distributed.
            OptionError: an option or a weight is outside its range.
            ConversionError: something cannot be read as an array.
            DestinationError: `destinations` names no device.
            DeadlineError: other processes did not come in time.
            ProcessGroupError: a process of the group was lost.
        """
        check_cross_replica_of(self._strategy, "reduce_to")
        op, options, value = ReduceOp(reduce_op), either(options, experimental_hints), in_our_classes(value)
        if isinstance(value, DistributedValues) and not isinstance(value, Mirrored):
            return self._cross_device_ops.reduce(op, value, destinations, options, **_given(weights))
        reduce = functools.partial(self._cross_device_ops.reduce, op, options=options, **_given(weights))
        each = [(value, destinations)]
        return self._reduced(op, each, lambda pairs: list(itertools.starmap(reduce, pairs)), weights)[0]

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
        weights: Any = None,
    ) -> list[Any]:
        """Reduces many (value, destinations) pairs in one batch.

        Args:
            reduce_op: the operation, as in `CrossDeviceOps.reduce`.
            value_destination_pairs: pairs, each as for `reduce_to`.
            options: precision, deadline and more; None takes the defaults.
            experimental_hints: the older name of `options`.
            weights: a number for each replica of this process, as in `CrossDeviceOps.reduce`.

        Returns:
            A list with what `reduce_to` would return for each pair.

        Raises:
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            DtypeError: the operation is not defined for this dtype.
            ReduceOpError: the operation is unknown, or a sum of a value that is not distributed.
            OptionError: an option or a weight is outside its range.
            ConversionError: something cannot be read as an array.
            DestinationError: `destinations` names no device.
            DeadlineError: other processes did not come in time.
            ProcessGroupError: a process of the group was lost.
        """
        op, options = ReduceOp(reduce_op), either(options, experimental_hints)
        batch_reduce = self._cross_device_ops.batch_reduce
        reduce = functools.partial(batch_reduce, op, options=options, **_given(weights))
        return self._reduced(op, checked_pairs(value_destination_pairs), reduce, weights)

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
        """Prepares a reduction of these arrays by the strategy's algorithm, to be run many times.

        Args:
            reduce_op: the operation, as in `CrossDeviceOps.reduce`.
            value: as in `CrossDeviceOps.bind`.
            destinations: as in `CrossDeviceOps.bind`.
            options: precision, deadline and more; None takes the defaults.
            out: arrays for the results.
            weights: a number for each replica of this process.

        Returns:
            A `BoundCall`.

        Raises:
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            DtypeError: the operation is not defined for this dtype.
            ReduceOpError: the operation is unknown.
            OptionError: an option or a weight is outside its range.
            ConversionError: something cannot be read as an array.
            DestinationError: `destinations` names no device.
        """
        return self._cross_device_ops.bind(reduce_op, value, destinations, options, out=out, weights=weights)

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Copies a value to each destination; a plain number is the same everywhere and stays one.

        Args:
            tensor: an array or a number.
            destinations: the devices for the copies, as in `CrossDeviceOps.reduce`.

        Returns:
            A bare array for one destination device, a Mirrored for several; a plain number as it is.

        Raises:
            ConversionError: something cannot be read as an array.
            DestinationError: `destinations` names no device.
        """
        check_cross_replica_of(self._strategy, "broadcast_to")
        read_destinations(destinations)
        if isinstance(tensor, NUMBERS):
            return tensor
        if isinstance(tensor, DistributedVariable):
            tensor = tensor.read_value()
        return self._cross_device_ops.broadcast(tensor, destinations)

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn(copy, ...)` for each copy of a variable, on its device, with its components of arguments.

        A PerReplica argument would make the copies differ, so only variables synchronized ON_READ take it.
        In a replica function all replicas meet, and each updates its copy with its arguments.

        Args:
            var: a variable of this strategy.
            fn: the function, called with a copy of the variable, `args` and `kwargs`.
            args: its arguments; of distributed ones each call gets its own component.
            kwargs: its keyword arguments, likewise.
            group: False gives all results.

        Returns:
            The structure that `fn` returned, with a Mirrored for arrays, an object that all calls returned as
            it is, and None for anything else. With `group=False` it has tuples of the results of all calls.

        Raises:
            ContextError: another strategy was entered.
            ConversionError: `var` is no variable of this strategy, or a PerReplica argument would make the
                copies differ.
        """
        arguments = checked_arguments("update", args, kwargs)
        context = current_context()
        if context is not None:
            return context.merge_call(
                lambda _, *args, **kwargs: self._updated(var, fn, (args, kwargs), group), *arguments
            )
        if (
            isinstance(var, DistributedVariable)
            and var.synchronization is not VariableSynchronization.ON_READ  # its copies may differ
            and self._num_replicas > 1
        ):
            refuse_per_replica("update", var.name, arguments)
        check_cross_replica_of(self._strategy, "update")
        return self._updated(var, fn, arguments, group)

    def _updated(
        self, var: Any, fn: Callable[..., Any], arguments: tuple[tuple[Any, ...], dict[str, Any]], group: bool
    ) -> Any:
        if not isinstance(var, DistributedVariable):
            raise _foreign("update", var)
        enter = backend_of_variable(var.values[0].operand()).thread_state(var.devices)
        enter = enter or contextlib.nullcontext
        results = []
        each = zip(var.values, spread(arguments, var.devices), strict=True)
        for number, (copy, (own_args, own_kwargs)) in enumerate(each):
            with enter(copy.device), update_of(self._strategy, number):
                results.append(fn(copy, *own_args, **own_kwargs))
        return grouped(results, var.devices, group)

    def update_non_slot(
        self,
        colocate_with: Sequence[Device | str],
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn(...)` for each of the devices that `non_slot_devices` returned.

        Args:
            colocate_with: what `non_slot_devices` returned.
            fn: the function, called with `args` and `kwargs`.
            args: its arguments; of distributed ones each call gets its own component.
            kwargs: its keyword arguments, likewise.
            group: False gives all results.

        Returns:
            The structure that `fn` returned, with a Mirrored for arrays, an object that all calls returned as
            it is, and None for anything else. With `group=False` it has tuples of the results of all calls.

        Raises:
            ContextError: another strategy was entered.
            ConversionError: `colocate_with` is no list of devices.
            DeviceError: a device name cannot be read, or there is no such device.
        """
        check_cross_replica_of(self._strategy, "update_non_slot")
        if isinstance(colocate_with, str) or not isinstance(colocate_with, Sequence) or not colocate_with:
            raise ConversionError(
                "update_non_slot takes the devices that non_slot_devices returned; got "
                f"{kind_text(colocate_with)}"
            )
        devices = tuple(map(Device.parse, colocate_with))
        arguments = checked_arguments("update_non_slot", args, kwargs)
        results = []
        for number, (own_args, own_kwargs) in enumerate(spread(arguments, devices)):
            with update_of(self._strategy, number):
                results.append(fn(*own_args, **own_kwargs))
        return grouped(results, devices, group)

    def non_slot_devices(self, var_list: Sequence[Any]) -> tuple[Device, ...]:  # noqa: ARG002
        """Returns the devices of optimizer state that belongs to no variable: all of them.

        Args:
            var_list: the variables of the optimizer; nothing depends on it.

        Returns:
            The devices of this process.
        """
        return self._devices

    def read_var(self, v: Any) -> Any:
        """Returns the value of a variable, as `read_value()` gives it.

        Args:
            v: a variable.

        Returns:
            Its value.
        """
        if not hasattr(v, "read_value"):
            raise ConversionError(f"read_var takes a variable, got {kind_text(v)}")
        return v.read_value()

    def variable_created_in_scope(self, v: Any) -> bool:
        """Returns whether a variable, or a copy of one, belongs to this strategy.

        Args:
            v: anything.

        Returns:
            True for a variable of this strategy, and for each of its copies.
        """
        v = self.value_container(v)
        return isinstance(v, DistributedVariable) and v.distribute_strategy.extended is self

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Makes variables in the block where this one is: on every device, as all of the strategy are.

        Args:
            colocate_with_variable: a variable of this strategy.

        Returns:
            A context manager.

        Raises:
            ConversionError: it is no variable of this strategy.
        """
        if not self.variable_created_in_scope(colocate_with_variable):
            raise _foreign("colocate_vars_with", colocate_with_variable)
        yield

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Does the same as `strategy.run`, under its older name.

        Args:
            fn: the function, called with `args` and `kwargs`.
            args: its arguments; of distributed ones each replica gets its own component.
            kwargs: its keyword arguments, likewise.

        Returns:
            What `strategy.run` returns.

        Raises:
            ReplicaError: replicas make different calls, or some have ended.
            DeadlineError: a replica did not come in time.
        """
        strategy = self._strategy
        if strategy is None:
            raise ContextError("call_for_each_replica needs the strategy of this object, which is gone")
        return strategy.run(fn, args, kwargs)

    @property
    def _strategy(self) -> Strategy | None:
        return None if self._owner is None else self._owner()

    def belongs_to(self, strategy: Strategy) -> None:
        """Remembers the strategy this is of, without keeping it alive."""
        self._owner = weakref.ref(strategy)

    def __getstate__(self) -> dict[str, Any]:
        """Returns everything but the strategy, which sets itself again."""
        return {**self.__dict__, "_owner": None}

    def value_container(self, value: Any) -> Any:
        """Returns the distributed variable that a copy belongs to; anything else is its own container.

        Args:
            value: a copy of a variable, or anything else.

        Returns:
            The variable, or the value itself.
        """
        return value.container if isinstance(value, ReplicaVariable) else value

    def _reduced(
        self,
        op: ReduceOp,
        pairs: Sequence[tuple[Any, Any]],
        reduce: Callable[[list[tuple[Any, Any]]], list[Any]],
        weights: Any,
    ) -> list[Any]:
        check_cross_replica_of(self._strategy, "reduce_to")
        to_reduce: list[tuple[Any, Any]] = []
        spots: list[tuple[list[Any], int]] = []
        answers: list[tuple[list[Any], Any]] = []
        for value, destinations in pairs:
            read_destinations(destinations)
            leaves, structure = optree.tree_flatten(in_our_classes(value), none_is_leaf=True)
            for position, leaf in enumerate(leaves):
                is_own = isinstance(leaf, DistributedValues) and not isinstance(leaf, Mirrored)
                if is_own or (weights is not None and self._num_replicas == 1):
                    spots.append((leaves, position))
                    to_reduce.append((leaf, destinations))
                else:
                    leaves[position] = self._same_everywhere(op, leaf, destinations)
            answers.append((leaves, structure))
        for (leaves, position), result in zip(spots, reduce(to_reduce), strict=True):
            leaves[position] = result
        return [optree.tree_unflatten(structure, leaves) for leaves, structure in answers]

    def _same_everywhere(self, op: ReduceOp, value: Any, destinations: Any) -> Any:
        if op in _IDEMPOTENT or op.is_order_statistic:
            is_own = hasattr(value, "dtype") and not isinstance(value, DistributedValues)
            if is_own and self._num_replicas == 1:
                return self._cross_device_ops.reduce(op, value, destinations)  # as one replica's contribution
            return value
        if isinstance(value, Mirrored):
            raise ReduceOpError(
                f"{op.name} of {kind_text(value)}: it is the same value on every replica, not one "
                "contribution of each; use MEAN, or hand over a PerReplica"
            )
        if op is ReduceOp.SUM and _is_zero(value):
            return value.copy() if isinstance(value, np.ndarray) else value
        if self._num_replicas > 1:
            raise ReduceOpError(
                f"{op.name} of {kind_text(value)} that is not distributed: it is unclear whether each "
                f"of the {self._num_replicas} replicas contributes it; hand over a PerReplica"
            )
        return self._cross_device_ops.broadcast(value, destinations)


def _given(weights: Any) -> dict[str, Any]:
    """Returns weights as an argument, if any: users' subclasses may override methods without it."""
    return {} if weights is None else {"weights": weights}


def grouped(results: list[Any], devices: tuple[Device, ...], group: bool) -> Any:
    """Returns for each leaf one value if `group`, or the values of all copies, as `update` does."""
    if not group:
        return map_structure(lambda each: each.values, regroup(results, devices, always_wrap=True))
    if len(results) == 1:
        return results[0]
    return map_structure(_grouped_leaf, regroup(results, devices, always_wrap=True))


def _grouped_leaf(each: DistributedValues) -> Any:
    if all(result is each.values[0] for result in each.values):
        return each.values[0]
    arrays = tuple(map(_array_of, each.values))
    return Mirrored.of(arrays, each.devices) if all(map(is_array, arrays)) else None


def _is_zero(value: Any) -> bool:
    if isinstance(value, NUMBERS):
        return value == 0
    return isinstance(value, np.ndarray) and not value.any()


def _foreign(call: str, value: Any) -> ConversionError:
    return ConversionError(
        f"{call} takes a variable of this strategy, got {kind_text(value)}; "
        "make one with strategy.create_variable"
    )


def _array_of(leaf: Any) -> Any:
    return leaf.value() if isinstance(leaf, PlacedArray) else leaf

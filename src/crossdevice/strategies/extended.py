"""The calls that combine and copy values under a strategy, for those who write optimizers and loops."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import optree

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.errors import ConversionError, ReduceOpError
from crossdevice.execution.bound import BoundReduction
from crossdevice.execution.reading.destinations import read_destinations
from crossdevice.strategies.data.regrouping import is_array, map_structure, regroup, spread
from crossdevice.strategies.variables.distributed import (
    DistributedVariable,
    ReplicaVariable,
    refuse_per_replica,
)
from crossdevice.values.device import Device
from crossdevice.values.distributed import DistributedValues, Mirrored
from crossdevice.values.nesting import NUMBERS
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.replica_scope import check_cross_replica
from crossdevice.values.variable import Variable

_IDEMPOTENT = (ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX)
"""Operations that give x for any number of equal x."""


class StrategyExtended:
    """The type of `strategy.extended`; every reduction uses the strategy's `cross_device_ops`.

    >>> from crossdevice.strategies.mirrored import MirroredStrategy
    >>> extended = MirroredStrategy(["cpu:0", "cpu:1"]).extended
    >>> extended.worker_devices
    (Device('cpu:0'), Device('cpu:1'))
    >>> from crossdevice.values.distributed import PerReplica
    >>> float(extended.reduce_to("sum", PerReplica([1.0, 2.0]), "cpu:0"))
    3.0
    """

    def __init__(
        self,
        devices: tuple[Device, ...],
        cross_device_ops: CrossDeviceOps,
        num_replicas: int | None = None,
    ) -> None:
        self._devices = devices
        self._cross_device_ops = cross_device_ops
        self._num_replicas = len(devices) if num_replicas is None else num_replicas

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """The algorithm that all reductions of the strategy use."""
        return self._cross_device_ops

    @property
    def worker_devices(self) -> tuple[Device, ...]:
        """The device of each replica of this process."""
        return self._devices

    @property
    def num_replicas(self) -> int:
        """How many replicas there are, in all processes."""
        return self._num_replicas

    @property
    def parameter_devices(self) -> tuple[Device, ...]:
        """The device of each copy of a variable."""
        return self._devices

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combines each distributed value of a structure and puts the result on `destinations`.

        A value that is the same on all replicas (a Mirrored, or one that is not distributed) is its own
        mean, minimum and maximum, and is returned unchanged. Its sum is refused, except for zeros.
        """
        check_cross_replica("reduce_to")
        op = ReduceOp(reduce_op)
        if isinstance(value, DistributedValues) and not isinstance(value, Mirrored):
            return self._cross_device_ops.reduce(op, value, destinations, options)
        reduce = functools.partial(self._cross_device_ops.reduce, op, options=options)
        return self._reduced(
            op, [(value, destinations)], lambda pairs: list(itertools.starmap(reduce, pairs))
        )[0]

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Does the same for many (value, destinations) pairs in one batch; no pairs give []."""
        op = ReduceOp(reduce_op)
        pairs = list(value_destination_pairs)
        for number, pair in enumerate(pairs):
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ConversionError(
                    f"pair {number} is a {type(pair).__name__}; expected a (value, destinations) tuple"
                )
        return self._reduced(op, pairs, lambda left: self._cross_device_ops.batch_reduce(op, left, options))

    def bind(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any = None,
        options: CommunicationOptions | None = None,
        *,
        out: Any = None,
    ) -> BoundReduction:
        """Prepares a reduction of these arrays by the strategy's algorithm, to be run many times."""
        return self._cross_device_ops.bind(reduce_op, value, destinations, options, out=out)

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Copies a value to each destination; a plain number is the same everywhere and stays one."""
        check_cross_replica("broadcast_to")
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
        """Calls `fn(copy, ...)` for each copy of a variable, with the matching components of the arguments.

        A PerReplica argument would make the copies differ: reduce it first. `group=False` gives the
        tuple of all results; otherwise arrays come back as Mirrored and anything else as None.
        """
        check_cross_replica("update")
        if not isinstance(var, DistributedVariable):
            raise ConversionError(
                f"update takes a variable of this strategy, got a {type(var).__name__}; "
                "make one with strategy.create_variable"
            )
        arguments = (tuple(args), dict(kwargs or {}))
        refuse_per_replica("update", var.name, arguments)
        results = [
            fn(copy, *own_args, **own_kwargs)
            for copy, (own_args, own_kwargs) in zip(var.values, spread(arguments, var.devices), strict=True)
        ]
        if len(results) == 1:
            return results[0]
        if not group:
            return tuple(results)
        arrays = [map_structure(_array_of, result) for result in results]
        if all(result is results[0] for result in results):
            return results[0]
        if all(is_array(leaf) for result in arrays for leaf in optree.tree_leaves(result)):
            return regroup(arrays, var.devices, wrap=Mirrored)
        return None

    def value_container(self, value: Any) -> Any:
        """The distributed variable that a copy belongs to; anything else is its own container."""
        return value.container if isinstance(value, ReplicaVariable) else value

    def _reduced(
        self,
        op: ReduceOp,
        pairs: Sequence[tuple[Any, Any]],
        reduce: Callable[[list[tuple[Any, Any]]], list[Any]],
    ) -> list[Any]:
        check_cross_replica("reduce_to")
        to_reduce: list[tuple[Any, Any]] = []
        spots: list[tuple[list[Any], int]] = []
        answers: list[tuple[list[Any], Any]] = []
        for value, destinations in pairs:
            read_destinations(destinations)
            leaves, structure = optree.tree_flatten(value, none_is_leaf=True)
            for position, leaf in enumerate(leaves):
                if isinstance(leaf, DistributedValues) and not isinstance(leaf, Mirrored):
                    spots.append((leaves, position))
                    to_reduce.append((leaf, destinations))
                else:
                    leaves[position] = self._same_everywhere(op, leaf, destinations)
            answers.append((leaves, structure))
        for (leaves, position), result in zip(spots, reduce(to_reduce), strict=True):
            leaves[position] = result
        return [optree.tree_unflatten(structure, leaves) for leaves, structure in answers]

    def _same_everywhere(self, op: ReduceOp, value: Any, destinations: Any) -> Any:
        if op in _IDEMPOTENT:
            if (
                self._num_replicas == 1
                and hasattr(value, "dtype")
                and not isinstance(value, DistributedValues)
            ):
                return self._cross_device_ops.reduce(op, value, destinations)  # as one replica's contribution
            return value
        if isinstance(value, Mirrored):
            raise ReduceOpError(
                f"{op.name} of a {type(value).__name__}: it is the same value on every replica, not one "
                "contribution of each; use MEAN, or hand over a PerReplica"
            )
        if op is ReduceOp.SUM and _is_zero(value):
            return value.copy() if isinstance(value, np.ndarray) else value
        if self._num_replicas > 1:
            raise ReduceOpError(
                f"{op.name} of a {type(value).__name__} that is not distributed: it is unclear whether each "
                f"of the {self._num_replicas} replicas contributes it; hand over a PerReplica"
            )
        return self._cross_device_ops.broadcast(value, destinations)


def _is_zero(value: Any) -> bool:
    if isinstance(value, NUMBERS):
        return value == 0
    return isinstance(value, np.ndarray) and not value.any()


def _array_of(leaf: Any) -> Any:
    return leaf.value() if isinstance(leaf, Variable) else leaf

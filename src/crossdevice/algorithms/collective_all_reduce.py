"""All-reduce over the devices of several processes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.errors import OptionError
from crossdevice.execution.differentiation import Calls
from crossdevice.execution.group_runner import GroupRunner
from crossdevice.execution.pending import finish_started
from crossdevice.execution.runner import LocalRunner
from crossdevice.plans.builder import PlanBuilder
from crossdevice.plans.steps import Buffer
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.values.device import Device
from crossdevice.values.options import CommunicationOptions, as_options
from crossdevice.values.quantities import counted
from crossdevice.values.replica_scope import check_cross_replica

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


def _in_turn(
    method: Callable[Concatenate[Any, Arguments], Answer],
) -> Callable[Concatenate[Any, Arguments], Answer]:
    """Counts a call in the order of the group, even if it is refused before ranks meet."""

    @functools.wraps(method)
    def made(self: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        group: ProcessGroup | None = self.group
        if group is None:
            return method(self, *args, **kwargs)
        finish_started(group)  # ranks make their calls in the order of their programs
        turn = group.turn
        outer = turn.has_begun
        try:
            turn.has_begun = False
            return method(self, *args, **kwargs)
        except BaseException as error:
            if not turn.has_begun:
                group.refuse(f"{type(error).__name__}: {error}")
            raise
        finally:
            turn.has_begun |= outer

    return made


class CollectiveAllReduce(CrossDeviceOps):
    """Sums the replicas of all processes of a group; every process gets the result on its own devices.

    Each process passes its own replicas and destinations. A reduce-scatter gives each process one shard of
    all replicas to combine; an all-gather distributes the results. This moves the bytes of a ring in two
    rounds. Without a group it reduces over the devices of this process.

    Args:
        devices: the devices of this process.
        group_size: the number of replicas of all processes; must be consistent with `devices` and `group`.
        options: the defaults for every call; options of a call take precedence.
        group: the processes that take part; `crossdevice.cluster_from_env().form_group()` makes one.

    Raises:
        OptionError: `group_size` does not fit the devices and the group, or an option is outside its range.
        DeviceError: a device name cannot be read.

    >>> import numpy as np
    >>> from crossdevice.testing import run_ranks
    >>> def program(group):
    ...     ops = CollectiveAllReduce(group=group)
    ...     return float(ops.reduce("sum", np.float32(group.rank + 1), "cpu:0"))
    >>> run_ranks(3, program)
    [6.0, 6.0, 6.0]
    """

    def __init__(
        self,
        devices: Sequence[Device | str] | None = None,
        group_size: int | None = None,
        options: CommunicationOptions | None = None,
        *,
        group: ProcessGroup | None = None,
    ) -> None:
        if group is not None and not isinstance(group, ProcessGroup):
            raise OptionError(f"group must be a ProcessGroup or None, got {type(group).__name__}")
        self.group = group
        self.options = as_options(options)
        if devices is not None and group_size is not None:
            num_devices = len(list(map(Device.parse, devices)))
            num_processes = 1 if group is None else group.size
            if group_size != num_devices * num_processes:
                raise OptionError(
                    f"group_size is {group_size}; {counted(num_devices, 'device')} in each of "
                    f"{counted(num_processes, 'process', 'processes')} are {num_devices * num_processes}"
                )

    reduce = _in_turn(CrossDeviceOps.reduce)
    batch_reduce = _in_turn(CrossDeviceOps.batch_reduce)
    gather = _in_turn(CrossDeviceOps.gather)
    reduce_scatter = _in_turn(CrossDeviceOps.reduce_scatter)
    all_to_all = _in_turn(CrossDeviceOps.all_to_all)

    @_in_turn
    def check_same(self, value: Any) -> None:
        """Compares the bits of the replicas of all processes; every process makes the call.

        Args:
            value: a DistributedValues, or a structure of them.

        Raises:
            BitsMismatchError: replicas differ, raised on every process.
            DeadlineError: other processes did not come in time.
            ProcessGroupError: a process of the group was lost.
        """
        if self.group is None:
            super().check_same(value)
        else:
            self.group.check_same(value)

    @_in_turn
    def value_of_rank(self, value: Any, rank: int, options: CommunicationOptions | None = None) -> Any:
        """Copies one process's value to every process of the group; all bring the same shapes and dtypes."""
        check_cross_replica("value_of_rank")
        runner = self._runner
        if not isinstance(runner, GroupRunner):
            return value
        return runner.between.value_of_rank(value, rank, runner.options_of(options))

    def plan_sum(self, build: PlanBuilder, destinations: Sequence[Device]) -> Sequence[Buffer]:
        """Plans the part of this process: each device sums its shard, and all get all shards."""
        sums = build.add_by_shards()
        return [build.join(sums, at=device) for device in destinations]

    def broadcast(
        self,
        tensor: Any,
        destinations: Any,
        *,
        options: CommunicationOptions | None = None,
        out: Any = None,
        from_rank: int | None = None,
    ) -> Any:
        """Copies a value to each destination.

        Args:
            tensor: an array, or a structure of arrays.
            destinations: the devices of this process for the copies.
            options: the deadline, and `share_results`.
            out: arrays for the copies instead of new ones.
            from_rank: the rank that provides the value. All processes bring a value of the same
                structure, shapes and dtypes. None copies this process's own, without communication.

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
        """
        if from_rank is not None:
            tensor = self.value_of_rank(tensor, from_rank, options)
        return super().broadcast(tensor, destinations, options=options, out=out)

    # ---------------------------------------------------------------- between processes

    @functools.cached_property
    def _runner(self) -> LocalRunner:
        if self.group is None:
            return LocalRunner(self, self._hooks, lambda: self._calls, self.options)
        alone = self._within_process()
        return GroupRunner(
            self.group, self, self._hooks, lambda: self._calls, lambda: alone._calls, self.options
        )

    def _within_process(self) -> CrossDeviceOps:
        """Returns the same algorithm with the same options, for the replicas of this process alone."""
        alone = copy.copy(self)
        alone.group = None
        return alone

    @property
    def _calls(self) -> Calls:
        return super()._calls._replace(rank=None if self.group is None else self.group.rank)


def group_of(ops: CrossDeviceOps) -> ProcessGroup | None:
    """Returns the processes that take part in an algorithm's calls; None if it works in this one alone."""
    return ops.group if isinstance(ops, CollectiveAllReduce) else None

"""The strategies for one process: one replica on each device, in a thread of its own, or on one device."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.backends.protocol import ThreadState
from crossdevice.backends.registry import backend_named
from crossdevice.choosing import choose_algorithm
from crossdevice.errors import OptionError
from crossdevice.strategies.base import Strategy
from crossdevice.strategies.data.input import ValueContext
from crossdevice.strategies.data.regrouping import (
    check_listed_arguments,
    checked_arguments,
    is_array,
    is_sparse,
    regroup,
    spread,
)
from crossdevice.strategies.extended import StrategyExtended
from crossdevice.strategies.running import loaded_libraries
from crossdevice.strategies.running.loaded_libraries import refuse_tracing
from crossdevice.strategies.running.place import enter_replica_context, run_of
from crossdevice.strategies.running.random_streams import RandomStreams
from crossdevice.strategies.running.rendezvous import Deadline, Rendezvous, ReplicaThreads, thread_state
from crossdevice.strategies.running.replica_context import ReplicaContext
from crossdevice.values.device import Device, check_listed, host_device
from crossdevice.values.options import CommunicationOptions, as_options
from crossdevice.values.quantities import counted
from crossdevice.values.reduce_op import ReduceOp

logger = logging.getLogger("crossdevice")


class MirroredStrategy(Strategy):
    """Runs a function on several devices at once, in threads of this process, and keeps variables in sync.

    Args:
        devices: names of devices, one replica for each; a name given twice gets two replicas. The default
            is all GPUs that PyTorch sees, if the program has imported it, or else one logical CPU device
            for each core that this process may use.
        cross_device_ops: the algorithm for all reductions; by default one is chosen, and `explain` says
            why.
        own_random_streams: whether replicas draw the same random numbers in every run with the same seeds,
            whatever their threads do. Replicas that share a generator, as all host devices do, then run one
            after another up to the next collective call, in replica order. They must not wait for each
            other in other ways. With PyTorch's generators each replica has its own stream, derived from the
            seed and the replica's number; with `np.random` and `random` replicas draw in turn. Replicas on
            different GPUs run at once, each with a stream of its GPU's generator, and share the host's
            generators. (JAX has keys instead of generators and does not need this.)

    Raises:
        DeviceError: a device name cannot be read, or there is no such device.
        OptionError: `devices` is empty, or `cross_device_ops` is no CrossDeviceOps.

    >>> from crossdevice import get_replica_context
    >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    >>> squares = strategy.run(lambda: get_replica_context().replica_id_in_sync_group + 1.0)
    >>> float(strategy.reduce("sum", squares, axis=None))
    3.0
    """

    def __init__(
        self,
        devices: Sequence[Device | str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        own_random_streams: bool = False,
    ) -> None:
        # The older tower objects hold one of today's.
        cross_device_ops = getattr(cross_device_ops, "cross_device_ops", cross_device_ops)
        if cross_device_ops is not None and not isinstance(cross_device_ops, CrossDeviceOps):
            found = type(cross_device_ops).__name__
            if type(cross_device_ops).__module__.startswith("tensorflow."):
                found = f"TensorFlow's {found}; take that of crossdevice"
            if isinstance(cross_device_ops, type):
                found = f"the class {cross_device_ops.__name__}; make one: {cross_device_ops.__name__}()"
            raise OptionError(f"cross_device_ops must be a CrossDeviceOps or None, got {found}")
        given = None if devices is None else _checked_devices(devices)
        self._devices = given or default_devices()
        self._are_devices_given = given is not None
        self._reason = "given to the strategy"
        if cross_device_ops is None:
            _, cross_device_ops, self._reason, _ = choose_algorithm(self._devices)
        self._idle: list[ReplicaThreads] = []
        self._own_random_streams = own_random_streams
        super().__init__(self._extended_of(cross_device_ops))
        logger.info("%s", self.explain())

    def _extended_of(self, ops: CrossDeviceOps) -> StrategyExtended:
        return StrategyExtended(self._devices, ops)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Calls `fn` once per replica, all at once, each in the thread of its device.

        Distributed arguments arrive as the replica's own components; results come back as PerReplica,
        and bare if there is one replica. An exception in one replica stops the others where they next
        meet, and is raised here. Contextvars, PyTorch's grad mode and JAX's settings are those of the caller.
        What JAX and TensorFlow make is on the replica's device, if devices were given to the strategy and
        arrays of that library were handed over before.

        Args:
            fn: the function, called with `args` and `kwargs`.
            args: its arguments; of distributed ones each replica gets its own component.
            kwargs: its keyword arguments, likewise.
            options: only `timeout_seconds` is used, a deadline for the whole run.

        Returns:
            A PerReplica of what the replicas returned; the bare result if there is one replica.

        Raises:
            ReplicaError: replicas make different numbers of calls.
            DeadlineError: replicas had not finished, or not met, in time.
            ContextError: it is called inside another strategy.

        >>> from crossdevice import PerReplica
        >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
        >>> strategy.run(lambda x: 2 * x, args=(PerReplica([1.0, 5.0]),)).values
        (2.0, 10.0)
        """
        check_listed_arguments(args)
        arguments = checked_arguments("run", args, kwargs)
        refuse_tracing("run")
        deadline = Deadline.after(as_options(options).timeout_seconds)
        with run_of(self), self._random_streams() as streams:
            threads = self._take_threads()
            rendezvous = Rendezvous(self._devices, threads, deadline, streams)
            results = rendezvous.lead(self._functions(fn, arguments, rendezvous))
        # Only threads of a run that went well are kept; those of any other are gone or on their way.
        self._idle.append(threads)
        return regroup(results, self._devices, among=self.num_replicas_in_sync)

    def _random_streams(self) -> contextlib.AbstractContextManager[RandomStreams | None]:
        if not self._own_random_streams or self.num_replicas_in_sync == 1:
            return contextlib.nullcontext()
        return contextlib.closing(RandomStreams(self._devices, self.first_replica))

    def explain(self) -> str:
        """Describes the devices, how values are reduced over them, and why.

        Returns:
            Text for people.

        >>> print(MirroredStrategy(["cpu:0"]).explain())
        MirroredStrategy over 1 replica: cpu:0
        ReductionToOneDevice: one replica, so values are only copied
        """
        number, ops = len(self._devices), self._extended.cross_device_ops
        replicas, names = counted(number, "replica"), ", ".join(map(str, self._devices))
        return f"MirroredStrategy over {replicas}: {names}\n{type(ops).__name__}: {self._reason}"

    def _functions(
        self, fn: Callable[..., Any], arguments: Any, rendezvous: Rendezvous
    ) -> list[Callable[[], Any]]:
        """Returns the call of each replica, in its own copy of the caller's contextvars."""
        enter = thread_state(self._devices, self._are_devices_given, arguments)
        spread_out = spread(arguments, self._devices) if any(arguments) else [arguments] * len(self._devices)
        replicas = [ReplicaContext(self, number, at, rendezvous) for number, at in enumerate(self._devices)]
        return [
            functools.partial(contextvars.copy_context().run, _call_as_replica, replica, enter, fn, *own)
            for replica, own in zip(replicas, spread_out, strict=True)
        ]

    def _take_threads(self) -> ReplicaThreads:
        """Takes waiting threads, or new ones at first, after a fork or a failure, and beside another run."""
        while True:
            try:
                threads = self._idle.pop()
            except IndexError:  # or another caller took the last
                return ReplicaThreads(self._devices)
            if threads.survived_fork:
                return threads

    def __getstate__(self) -> dict[str, Any]:
        """Returns everything but the threads; a copy makes its own."""
        return {**self.__dict__, "_idle": []}

    def __repr__(self) -> str:
        return f"MirroredStrategy({[str(device) for device in self._devices]})"


def _call_as_replica(
    context: ReplicaContext,
    enter: ThreadState | None,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    enter_replica_context(context)
    if enter is None:
        return fn(*args, **kwargs)
    with enter(*context.devices):
        return fn(*args, **kwargs)


def default_devices(process: int = 0, num_processes: int = 1) -> tuple[Device, ...]:
    """Returns all GPUs, or a logical device per core; one of several processes of a host gets its share."""
    num_gpus = loaded_libraries.num_torch_gpus()
    if num_gpus:
        own = range(process, num_gpus, num_processes) or [process % num_gpus]
        return tuple(Device("cuda", index) for index in own)
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    num_cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return tuple(host_device(index) for index in range(max(1, num_cores // num_processes)))


def _checked_devices(devices: Sequence[Device | str]) -> tuple[Device, ...]:
    check_listed(devices)
    read = tuple(Device.parse(device) for device in devices)
    library = "torch" if loaded_libraries.is_torch_loaded() else "numpy"
    for device in read:
        if device.is_host or loaded_libraries.is_torch_loaded():
            backend_named(library).check_device(device)
    return read


class OneDeviceExtended(StrategyExtended):
    """Calls that combine values of the one replica: whatever it has is the whole."""

    def _same_everywhere(self, op: ReduceOp, value: Any, destinations: Any) -> Any:
        return (
            super()._same_everywhere(op, value, destinations)
            if is_array(value) or is_sparse(value)
            else value
        )


class OneDeviceStrategy(MirroredStrategy):
    """One replica on one device: to try a program that is written for several.

    Args:
        device: the name of the device.

    Raises:
        DeviceError: a device name cannot be read, or there is no such device.

    >>> strategy = OneDeviceStrategy("cpu:1")
    >>> strategy.num_replicas_in_sync, strategy.run(lambda: 2.0)
    (1, 2.0)
    """

    def __init__(self, device: Device | str) -> None:
        super().__init__([device])

    def _extended_of(self, ops: CrossDeviceOps) -> StrategyExtended:
        return OneDeviceExtended(self._devices, ops)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Returns `value_fn(ValueContext())`: the one replica's value is bare.

        Args:
            value_fn: called once, with a ValueContext.

        Returns:
            What it returned.

        Raises:
            TypeError: it cannot be called.
        """
        return value_fn(ValueContext())

    def __repr__(self) -> str:
        return f"OneDeviceStrategy('{self._devices[0]}')"

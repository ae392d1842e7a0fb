"""Fault injection: delays, errors, wrong numbers and losses, for chosen replicas and calls."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import numbers
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.algorithms.collective_all_reduce import group_of
from crossdevice.backends.registry import backend_of_type
from crossdevice.errors import OptionError
from crossdevice.execution.bound import BoundCall
from crossdevice.execution.pending import start
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.process_groups.protocol import Message
from crossdevice.process_groups.shared.shared_arrays import NOWHERE
from crossdevice.strategies.base import Strategy
from crossdevice.strategies.data.regrouping import map_structure
from crossdevice.strategies.running.place import current_context
from crossdevice.values.delegation import operand_of
from crossdevice.values.device import device_of, host_device
from crossdevice.values.distributed import DistributedValues, IndexedSlices, PerReplica
from crossdevice.values.options import whole_number
from crossdevice.values.quantities import kind_text, there_are


@dataclasses.dataclass
class Injected:
    """Counter of a fault in this process, given to the block of `faults`.

    Args:
        count: how often the fault has happened.

    >>> import crossdevice as cd
    >>> from crossdevice.testing import faults
    >>> with faults(cd.RingAllReduce(), delay=0.0, raises=TimeoutError) as injected:
    ...     injected.count
    0
    """

    count: int = 0


@dataclasses.dataclass
class Fault:
    """A fault and the calls it strikes."""

    delay: float
    raises: BaseException | type[BaseException] | None
    corrupt: Callable[[Any], Any] | None
    drop: bool
    calls: frozenset[int] | None
    injected: Injected = dataclasses.field(default_factory=Injected)

    @property
    def strikes(self) -> bool:
        """True if the fault strikes before the call."""
        return self.delay > 0 or self.raises is not None

    def is_due(self, call: int) -> bool:
        """Returns True if the fault strikes this call."""
        return self.calls is None or call in self.calls

    def strike(self) -> None:
        """Counts, is late, and raises."""
        self.injected.count += 1
        time.sleep(self.delay)
        if self.raises is not None:
            raise self.raises

    def brought(self, value: Any, replica: int) -> Any:
        """Returns the value as a faulty replica brings it."""
        return map_structure(lambda leaf: self._brought(leaf, replica), value)

    def _brought(self, leaf: Any, replica: int) -> Any:
        is_distributed = isinstance(leaf, DistributedValues)
        values = list(leaf.values) if is_distributed else [leaf]
        if replica >= len(values):
            raise OptionError(
                f"replica {replica} is to be faulty, but the value has {len(values)} in this process"
            )
        if self.corrupt is not None:
            values[replica] = map_structure(self._corrupted, values[replica])
        if not is_distributed and not self.drop:
            return values[0]
        devices = list(leaf.devices) if is_distributed else []
        if self.drop:
            if len(values) == 1:
                raise OptionError("the only replica cannot be dropped")
            del values[replica], devices[replica]
        return PerReplica.of(tuple(values), tuple(devices))

    def _corrupted(self, array: Any) -> Any:
        assert self.corrupt is not None
        array = operand_of(array)
        if isinstance(array, IndexedSlices):
            return array.with_parts(self._corrupted(array.values), array.indices, array.dense_shape)
        backend = backend_of_type(type(array))
        copy = array if backend is None else backend.copy(array, device_of(array) or host_device(0))
        return self.corrupt(copy)


@contextlib.contextmanager
def replaced(target: Any, **methods: Any) -> Iterator[None]:
    """Gives an object other methods, or attributes, for a block."""
    attributes = vars(target)  # past `__setattr__`, for which they would be settings
    before = {name: attributes[name] for name in methods if name in attributes}
    attributes.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del attributes[name]
        attributes.update(before)


def faults(
    target: Strategy | CrossDeviceOps | ProcessGroup,
    *,
    replica: int | None = None,
    rank: int | None = None,
    delay: float = 0.0,
    raises: BaseException | type[BaseException] | None = None,
    corrupt: Callable[[Any], Any] | None = None,
    drop: bool = False,
    calls: Iterable[int] | None = None,
) -> contextlib.AbstractContextManager[Injected]:
    """Makes a strategy, an algorithm or a group faulty for a `with` block.

    On a strategy, calls are those of `run`, each with the reductions up to the next, and `replica` is a
    number among the replicas of all processes. On an algorithm, calls are those that combine replicas, and
    `replica` is a component of this process's values. On a group, all ranks enter the block with the same
    arguments, calls are those of the group, and `rank` says which of the ranks is to fail.

    Args:
        target: the strategy, algorithm or group that is to fail.
        replica: the number of the replica that fails, on a strategy or an algorithm.
        rank: the number of the rank that fails, on a group.
        delay: seconds by which the replica's function, the reduction, or the rank is late.
        raises: what is raised there, after the delay.
        corrupt: gets a copy of each array that the replica brings to a reduction or gather, and returns the
            one that is to take its place; on a group, of all bytes that the rank sends.
        drop: the replica's function is not called, the replica does not count in the reduction, or nothing
            that the rank sends arrives.
        calls: the numbers of the calls that go wrong, counted from 0 in the block; all by default.

    Returns:
        A context manager, which gives an `Injected`.

    Raises:
        OptionError: no fault was named, or an argument does not suit the target.

    >>> import numpy as np, crossdevice as cd
    >>> ops, value = cd.DirectAllReduce(), cd.PerReplica([np.float32([1, 2]), np.float32([3, 4])])
    >>> with faults(ops, replica=1, corrupt=lambda array: array * np.nan, calls=[1]) as injected:
    ...     [ops.reduce("sum", value, "cpu:0").tolist() for _ in range(3)]
    [[4.0, 6.0], [nan, nan], [4.0, 6.0]]
    >>> injected.count
    1
    """
    if corrupt is not None and not callable(corrupt):
        raise OptionError(f"corrupt must be a function of an array, got {corrupt!r}")
    kind = raises if isinstance(raises, type) else type(raises)
    if raises is not None and not issubclass(kind, BaseException):
        raise OptionError(f"raises must be an exception or a class of exceptions, got {raises!r}")
    numbered = None if calls is None else frozenset(whole_number("each of calls", call) for call in calls)
    fault = Fault(_checked_delay(delay), raises, corrupt, drop, numbered)
    if not (fault.strikes or corrupt or drop):
        raise OptionError("no fault was named; expected delay, raises, corrupt or drop")
    if isinstance(target, Strategy):
        _check_absent("rank", rank, "a strategy has replicas, numbered over all processes")
        return _in_strategy(target, _checked("replica", replica, target.num_replicas_in_sync), fault)
    if isinstance(target, CrossDeviceOps):
        group = group_of(target)
        is_meant = rank is None or group is None or group.rank == _checked("rank", rank, group.size)
        number = whole_number("replica", replica) if corrupt or drop else 0
        return _in_algorithm(target, number, fault) if is_meant else contextlib.nullcontext(Injected())
    if isinstance(target, ProcessGroup):
        _check_absent("replica", replica, "a group has ranks")
        is_meant = target.rank == _checked("rank", rank, target.size)
        return in_group(target, fault) if is_meant else contextlib.nullcontext(Injected())
    raise OptionError(f"faults happen in a strategy, an algorithm or a group; got {kind_text(target)}")


@contextlib.contextmanager
def _in_strategy(strategy: Strategy, replica: int, fault: Fault) -> Iterator[Injected]:
    run, call = strategy.run, -1

    def faulty_run(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal call
        call += 1

        @functools.wraps(fn)
        def as_replica(*own_args: Any, **own_kwargs: Any) -> Any:
            context = current_context()
            is_meant = context is not None and context.replica_id_in_sync_group == replica
            if is_meant and fault.is_due(call) and (fault.strikes or fault.drop):
                fault.strike()
                if fault.drop:
                    return None
            return fn(*own_args, **own_kwargs)

        return run(as_replica, *args, **kwargs)

    methods: Mapping[str, Callable[..., Any]] = {}
    own = replica - strategy.first_replica
    ops = strategy.extended.cross_device_ops
    if fault.corrupt is not None and 0 <= own < len(strategy.extended.worker_devices):
        in_reductions = dataclasses.replace(fault, delay=0.0, raises=None, drop=False)  # counts with it
        methods = _faulty_calls(ops, own, in_reductions, lambda: call >= 0 and fault.is_due(call))
    with replaced(strategy, run=faulty_run), replaced(ops, **methods):
        yield fault.injected


@contextlib.contextmanager
def _in_algorithm(ops: CrossDeviceOps, replica: int, fault: Fault) -> Iterator[Injected]:
    calls = itertools.count()
    with replaced(ops, **_faulty_calls(ops, replica, fault, lambda: fault.is_due(next(calls)))):
        yield fault.injected


def _faulty_calls(
    ops: CrossDeviceOps, replica: int, fault: Fault, is_due: Callable[[], bool]
) -> Mapping[str, Callable[..., Any]]:
    """Returns the calls of an algorithm as one with a faulty replica makes them."""

    def faulty(method: Callable[..., Any], name: str, brought: Callable[[Any], Any]) -> Callable[..., Any]:
        """Wraps a method; the argument of this name has the replicas' values."""
        signature = inspect.signature(method)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not is_due():
                return method(*args, **kwargs)
            fault.strike()
            bound = signature.bind(*args, **kwargs)
            bound.arguments[name] = brought(bound.arguments[name])
            weights = bound.arguments.get("weights")
            if fault.drop and weights is not None:
                bound.arguments["weights"] = [*weights[:replica], *weights[replica + 1 :]]
            return method(*bound.args, **bound.kwargs)

        return call

    def of_value(value: Any) -> Any:
        return fault.brought(value, replica)

    def of_pairs(pairs: Any) -> Any:
        return [(of_value(value), destinations) for value, destinations in pairs]

    values = _calls_of_values(ops)
    return {
        **{name: faulty(getattr(ops, name), "per_replica_value", of_value) for name in values},
        "batch_reduce": faulty(ops.batch_reduce, "value_destination_pairs", of_pairs),
        "_bind": lambda _, later: BoundCall(later, owner=ops._runner.owner),
        "_start": lambda _, later: start(later, ops._runner.owner),
    }


def _calls_of_values(ops: CrossDeviceOps) -> list[str]:
    """Returns the public calls that take one value of all replicas."""
    return [
        name
        for name, method in inspect.getmembers(type(ops), inspect.isfunction)
        if not name.startswith("_")
        and not name.endswith("_implementation")
        and name != "explain"
        and "per_replica_value" in inspect.signature(method).parameters
    ]


def _checked(name: str, given: int | None, count: int) -> int:
    number = whole_number(name, given)
    if number >= count:
        raise OptionError(f"{name} {number} does not exist: {there_are(count, name)}")
    return number


def _check_absent(name: str, given: int | None, why: str) -> None:
    if given is not None:
        raise OptionError(f"{name} was given, but {why}")


def _checked_delay(given: object) -> float:
    if isinstance(given, bool) or not isinstance(given, numbers.Real) or not 0 <= float(given) < math.inf:
        raise OptionError(f"delay must be a number of seconds, 0 or more; got {given!r}")
    return float(given)


@contextlib.contextmanager
def in_group(group: ProcessGroup, fault: Fault) -> Iterator[Injected]:
    """Makes calls of this rank faulty."""
    call, make_call, calls = group.call, group.make_call, itertools.count()

    @contextlib.contextmanager
    def due_fault() -> Iterator[None]:
        with contextlib.ExitStack() as changes:
            if fault.is_due(next(calls)):
                fault.strike()
                changes.enter_context(_faulty_engine(group, fault))
                changes.enter_context(_faulty_memory(group, fault))
            yield

    @contextlib.contextmanager
    def faulty_call(*args: Any, **kwargs: Any) -> Iterator[GroupCall]:
        with due_fault(), call(*args, **kwargs) as made:
            yield made

    def faulty_make_call(*args: Any, **kwargs: Any) -> Any:
        with due_fault():
            return make_call(*args, **kwargs)

    with replaced(group, call=faulty_call, make_call=faulty_make_call):
        yield fault.injected


def _faulty_engine(group: ProcessGroup, fault: Fault) -> contextlib.AbstractContextManager[None]:
    engine: Any = group._engine
    names = [name for name in ("exchange", "begin") if hasattr(engine, name)]

    def faulty(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(sends: Sequence[Message], *rest: Any) -> Any:
            if fault.drop:
                return method([], *rest)
            changed = [each._replace(memory=_changed(each.memory, fault)) for each in sends]
            return method(changed, *rest)

        return call

    return replaced(engine, **{name: faulty(getattr(engine, name)) for name in names})


@contextlib.contextmanager
def _faulty_memory(group: ProcessGroup, fault: Fault) -> Iterator[None]:
    shared = group._memory
    if shared is None or not (fault.drop or fault.corrupt):
        yield
    elif fault.drop:
        with replaced(shared.steps, post=shared.steps.withhold, come=shared.steps.withhold):
            yield
    else:

        def corrupt(shown: NDArray[Any]) -> None:
            shown.view(np.uint8)[:] = _changed(shown, fault)

        # Arrays in shared memory are the caller's own, so what others get of them goes through a window.
        with replaced(shared, on_shown=corrupt), replaced(shared.arrays, place_of=lambda _: NOWHERE):
            yield


def _changed(memory: NDArray[Any], fault: Fault) -> NDArray[np.uint8]:
    sent = memory.reshape(-1).view(np.uint8)
    if fault.corrupt is None:
        return sent
    return np.asarray(fault.corrupt(sent.copy()), np.uint8).reshape(sent.shape)

"""The current strategy: the one that was entered, the one that was set, or the default."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any

from crossdevice.algorithms.reduction_to_one_device import ReductionToOneDevice
from crossdevice.errors import ContextError, ConversionError, OptionError
from crossdevice.strategies.base import Strategy
from crossdevice.strategies.data.input import ValueContext
from crossdevice.strategies.data.regrouping import check_listed_arguments, checked_arguments
from crossdevice.strategies.extended import StrategyExtended, grouped
from crossdevice.strategies.running.loaded_libraries import refuse_recomputing
from crossdevice.strategies.running.place import (
    check_same,
    current_context,
    current_strategy,
    outside_of_replicas,
)
from crossdevice.strategies.running.replica_context import ReplicaContext
from crossdevice.strategies.variables.distributed_variable import DistributedVariable
from crossdevice.values.device import host_device
from crossdevice.values.options import CommunicationOptions, as_options, either
from crossdevice.values.quantities import kind_text
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.replica_scope import RUNNING_CODE, RunningCode, running_as


class DefaultExtended(StrategyExtended):
    """The extended calls for one replica: values are their own reductions."""

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,  # noqa: ARG002
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
        weights: Any = None,
    ) -> Any:
        """Returns the value unchanged."""
        _check(reduce_op, either(options, experimental_hints), weights)
        return value

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
        weights: Any = None,
    ) -> list[Any]:
        """Returns the values unchanged."""
        _check(reduce_op, either(options, experimental_hints), weights)
        return [value for value, _ in value_destination_pairs]

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Refuses: there is no other destination."""
        raise NotImplementedError("broadcast_to needs a strategy; use crossdevice.broadcast without one")

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn` on the variable itself."""
        return grouped([fn(var, *args, **(kwargs or {}))], self._devices, group)

    def update_non_slot(
        self,
        colocate_with: Any,  # noqa: ARG002
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn`."""
        return grouped([fn(*args, **(kwargs or {}))], self._devices, group)

    def variable_created_in_scope(self, v: Any) -> bool:
        """Returns whether a variable belongs to no strategy."""
        return not isinstance(self.value_container(v), DistributedVariable)


class DefaultStrategy(Strategy):
    """One replica in the calling thread; `get_strategy()` returns it where no strategy was entered."""

    def __init__(self) -> None:
        super().__init__(DefaultExtended((host_device(0),), ReductionToOneDevice()))

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: CommunicationOptions | None = None,  # noqa: ARG002
    ) -> Any:
        """Calls the function."""
        check_listed_arguments(args)
        check_same(self, "run")
        with running_as(RunningCode()):  # as without a strategy, in a merge function too
            return fn(*args, **(kwargs or {}))

    def scope(self) -> AbstractContextManager[Strategy]:
        """Returns a block without effect; refused inside the scope of another strategy."""
        check_same(self, "scope")
        return nullcontext(self)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Returns `value_fn(ValueContext())`: the one replica's value is bare."""
        return value_fn(ValueContext())

    def __repr__(self) -> str:
        return "the default strategy"


class LoneReplicaContext(ReplicaContext):
    """The context of the one replica: its calls return at once."""

    __slots__ = ()

    def __init__(self, strategy: Strategy) -> None:
        # No rendezvous: there are no other replicas.
        self._strategy, self._replica, self._device = strategy, 0, host_device(0)

    def _collective(self, name: str, details: tuple[Any, ...], value: Any, *_: Any) -> Any:  # noqa: ARG002
        """Returns the value unchanged."""
        return value

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls `merge_fn(strategy, ...)` at once."""
        own_args, own_kwargs = checked_arguments("merge_call", args, kwargs)
        with outside_of_replicas(self._strategy):
            return merge_fn(self._strategy, *own_args, **own_kwargs)


DEFAULT_STRATEGY = DefaultStrategy()
DEFAULT_CONTEXT = LoneReplicaContext(DEFAULT_STRATEGY)


def _check(reduce_op: ReduceOp | str, options: Any, weights: Any) -> None:
    ReduceOp(reduce_op), as_options(options)
    if weights is not None:
        raise OptionError("weights without a strategy: there is one replica, whose values stay as they are")


def get_strategy() -> Strategy:
    """Returns the current strategy.

    Returns:
        A Strategy; outside of any scope, a default strategy with a single replica.

    >>> from crossdevice import MirroredStrategy
    >>> with MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    ...     get_strategy().num_replicas_in_sync
    2
    """
    if (entered := current_strategy()) is not None:
        return entered
    refuse_recomputing("get_strategy")
    return DEFAULT_STRATEGY


def has_strategy() -> bool:
    """Returns whether the code runs inside a strategy's `scope` or `run`.

    Returns:
        True or False.

    >>> from crossdevice import MirroredStrategy
    >>> with MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    ...     inside = has_strategy()
    >>> inside, has_strategy()
    (True, False)
    """
    return current_strategy() not in (None, DEFAULT_STRATEGY)


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Makes a strategy the current one without a `with` block, until this is called again.

    Args:
        strategy: the strategy; None for none.

    Raises:
        ContextError: it is called inside a replica function.

    >>> from crossdevice import OneDeviceStrategy
    >>> experimental_set_strategy(OneDeviceStrategy("cpu:0"))
    >>> get_strategy()
    OneDeviceStrategy('cpu:0')
    >>> experimental_set_strategy(None)
    """
    if strategy is not None and not isinstance(strategy, Strategy):
        raise ConversionError(
            f"experimental_set_strategy takes a strategy or None, got {kind_text(strategy)}"
        )
    code = RUNNING_CODE.get()
    # What an earlier call has set may be replaced, what a `with` block has entered may not.
    if code.strategy is not None and code is not _set_code.get():
        raise ContextError(f"experimental_set_strategy was called inside the scope of {code.strategy}")
    chosen = RunningCode(strategy)
    RUNNING_CODE.set(chosen)
    _set_code.set(chosen)


_set_code: ContextVar[RunningCode | None] = ContextVar("crossdevice_set", default=None)


def get_replica_context() -> ReplicaContext | Any:  # with None, each call in a replica would need a check
    """Returns the running replica.

    Returns:
        A ReplicaContext; None in the cross-replica context; that of a default replica outside of any
        strategy.

    >>> from crossdevice import MirroredStrategy
    >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    >>> strategy.run(lambda: get_replica_context().replica_id_in_sync_group).values
    (0, 1)
    """
    if current_strategy() is not None:
        return current_context()
    refuse_recomputing("get_replica_context")
    return DEFAULT_CONTEXT


def in_cross_replica_context() -> bool:
    """Returns whether the code runs once for all replicas: in a strategy's scope and in merge functions.

    Returns:
        True or False.

    >>> from crossdevice import MirroredStrategy
    >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    >>> with strategy.scope():
    ...     in_cross_replica_context(), strategy.run(in_cross_replica_context).values
    (True, (False, False))
    """
    return get_replica_context() is None

"""Asking where one is: under which strategy, in which replica."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from crossdevice.errors import ContextError, ConversionError
from crossdevice.strategies.base import Strategy
from crossdevice.strategies.default_strategy import DEFAULT_CONTEXT, DEFAULT_STRATEGY
from crossdevice.strategies.running.place import current_context, current_strategy
from crossdevice.strategies.running.recomputing import refuse_recomputing
from crossdevice.strategies.running.replica_context import ReplicaContext
from crossdevice.values.replica_scope import RUNNING_CODE, RunningCode


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
            f"experimental_set_strategy takes a strategy or None, got a {type(strategy).__name__}"
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

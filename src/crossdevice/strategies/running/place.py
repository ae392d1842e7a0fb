"""Entry to and exit from strategies and replicas, with checks of where that is allowed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from crossdevice.errors import ContextError
from crossdevice.values.replica_scope import RUNNING_CODE, RunningCode, check_cross_replica, running_as

if TYPE_CHECKING:
    from crossdevice.strategies.base import Strategy
    from crossdevice.strategies.running.replica_context import ReplicaContext


def current_strategy() -> Strategy | None:
    """Returns the strategy that was entered, by its scope or its run."""
    entered: Strategy | None = RUNNING_CODE.get().strategy
    return entered


def current_context() -> ReplicaContext | None:
    """Returns the context of the running replica; None in the cross-replica context."""
    running: ReplicaContext | None = RUNNING_CODE.get().context
    return running


@contextlib.contextmanager
def scope_of(strategy: Strategy) -> Iterator[Strategy]:
    """Makes a strategy the current one; the same one may be entered again, another may not."""
    code = RUNNING_CODE.get()
    check_same(strategy, "scope")
    if code.context is not None:
        raise ContextError(f"scope was entered inside {code.context}; enter it outside of replica functions")
    with running_as(code._replace(strategy=strategy)):
        yield strategy


def run_of(strategy: Strategy) -> contextlib.AbstractContextManager[None]:
    """Returns a block in which a strategy's replicas run; refused inside a replica."""
    code = RUNNING_CODE.get()
    check_same(strategy, "run")
    if code.context is not None:
        raise ContextError(f"run was called inside {code.context}; call it outside, or in a merge_call")
    return running_as(RunningCode(strategy))


def outside_of_replicas(strategy: Strategy) -> contextlib.AbstractContextManager[None]:
    """Enters the cross-replica context from a replica that acts for all."""
    return running_as(RunningCode(strategy))


def update_of(strategy: Strategy | None, copy: int) -> contextlib.AbstractContextManager[None]:
    """Enters the cross-replica context; distributed values and variables stand for this one component."""
    return running_as(RunningCode(strategy, updating=copy))


def enter_replica_context(context: ReplicaContext) -> None:
    """Makes the running contextvars context one replica's; each replica has a copy of its own."""
    RUNNING_CODE.set(RunningCode(context.strategy, context.local_replica, context))


def check_cross_replica_of(strategy: Strategy | None, call: str) -> None:
    """Refuses a call inside a replica, or inside the scope of another strategy."""
    check_cross_replica(call)
    if strategy is not None:
        check_same(strategy, call)


def check_same(strategy: Strategy, call: str) -> None:
    """Refuses a call of a strategy inside the scope of another."""
    entered = current_strategy()
    if entered is not None and entered is not strategy:
        raise ContextError(f"{call} of {strategy} inside the scope of {entered}; strategies do not nest")

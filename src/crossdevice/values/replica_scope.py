"""The running strategy and replica of this thread, if any."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

from crossdevice.errors import ContextError

Value = TypeVar("Value")


@contextlib.contextmanager
def set_within(variable: contextvars.ContextVar[Value], value: Value) -> Iterator[None]:
    """Sets a variable for the length of a `with` block, whatever interrupts it.

    >>> variable = contextvars.ContextVar("variable", default=0)
    >>> with set_within(variable, 1):
    ...     variable.get()
    1
    >>> variable.get()
    0
    """
    before = variable.get()
    # Set only inside `try`, and restored twice: Ctrl-C may come in the first `finally`, too. If it comes in
    # `with` itself, this generator is collected, which ends it as well; the old value serves there, where
    # a token might belong to another context.
    try:
        try:
            variable.set(value)
            yield
        finally:
            variable.set(before)
    except BaseException:
        variable.set(before)
        raise


class RunningCode(NamedTuple):
    """The strategy that was entered, the replica and its context (None across replicas).

    `updating` is the number of the copy that `extended.update` has come to, in the cross-replica context.
    Strategies lie above this module, which only hands theirs back.
    """

    strategy: Any = None
    replica: int | None = None
    context: Any = None
    updating: int | None = None


_NOBODYS = RunningCode()

RUNNING_CODE: ContextVar[RunningCode] = ContextVar("crossdevice_running_code", default=_NOBODYS)
"""The one place that knows; `strategies/running/place.py` changes it."""


def current_replica() -> int | None:
    """Returns the running replica, or None in the cross-replica context."""
    return RUNNING_CODE.get().replica


def current_component() -> int | None:
    """Returns the component that distributed values stand for: of the running replica or running update."""
    code = RUNNING_CODE.get()
    return code.updating if code.replica is None else code.replica


def running_as(code: RunningCode) -> AbstractContextManager[None]:
    """Runs a block as this code."""
    return set_within(RUNNING_CODE, code)


def replica_scope(replica: int | None) -> AbstractContextManager[None]:
    """Runs a block as this replica's; None leaves the replica context again."""
    return running_as(RUNNING_CODE.get()._replace(replica=replica))


def check_cross_replica(call: str) -> None:
    """Refuses a call that only the cross-replica context may make."""
    replica = RUNNING_CODE.get().replica
    if replica is not None:
        raise ContextError(
            f"{call} was called inside replica {replica}; it combines all replicas, so call it outside "
            "of replica functions (inside one, use the replica context's all_reduce or merge_call)"
        )

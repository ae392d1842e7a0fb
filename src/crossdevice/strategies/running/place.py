"""Under which strategy the running code is, and as which of its replicas."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

from crossdevice.errors import ContextError
from crossdevice.values.replica_scope import enter_replica
from crossdevice.values.variable import variables_made_by

if TYPE_CHECKING:
    from crossdevice.strategies.base import Strategy
    from crossdevice.strategies.running.replica_context import ReplicaContext


class Place(NamedTuple):
    """The strategy, the replica context (None in the cross-replica context), and whether it is in a run."""

    strategy: Strategy | None = None
    context: ReplicaContext | None = None
    is_in_run: bool = False


_place: contextvars.ContextVar[Place] = contextvars.ContextVar("crossdevice_place", default=Place())  # noqa: B039 - immutable


def current_place() -> Place:
    """Where the running code is."""
    return _place.get()


@contextlib.contextmanager
def scope_of(strategy: Strategy) -> Iterator[Strategy]:
    """Makes a strategy the current one; the same one may be entered again, another may not."""
    place = _place.get()
    _check_same(place, strategy, "scope")
    if place.context is not None:
        raise ContextError(f"scope was entered inside {place.context}; enter it outside of replica functions")
    with _at(place._replace(strategy=strategy)), variables_made_by(strategy.create_variable):
        yield strategy


def enter_run(strategy: Strategy) -> contextvars.Token[Place]:
    """Marks that a strategy's replicas are running, until `leave_run`; refuses runs inside of runs."""
    place = _place.get()
    _check_same(place, strategy, "run")
    if place.context is not None:
        raise ContextError(f"run was called inside {place.context}; runs do not nest")
    if place.is_in_run:
        raise ContextError("run was called in a merge function of another run; runs do not nest")
    return _place.set(Place(strategy, None, True))


def leave_run(token: contextvars.Token[Place]) -> None:
    """Goes back to where `enter_run` was called."""
    _place.reset(token)


def outside_of_replicas(strategy: Strategy) -> AbstractContextManager[None]:
    """The cross-replica context, entered by a replica that speaks for all."""
    return _at(Place(strategy))


def enter_replica_context(context: ReplicaContext) -> None:
    """Makes the running contextvars context one replica's; each replica has a copy of its own."""
    enter_replica(context.local_replica)
    _place.set(Place(context.strategy, context, True))


@contextlib.contextmanager
def _at(place: Place) -> Iterator[None]:
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def _check_same(place: Place, strategy: Strategy, call: str) -> None:
    if place.strategy is not None and place.strategy is not strategy:
        raise ContextError(
            f"{call} of {strategy} inside the scope of {place.strategy}; strategies do not nest"
        )

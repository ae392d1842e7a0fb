"""Which replica the running code belongs to, if any."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from crossdevice.errors import ContextError

_replica: contextvars.ContextVar[int | None] = contextvars.ContextVar("crossdevice_replica", default=None)


def current_replica() -> int | None:
    """The replica whose function is running, or None in the cross-replica context."""
    return _replica.get()


@contextlib.contextmanager
def replica_scope(replica: int | None) -> Iterator[None]:
    """Runs a block as this replica's; None leaves the replica context again."""
    token = _replica.set(replica)
    try:
        yield
    finally:
        _replica.reset(token)


def enter_replica(replica: int) -> None:
    """Makes the running contextvars context this replica's, for as long as the context lasts."""
    _replica.set(replica)


def check_cross_replica(call: str) -> None:
    """Refuses a call that only the cross-replica context may make."""
    replica = _replica.get()
    if replica is not None:
        raise ContextError(
            f"{call} was called inside replica {replica}; it combines all replicas, so call it outside "
            "of replica functions (inside one, use the replica context's all_reduce or merge_call)"
        )

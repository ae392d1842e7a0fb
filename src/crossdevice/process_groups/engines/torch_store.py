"""The store of torch.distributed in which ranks meet: reached, or kept, within a deadline."""

from __future__ import annotations

import ctypes
import functools
import ipaddress
import logging
import re
import socket
import time
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from crossdevice import runtime
from crossdevice.errors import ProcessGroupError
from crossdevice.process_groups.background import TimedCalls
from crossdevice.process_groups.group import LONGEST_SECONDS
from crossdevice.process_groups.notes.introduction import key_from_env

logger = logging.getLogger("crossdevice")

PAUSE_SECONDS = 0.05
"""Time between two attempts to reach a store."""

ANSWER_SECONDS = 2.0
"""Time for a store to answer at a port that is taken."""

MAX_WAITING = 1024
"""Ranks that may knock at once."""

_open_stores: dict[tuple[str, int], dist.Store] = {}
_threaded: weakref.WeakSet[Any] = weakref.WeakSet()


def leave_behind_at_fork(thing: Any) -> None:
    """Keeps an object of PyTorch with threads alive in forked processes, where it cannot be destroyed.

    Its destructor waits for its threads, which are in the process that forked.
    """
    _threaded.add(thing)


def _outlive() -> None:
    for thing in list(_threaded):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


runtime.renew_after_fork(_outlive)


def store_at(address: str, port: int, *, is_keeper: bool, timeout_seconds: float) -> dist.Store:
    """Returns the store at an address, one per process; the process that hosts it keeps it until it ends."""
    if (address, port) not in _open_stores:
        if not key_from_env():
            _say_unauthenticated(is_loopback(address))
        deadline = TimedCalls(timeout_seconds)
        try:
            store = deadline.make(lambda: _opened(address, port, is_keeper, deadline))
        except (RuntimeError, OSError) as error:
            what = (
                "be kept: is this the address of this host, is the port free, and is no other process rank 0?"
                if is_keeper
                else "be reached: is rank 0 there, and has it been started?"
            )
            raise ProcessGroupError(
                f"the store at {address}:{port}, where ranks meet, could not {what} ({reason_of(error)})"
            ) from None
        leave_behind_at_fork(store)
        _open_stores.setdefault((address, port), store)
    return _open_stores[address, port]


def store_of_another(address: str, port: int) -> dist.Store | None:
    """Returns the store that another process keeps at an address; None if there is none."""
    deadline = TimedCalls(ANSWER_SECONDS)
    try:
        store: dist.Store = deadline.make(lambda: _opened(address, port, False, deadline))
    except (RuntimeError, OSError):
        return None
    leave_behind_at_fork(store)
    return store


def default_store() -> dist.Store | None:
    """Returns the store of torch.distributed's default group, if this process has formed it."""
    if dist.is_available() and dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    return None


def is_loopback(address: str) -> bool:
    """Returns True if the address is a loopback address."""
    try:
        return address == "localhost" or ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def reason_of(error: Exception) -> str:
    """Extracts the informative sentence of an error, without gloo's source lines or advice."""
    first_line = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[[^]]*\] ", "", first_line).partition(". This is typically")[0]


def _opened(address: str, port: int, is_keeper: bool, deadline: TimedCalls) -> dist.Store:
    listening = _listening_socket(address, port) if is_keeper else None
    if not is_keeper:
        _wait_for_listener(address, port, deadline)
    # As torch.distributed does it, so that a default group may be formed at the same port.
    return dist.TCPStore(
        address,
        port,
        is_master=is_keeper,
        timeout=timedelta(seconds=min(max(deadline.seconds_left(), 1.0), LONGEST_SECONDS)),
        wait_for_workers=False,
        multi_tenant=True,
        **({} if listening is None else {"master_listen_fd": listening}),
    )


def _listening_socket(address: str, port: int) -> int | None:
    """Returns a socket that listens on this address only; None if PyTorch is to listen everywhere.

    That is for names, which often lead a host to itself (127.0.1.1) and others elsewhere, for addresses
    that others reach through a gateway, and for a port at which this process has a store already.
    """
    host = "127.0.0.1" if address == "localhost" else address
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=MAX_WAITING).detach()
    except (ValueError, OSError):
        return None


def _wait_for_listener(address: str, port: int, deadline: TimedCalls) -> None:
    """Knocks until somebody listens. PyTorch would do so past its deadline, and print pages about it."""
    while (error := _refusal(address, port, deadline.seconds_left())) is not None:
        if deadline.seconds_left() < PAUSE_SECONDS:
            raise error
        time.sleep(PAUSE_SECONDS)


def _refusal(address: str, port: int, seconds: float) -> OSError | None:
    try:
        socket.create_connection((address, port), max(seconds, PAUSE_SECONDS)).close()
    except OSError as error:
        return error
    return None


@functools.cache
def _say_unauthenticated(is_alone: bool) -> None:
    logger.warning(
        "ranks are not authenticated: whoever can reach the store%s can join or break a group; set %s to the "
        "same secret on all of them (SECURITY.md)",
        ", which any user of this host can," if is_alone else "",
        runtime.GROUP_KEY.variable,
    )

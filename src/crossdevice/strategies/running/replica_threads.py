"""Threads of replicas: one each, kept from run to run, and the settings they take over from their caller."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from queue import SimpleQueue
from typing import Any

import optree

from crossdevice.backends.protocol import ThreadState
from crossdevice.backends.registry import backend_of_type, loaded_backends
from crossdevice.strategies.running import loaded_libraries
from crossdevice.values.device import Device
from crossdevice.values.distributed import DistributedValues


class ReplicaThreads:
    """One thread per replica, each waiting for work in its inbox; None in it sends the thread away.

    An inbox costs a tenth of a `Condition`, needs no lock of ours and can be filled from a finalizer.
    While a thread works, its inbox carries the answers to the calls the work makes.

    Idle threads hold on to nothing but their inboxes, so they leave when this object is collected;
    they are daemons, so they never keep the interpreter from exiting.
    """

    def __init__(self, devices: Sequence[Device]) -> None:
        self.inboxes: list[SimpleQueue[Any]] = [SimpleQueue() for _ in devices]
        self._process_id = os.getpid()
        self._send_away = weakref.finalize(self, _send_away, self.inboxes)
        self._send_away.atexit = False
        self._threads = [
            threading.Thread(target=_serve, args=(inbox,), name=f"replica {replica} ({device})", daemon=True)
            for replica, (inbox, device) in enumerate(zip(self.inboxes, devices, strict=True))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def survived_fork(self) -> bool:
        """True in the process that started the threads: a fork does not copy them."""
        return self._process_id == os.getpid()

    def send_away(self, patience_seconds: float) -> list[int]:
        """Ends all threads; returns the replicas with threads still busy when patience ran out.

        Python cannot end a busy thread from outside: it leaves by itself once its work is done.
        """
        self._send_away()
        out_of_patience = time.monotonic() + patience_seconds
        for thread in self._threads:
            thread.join(max(0.0, out_of_patience - time.monotonic()))
        return [replica for replica, thread in enumerate(self._threads) if thread.is_alive()]

    def place_of(self, replica: int) -> str:
        """Returns the line a replica's thread is executing, for messages; empty if that cannot be told."""
        frames: dict[Any, Any] = getattr(sys, "_current_frames", dict)()  # not every Python has it
        frame = frames.get(self._threads[replica].ident)
        if frame is None:
            return ""
        code = frame.f_code
        return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"


def _serve(inbox: SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := inbox.get()) is not None:
        work()
        del work  # an idle thread must not keep the last run's arrays alive


def _send_away(inboxes: Sequence[SimpleQueue[Any]]) -> None:
    for inbox in inboxes:
        inbox.put(None)


def thread_state(devices: Sequence[Device], are_given: bool, arguments: Any) -> ThreadState | None:
    """Returns the context to enter on replicas' threads with these arguments; None if there is none.

    PyTorch is asked if the program has imported it. JAX and TensorFlow would start if they were asked, and
    take memory of every GPU, so they are asked once arrays of theirs were handed over.

    Args:
        are_given: whether the program named the devices. Otherwise they may be the host's only because
            PyTorch was not asked for GPUs.
    """
    for leaf in optree.tree_leaves(arguments):
        is_own = isinstance(leaf, DistributedValues) and leaf.values
        backend_of_type(type(leaf.values[0] if is_own else leaf))  # which loads it
    places = devices if are_given else ()
    read = [
        loaded_libraries.torch_thread_state(devices),
        *(each.thread_state(places) for each in loaded_backends()),
    ]
    states = [state for state in read if state is not None]
    if len(states) < 2:
        return states[0] if states else None

    def enter(device: Device) -> AbstractContextManager[Any]:
        stack = ExitStack()
        for state in states:
            stack.enter_context(state(device))
        return stack

    return enter

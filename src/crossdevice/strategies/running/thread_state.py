"""Initial state of a replica's thread: settings of its caller, and its own device, in every library."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import optree

from crossdevice.backends.protocol import ThreadState
from crossdevice.backends.registry import backend_of_type, loaded_backends
from crossdevice.strategies.running import loaded_torch
from crossdevice.values.device import Device
from crossdevice.values.distributed import DistributedValues


def thread_state(devices: Sequence[Device], are_given: bool, arguments: Any) -> ThreadState | None:
    """Returns the context to enter on replicas' threads with these arguments; None if there is none.

    PyTorch is asked if the program has imported it. JAX and TensorFlow would start if they were asked, and
    take memory of every GPU, so they are asked once arrays of theirs were handed over.

    Args:
        are_given: whether the program named the devices. Where it did not they may be the host's, on which
            nobody wants to work who has a GPU that PyTorch was not asked for.
    """
    for leaf in optree.tree_leaves(arguments):
        is_own = isinstance(leaf, DistributedValues) and leaf.values
        backend_of_type(type(leaf.values[0] if is_own else leaf))  # which loads it
    places = devices if are_given else ()
    read = [loaded_torch.thread_state(devices), *(each.thread_state(places) for each in loaded_backends())]
    states = [state for state in read if state is not None]
    if len(states) < 2:
        return states[0] if states else None

    def enter(device: Device) -> AbstractContextManager[Any]:
        stack = ExitStack()
        for state in states:
            stack.enter_context(state(device))
        return stack

    return enter

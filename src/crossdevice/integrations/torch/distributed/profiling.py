"""Events of PyTorch's profiler: calls that skip `c10d`'s operators have to be shown by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.autograd import _record_function_with_args_enter, _record_function_with_args_exit

from crossdevice.process_groups.background import BackgroundThread

EVENT_SECONDS = 1.0
"""Wait for the end of an event."""

_ending = BackgroundThread("crossdevice profiler events")


def recorded(name: str, tensors: Sequence[torch.Tensor], call: Callable[[], None]) -> Callable[[], None]:
    """The same call within an event that begins now, and is asynchronous: it ends in another thread."""
    event = _record_function_with_args_enter(f"crossdevice:{name}", *tensors)

    def run() -> None:
        try:
            call()
        finally:
            _ending.submit(lambda: _record_function_with_args_exit(event)).wait(EVENT_SECONDS)

    return run


def ended_elsewhere(name: str, tensors: Sequence[torch.Tensor], begin: Callable[[], dist.Work]) -> dist.Work:
    """Begins a call of another engine within an event, which is over when that has taken it over."""
    event = _record_function_with_args_enter(f"crossdevice:{name}", *tensors)
    try:
        return begin()
    finally:
        _ending.submit(lambda: _record_function_with_args_exit(event)).wait(EVENT_SECONDS)

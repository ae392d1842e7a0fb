"""Forward passes, backward passes and copies in `crossdevice.trace` and in `torch.profiler`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from crossdevice.execution.tracing import Phase, Work, flight_recorder, now, recorded
from crossdevice.strategies.running.loaded_libraries import BACKWARD_PASSES
from crossdevice.values.device import Device


@contextlib.contextmanager
def span(phase: Phase, name: str, devices: tuple[Device, ...], num_bytes: int = 0) -> Iterator[None]:
    """Records the block in both, under the same name."""
    with (
        torch.profiler.record_function(f"crossdevice.{name}"),
        recorded(Work(phase, name, devices, num_bytes)),
    ):
        yield


def watch_backward(
    outputs: Any,
    devices: tuple[Device, ...],
    then: Callable[[], None] = lambda: None,
    *,
    is_of_replicas: bool = False,
) -> None:
    """Records every backward pass from these outputs, from the first gradient to the end; then `then`.

    In passes through what replicas have computed, code outside of replica functions is not a lone replica.
    """
    # Not leaves: those outlive the call, and would collect hooks.
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.grad_fn]
    if not tensors:
        return
    started: list[Any] = []

    def begin(_: torch.Tensor) -> None:
        if not started:
            name = torch.profiler.record_function("crossdevice.backward")
            name.__enter__()
            number = torch._C._current_graph_task_id()
            started.extend((now(), name, number))
            if is_of_replicas:
                BACKWARD_PASSES.add(number)
            # Called when the whole backward pass has ended, not this tensor's part of it.
            torch.autograd.Variable._execution_engine.queue_callback(end)

    def end() -> None:
        begun, name, number = started
        started.clear()
        BACKWARD_PASSES.discard(number)
        then()
        name.__exit__(None, None, None)
        flight_recorder.events.append((Work("backward", "backward", devices), begun, now(), 1))

    for tensor in tensors:
        tensor.register_hook(begin)

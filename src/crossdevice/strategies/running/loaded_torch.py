"""Questions to PyTorch, asked only if the program has imported it already."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from crossdevice.backends.protocol import ThreadState
from crossdevice.values.device import Device


def is_loaded() -> bool:
    """True if the program uses PyTorch."""
    return loaded() is not None


def num_gpus() -> int:
    """Counts the GPUs PyTorch sees; 0 if the program does not use it."""
    torch = loaded()
    return 0 if torch is None else int(torch.cuda.device_count())


def thread_state(devices: Sequence[Device]) -> ThreadState | None:
    """Returns settings per thread that replicas inherit: grad and inference mode, autocast, streams.

    A replica on a GPU also has that GPU as its current one, so that `"cuda"` means its own, and works on the
    caller's stream there, where its values are combined. None if there is nothing to inherit.
    """
    torch = loaded()
    if torch is None:
        return None
    records, infers = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = filter(torch.is_autocast_enabled, ("cpu", "cuda"))
    dtypes = {kind: torch.get_autocast_dtype(kind) for kind in casts}
    streams = {device: torch.cuda.current_stream(device.index) for device in devices if device.type == "cuda"}
    if records and not infers and not dtypes and not streams:
        return None

    def enter(device: Device) -> AbstractContextManager[Any]:
        stack = ExitStack()
        if device in streams:
            stack.enter_context(torch.cuda.device(device.index))
            stack.enter_context(torch.cuda.stream(streams[device]))
        if infers:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(records))
        for kind, dtype in dtypes.items():
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        return stack

    return enter


def loaded() -> Any:
    """PyTorch if it is completely imported, else None."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "set_grad_enabled") else None

"""Questions to PyTorch, TensorFlow and JAX, asked only if the program has imported them already."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from crossdevice.backends.protocol import ThreadState
from crossdevice.errors import ContextError
from crossdevice.values.device import Device


def is_torch_loaded() -> bool:
    """Returns True if the program uses PyTorch."""
    return loaded_torch() is not None


def num_torch_gpus() -> int:
    """Counts the GPUs PyTorch sees; 0 if the program does not use it."""
    torch = loaded_torch()
    return 0 if torch is None else int(torch.cuda.device_count())


def torch_thread_state(devices: Sequence[Device]) -> ThreadState | None:
    """Returns settings per thread that replicas inherit: grad and inference mode, autocast, streams.

    A replica on a GPU also has that GPU as its current one, so that `"cuda"` means its own, and works on the
    caller's stream there, where its values are combined. None if there is nothing to inherit.
    """
    torch = loaded_torch()
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


def loaded_torch() -> Any:
    """Returns PyTorch if it is completely imported, else None."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "set_grad_enabled") else None


BACKWARD_PASSES: set[int] = set()
"""PyTorch's numbers of the current backward passes through results of replicas."""


def refuse_recomputing(name: str) -> None:
    """Raises in such a pass outside of replica functions, where code would take itself for a lone replica."""
    if BACKWARD_PASSES and loaded_torch()._C._current_graph_task_id() in BACKWARD_PASSES:
        raise ContextError(
            f"{name} was called in a backward pass, outside of the replica's function: "
            "torch.utils.checkpoint recomputes parts of the forward pass there, where replicas do not meet; "
            "leave what asks for its replica (calls of its context, SyncBatchNorm) out of those parts"
        )


def refuse_tracing(name: str) -> None:
    """Raises in a function that is traced: that happens in one thread at a time, so replicas never meet."""
    if _is_building_graph():
        raise ContextError(
            f"{name} was called inside a tf.function, where replicas would wait for each other for ever; "
            "call it outside, or give crossdevice.integrations.tensorflow.as_tensorflow(ops) to "
            "tf.distribute.MirroredStrategy"
        )
    # JAX has no public name for this; without it, tracers are refused once replicas have met.
    is_clean = getattr(sys.modules.get("jax._src.core"), "trace_state_clean", None)
    if is_clean is not None and not is_clean():
        raise ContextError(
            f"{name} was called inside jit, grad or another transformation of JAX, where replicas would wait "
            "for each other for ever; call it outside, or use jax.lax.psum(value, axis_name) there"
        )


def refuse_graph(array: Any, name: str) -> None:
    """Refuses a variable's tensor in a `tf.function`, which would go on using it after it is replaced."""
    if type(array).__module__.startswith("tensorflow.") and _is_building_graph():
        raise ContextError(
            f"variable {name!r} was used inside a tf.function, which would keep its present value for ever; "
            "give its value() to the function as an argument"
        )


def _is_building_graph() -> bool:
    is_eager = getattr(sys.modules.get("tensorflow"), "executing_eagerly", None)
    return is_eager is not None and not is_eager()

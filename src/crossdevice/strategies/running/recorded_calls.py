"""Calls in which replicas meet with arrays that their library records, to differentiate them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from crossdevice.backends.protocol import Merge
from crossdevice.backends.registry import backend_named
from crossdevice.strategies.running import loaded_torch
from crossdevice.values.options import DEFAULT_OPTIONS, CommunicationOptions

if TYPE_CHECKING:
    from crossdevice.strategies.running.replica_context import ReplicaContext


def meet_recorded(
    context: ReplicaContext,
    name: str,
    details: tuple[Any, ...],
    value: Any,
    merge: Merge,
    options: CommunicationOptions = DEFAULT_OPTIONS,
) -> Any:
    """`context.meet`, whose answer is recorded if the value of some replica is.

    Every replica has a graph of its own and runs its own backward pass, in which all of them meet again.
    Those of a context that `joins_graphs` share one graph, for one backward pass after the run.
    """
    autograd = backend_named("torch").autograd if loaded_torch.is_loaded() else None
    if autograd is None:
        return context.meet(name, details, value, merge, options)

    def exchange(value: Any, merge: Merge, *, is_backward: bool = False) -> Any:
        is_recording = autograd.is_recording()  # replicas have to agree on it: the values of all are merged
        if is_backward:
            mode = ("create_graph",) if is_recording else ()
            gradient = f"gradient of {name}"
            return context.meet(gradient, (*details, *mode), value, merge, options, is_backward=True)
        mode = () if is_recording else ("no_grad",)
        return context.meet(name, (*details, *mode), value, merge, options)

    if autograd.is_recording():
        if context.joins_graphs:
            return exchange(value, merge)
        if _share_a_gpu(context):  # and so the one thread that PyTorch has for its backward passes
            return exchange(autograd.cut(value), merge)
    return autograd.meeting(exchange, context.local_replica, value, merge)


def _share_a_gpu(context: ReplicaContext) -> bool:
    apart = [device for device in context.strategy.extended.worker_devices if not device.is_host]
    return len(set(apart)) < len(apart)

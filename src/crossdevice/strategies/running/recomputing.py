"""Detects PyTorch's recomputation of a replica's forward pass in a backward pass elsewhere."""

from __future__ import annotations

from crossdevice.errors import ContextError
from crossdevice.strategies.running.loaded_torch import loaded

BACKWARD_PASSES: set[int] = set()
"""PyTorch's numbers of the backward passes under way through what replicas have computed."""


def refuse_recomputing(name: str) -> None:
    """Raises in such a pass outside of replica functions, where code would take itself for a lone replica."""
    if BACKWARD_PASSES and loaded()._C._current_graph_task_id() in BACKWARD_PASSES:
        raise ContextError(
            f"{name} was called in a backward pass, outside of the replica's function: "
            "torch.utils.checkpoint recomputes parts of the forward pass there, where replicas do not meet; "
            "leave what asks for its replica (calls of its context, SyncBatchNorm) out of those parts"
        )

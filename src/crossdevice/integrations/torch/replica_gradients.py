"""The gradients of one replica's copy of a module, in a form that all replicas have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from crossdevice.values.reduce_op import ReduceOp

if TYPE_CHECKING:
    from crossdevice.integrations.torch.gradient_arenas import Arena

_USED_AND_UNUSED = {ReduceOp.MIN: (-1.0, 0.0), ReduceOp.PROD: (0.0, 1.0)}
"""Marks that, when combined, differ from the second one if and only if some replica gave the first."""


class ReplicaGradients:
    """Gradients of the trainable parameters by name; those that this replica has none for are zeros.

    Replicas may have used different parameters. All of them bring a gradient for every parameter, and a
    vector that says which ones they have, so that parameters nobody used can be told apart afterwards.
    """

    def __init__(
        self, module: torch.nn.Module, op: ReduceOp, device: torch.device, arena: Arena | None = None
    ) -> None:
        """Gradients that have a place in an arena are brought there, and not brought along."""
        used, self._unused = _USED_AND_UNUSED.get(op, (1.0, 0.0))
        with_sparse = parameters_with_sparse_gradients(module)
        self._parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._views = {} if arena is None else arena.views
        if arena is not None:
            for name in arena.views:
                arena.take_in(name)
        self._own = {
            name: _zeros(p, is_sparse=id(p) in with_sparse) if p.grad is None else p.grad
            for name, p in self._parameters.items()
            if name not in self._views
        }
        self._lacks_some = any(p.grad is None for p in self._parameters.values())
        # A fill does not wait for a GPU, a copy of different numbers does.
        self._marks = torch.full((len(self._parameters),), used, device=device)
        if self._lacks_some:
            marks = [self._unused if p.grad is None else used for p in self._parameters.values()]
            self._marks = torch.tensor(marks, device=device)

    def brought(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Collects the gradients to reduce: one structure for all replicas."""
        return self._own, self._marks

    def take_over(self, reduced: tuple[Mapping[str, Any], torch.Tensor]) -> None:
        """Sets the gradients to the reduced ones; parameters that no replica used stay without one."""
        gradients, marks = reduced
        # With gradients of its own for all, a replica need not wait for the GPU to read the marks.
        is_used = (marks != self._unused).tolist() if self._lacks_some else [True] * len(marks)
        for (name, parameter), used in zip(self._parameters.items(), is_used, strict=True):
            if name in self._views:
                parameter.grad = self._views[name] if used else None
            elif used:
                parameter.grad = _laid_out_as(self._own[name], gradients[name])


def _zeros(parameter: torch.Tensor, *, is_sparse: bool) -> torch.Tensor:
    if not is_sparse:
        return torch.zeros_like(parameter, requires_grad=False)
    rows = torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype, device=parameter.device)
    indices = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(indices, rows, parameter.shape, check_invariants=False)


def _laid_out_as(own: torch.Tensor, reduced: torch.Tensor) -> torch.Tensor:
    """The reduced gradient, with the strides that the replica's own has."""
    if own.is_sparse or reduced.is_sparse or own.stride() == reduced.stride():
        return reduced
    return torch.empty_like(own).copy_(reduced)


def parameters_with_sparse_gradients(module: torch.nn.Module) -> set[int]:
    """By their identities; a replica that did not use one cannot tell from its gradient."""
    tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {id(part.weight) for part in module.modules() if isinstance(part, tables) and part.sparse}

"""Calls on PyTorch tensors that require a gradient, as functions of its automatic differentiation."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from crossdevice.backends.protocol import Exchange, LinearMap, Merge
from crossdevice.values.nesting import flatten, unflatten
from crossdevice.values.replica_scope import replica_scope


class TorchAutograd:
    """A call as a function of PyTorch's automatic differentiation."""

    def is_recording(self) -> bool:
        """Returns this thread's grad mode."""
        return torch.is_grad_enabled()

    def is_recorded(self, array: Any) -> bool:
        """Returns True for a tensor that requires a gradient, in grad mode."""
        return getattr(array, "requires_grad", False) and torch.is_grad_enabled()

    def unrecorded(self, array: Any) -> Any:
        """Detaches a tensor, in the same memory; returns anything else as it is."""
        return array.detach() if isinstance(array, torch.Tensor) else array

    def cut(self, value: Any) -> Any:
        """Detaches tensors and warns about it; anything else stays as it is."""
        leaves, structure = flatten(value)
        for leaf in filter(_requires_grad, leaves):
            warn_if_recorded(leaf)
        return unflatten(structure, list(map(self.unrecorded, leaves)))

    def linear_call(
        self, run: Callable[[], Sequence[torch.Tensor]], linear: LinearMap, arrays: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Returns the results of `run`, with the derivatives of a linear map of the arrays."""
        return _LinearCall.apply(run, linear, *arrays)

    def meeting(self, exchange: Exchange, replica: int, value: Any, merge: Merge) -> Any:
        """Returns this replica's part of what `merge` makes of all values, in the replica's own graph.

        The graphs of replicas stay apart, so that each can run its own backward pass; those meet again.
        """
        return _met(exchange, replica, value, merge)


class _LinearCall(torch.autograd.Function):
    """A linear map; its derivative is its transpose, and that one's derivative is the map again."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[], Sequence[torch.Tensor]], linear: LinearMap, *_: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Runs outside of grad mode, so what it calls records nothing."""
        ctx.linear = linear
        return tuple(run())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Makes a call of its own: between processes, all of them make it."""
        given = list(map(_dense, gradients))
        with replica_scope(None):
            transposed = ctx.linear.transposed()
            made = _LinearCall.apply(functools.partial(transposed, given), transposed, *given)
        return None, None, *made


class _Joint(NamedTuple):
    """A graph between those of the replicas: the leaves and results of each."""

    inputs: list[list[torch.Tensor]]
    outputs: list[list[torch.Tensor]]

    def gradients(self, of_outputs: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        """Returns gradients of all inputs, replica by replica; recorded in grad mode."""
        flat = torch.autograd.grad(
            [tensor for own in self.outputs for tensor in own],
            [tensor for own in self.inputs for tensor in own],
            [tensor for own in of_outputs for tensor in own],
            retain_graph=True,
            create_graph=torch.is_grad_enabled(),
            materialize_grads=True,
        )
        remaining = iter(flat)
        return [[next(remaining) for _ in own] for own in self.inputs]


class _OfReplica(torch.autograd.Function):
    """One replica's way into a joint graph and out of it; all replicas go through their own together."""

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, replica: int, joint: _Joint, _: torch.Tensor, *own: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Returns the replica's results."""
        ctx.exchange, ctx.replica, ctx.joint = exchange, replica, joint
        ctx.save_for_backward(*own)
        return tuple(output.detach() for output in joint.outputs[replica])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        """Sends the gradients of all replicas through the joint graph at once."""
        joint: _Joint = ctx.joint
        own = _met(
            functools.partial(ctx.exchange, is_backward=True),
            ctx.replica,
            list(map(_dense, gradients)),
            joint.gradients,
            ctx.saved_tensors if torch.is_grad_enabled() else (),  # otherwise nothing checks for changes
            joint.inputs,
        )
        return None, None, None, None, *own


def _met(
    exchange: Exchange,
    replica: int,
    value: Any,
    merge: Merge,
    others: Sequence[torch.Tensor] = (),
    other_inputs: Sequence[Sequence[torch.Tensor]] | None = None,
) -> Any:
    """Exchanges values; `others` are this replica's own `other_inputs`, on which `merge` depends too."""
    if not torch.is_grad_enabled():
        return exchange(value, torch.no_grad()(merge))
    answer, joint = exchange(value, functools.partial(_merged, merge, other_inputs))
    if joint is None:
        return answer
    leaves, structure = flatten(answer)
    own = [leaf for leaf in flatten(value)[0] if _requires_grad(leaf)]
    # Results are recorded also if this replica brought nothing that is: it must take part in going back.
    anchor = torch.empty(0, requires_grad=True)
    results = iter(_OfReplica.apply(exchange, replica, joint, anchor, *own, *others))
    return unflatten(structure, [next(results) if _requires_grad(leaf) else leaf for leaf in leaves])


def _merged(
    merge: Merge, other_inputs: Sequence[Sequence[torch.Tensor]] | None, values: list[Any]
) -> list[tuple[Any, _Joint | None]]:
    """Merges, on one thread: returns every replica's answer, with the graph of all."""
    flattened = [flatten(value) for value in values]
    counts = Counter(id(leaf) for leaves, _ in flattened for leaf in leaves if _requires_grad(leaf))
    if not counts and other_inputs is None:
        return [(answer, None) for answer in merge(values)]
    inputs: list[list[torch.Tensor]] = []
    cut: list[Any] = []
    for replica, (leaves, structure) in enumerate(flattened):
        # A parameter of one replica stands for itself: a merge function may look at its `grad`.
        own = [
            leaf.detach().requires_grad_()
            if _requires_grad(leaf) and not (leaf.is_leaf and counts[id(leaf)] == 1)
            else leaf
            for leaf in leaves
        ]
        cut.append(unflatten(structure, own))
        inputs.append([leaf for leaf in own if _requires_grad(leaf)])
        inputs[-1] += other_inputs[replica] if other_inputs else ()
    with torch.enable_grad():  # the mode of the replicas, not of the thread that merges
        answers = merge(cut)
    outputs = [[leaf for leaf in flatten(answer)[0] if _requires_grad(leaf)] for answer in answers]
    joint = _Joint(inputs, outputs) if any(outputs) else None
    return [(answer, joint) for answer in answers]


def warn_if_recorded(tensor: torch.Tensor) -> None:
    """Warns that a call is not differentiated; differentiated calls see no tensor in grad mode."""
    if tensor.requires_grad and torch.is_grad_enabled():
        warnings.warn(
            "a tensor that requires a gradient was handed to a call of crossdevice that is not "
            "differentiated (SUM and MEAN, gathers and broadcasts of dense tensors are), so its results are "
            "not recorded; if that is meant, detach() it or use torch.no_grad()",
            stacklevel=3,
        )


def _requires_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient

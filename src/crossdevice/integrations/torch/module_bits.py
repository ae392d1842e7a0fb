"""Fingerprints of the inputs and outputs of every submodule of a PyTorch module, by its name."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch.utils._pytree import tree_leaves

from crossdevice.integrations.torch.mirrored_module import MirroredModule
from crossdevice.integrations.torch.tensor_kinds import is_instance_of
from crossdevice.recording.recorder import Leaves, digests_by_path, is_recording, named_by_replica, write_mark


class ModuleBits:
    """Marks inputs, outputs and gradients of every submodule by name, without touching the model's code.

    They are in what `crossdevice.record_bits` writes; outside of it hooks look, and do nothing. A submodule's
    parameters and buffers count as its inputs: if those are equal in two runs and its outputs are not, it is
    this submodule that is not reproducible. Gradients are those of outputs and of parameters. In a forward
    pass a tensor is read once for all submodules that get it or give it, as long as PyTorch counts no change
    of it.

    Args:
        model: any module; one in DistributedDataParallel is marked by the names it has outside of it, each
            copy of a MirroredModule with the number of its replica.
        name: what marks begin with.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())
    >>> with ModuleBits(model):
    ...     _ = model(torch.ones(1, 2))
    """

    def __init__(self, model: torch.nn.Module, name: str = "model") -> None:
        self._forward = _ForwardPass()
        self._handles: list[Any] = []
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        copies = model.replicas if isinstance(model, MirroredModule) else (model,)
        for replica, module in enumerate(copies):
            self._watch(module, name, f" in replica {replica}" if len(copies) > 1 else "")

    def _watch(self, model: torch.nn.Module, name: str, where: str) -> None:
        for path, module in model.named_modules():
            label = f"{name}.{path}" if path else name
            before = self._before_forward if path else self._before_whole
            after = functools.partial(self._after_forward, label)
            self._handles += [
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
                module.register_forward_hook(after, with_kwargs=True),
            ]
        for path, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook = functools.partial(_mark_gradient, f"{name}.{path}.grad{where}")
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    def remove(self) -> None:
        """Takes all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def _before_whole(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """Drops what an earlier pass has left that raised: the whole model is in no other module."""
        self._forward.clear()
        self._before_forward(model, args, kwargs)

    def _before_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if is_recording():
            own = {**module._parameters, **module._buffers}
            held = {f"value['own'][{name!r}]": each for name, each in own.items() if each is not None}
            given = _by_path("inputs", _tensors((args, kwargs)))
            self._forward.digests.append((module, self._forward.read({**given, **held})))

    def _after_forward(
        self, label: str, module: torch.nn.Module, _args: Any, _kwargs: Any, output: Any
    ) -> None:
        if not is_recording():
            return
        before: Leaves = {}
        # What is left of modules that raised is dropped on the way.
        while self._forward.digests:
            whose, digests = self._forward.digests.pop()
            if whose is module:
                before = digests
                break
        tensors = _tensors(output)
        after = self._forward.read(_by_path("outputs", tensors))
        write_mark(named_by_replica(f"{label} forward"), before, after)
        if not self._forward.digests:
            self._forward.known.clear()
        for number, tensor in enumerate(tensors):
            if tensor.requires_grad:
                which = f" {number}" if len(tensors) > 1 else ""
                # Now: the backward pass of all replicas may run in one thread.
                name = named_by_replica(f"{label} gradient of output{which}")
                tensor.register_hook(functools.partial(_mark, name))


class _ForwardPass(threading.local):
    """Digests read in the running forward pass of this thread; replicas run in threads."""

    def __init__(self) -> None:
        self.digests: list[tuple[torch.nn.Module, Leaves]] = []
        """Digests of the inputs of modules that are running, innermost last."""
        self.known: dict[int, tuple[weakref.ref[torch.Tensor], int, list[str]]] = {}
        """Digests of tensors by their `id`, each with the number of changes when it was read."""

    def clear(self) -> None:
        """Forgets everything."""
        self.digests.clear()
        self.known.clear()

    def read(self, tensors: Mapping[str, torch.Tensor]) -> Leaves:
        """Returns the digests of tensors by path; those that are known, and unchanged, are not read again."""
        found: Leaves = {}
        new: dict[str, torch.Tensor] = {}
        for path, tensor in tensors.items():
            known = self.known.get(id(tensor))
            if known is not None and known[1] == tensor._version and known[0]() is tensor:
                found[path] = known[2]
            else:
                new[path] = tensor
        if not new:
            return found
        read = digests_by_path({path: _local(tensor) for path, tensor in new.items()})
        for path, tensor in new.items():
            # Tensors of other types may be changed through others, and those of inference count no changes.
            is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_inference()
            if path in read and is_plain:
                self.known[id(tensor)] = weakref.ref(tensor), tensor._version, read[path]
        read.update(found)
        return {path: read.pop(path) for path in tensors if path in read} | read


def _by_path(name: str, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"value[{name!r}][{number}]": tensor for number, tensor in enumerate(tensors)}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or this rank's part of a DTensor."""
    if is_instance_of(tensor, "torch.distributed.tensor", "DTensor"):
        local: torch.Tensor = tensor.detach().to_local()
        return local
    return tensor


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _mark(name: str, gradient: torch.Tensor) -> None:
    if is_recording():
        write_mark(name, {}, digests_by_path({"value": _local(gradient)}))


def _mark_gradient(name: str, parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        _mark(name, parameter.grad)

"""Tensors that replicas cannot share, by name, with alternatives."""

from __future__ import annotations

import sys
from typing import Any

import torch

from crossdevice.errors import ConversionError
from crossdevice.values.quantities import with_article


def refuse_special(value: Any, where: str) -> None:
    """Refuses objects that look like a batch but cannot be split, joined or copied as one."""
    reason = _reason(value)
    if reason is not None:
        raise ConversionError(f"{where} is {reason}")


def _reason(value: Any) -> str | None:
    if isinstance(value, torch.nn.utils.rnn.PackedSequence):
        return (
            "a PackedSequence, whose batch is not an axis; pass the padded tensor with its lengths, "
            "and pack in forward"
        )
    if not isinstance(value, torch.Tensor):
        kind = f"{type(value).__module__}.{type(value).__name__}"
        is_array = hasattr(value, "__array__") and getattr(value, "ndim", 0) > 0
        return (
            f"{with_article(kind)}, which cannot be split or joined; make it a tensor" if is_array else None
        )
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return (
            "inside of a torch.func transformation (grad, vmap, ...), which replicas in other threads know "
            "nothing of; transform what a replica computes, inside of forward"
        )
    if is_instance_of(value, "torch._subclasses.fake_tensor", "FakeTensor"):
        return "a FakeTensor, which has no data; call the plain module under FakeTensorMode"
    if is_instance_of(value, "torch.distributed.tensor", "DTensor"):
        return "a DTensor, which is sharded already; pass its to_local() or full_tensor()"
    if isinstance(value, torch.nn.parameter.UninitializedTensorMixin):
        return "not initialized yet; run one batch through the plain module first"
    if value.is_meta:
        return "on the meta device and has no data; materialize it with to_empty and load its values"
    if value.is_quantized:
        return "a quantized tensor; pass its dequantize()"
    if value.is_nested:
        return "a nested tensor; pass it padded (torch.nested.to_padded_tensor) with its lengths"
    if value.layout != torch.strided:
        return f"a {value.layout} tensor; pass its to_dense()"
    return None


def is_instance_of(value: Any, module: str, name: str) -> bool:
    """Tests for a class of a module that is slow to import, without importing it."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)

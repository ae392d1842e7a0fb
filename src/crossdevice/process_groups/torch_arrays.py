"""Tensors of PyTorch in memory that ranks share."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from crossdevice.errors import OptionError


def tensor_in(memory: NDArray[np.uint8], like: torch.Tensor) -> torch.Tensor:
    """A tensor of that memory with the dtype and shape of another one, which must be on the host."""
    if like.device.type != "cpu" or like.layout != torch.strided:
        raise OptionError(
            f"shared memory is the host's, and holds dense tensors; got one on {like.device}, {like.layout}"
        )
    if not like.numel():
        return torch.empty_like(like)
    return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)

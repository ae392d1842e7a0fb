"""The two operators that torchvision wants at import, for a PyTorch that its compiled part does not fit."""

import importlib.util
from pathlib import Path

import torch


def _declared_operators():
    """Declares the operators where torchvision's compiled part does not load.

    That part is built for one build of PyTorch (CUDA's); no model here uses it.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    try:
        for compiled in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(compiled)
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


OPERATORS = _declared_operators()  # they are gone with the library that declares them

"""Formats of files, by their names."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from crossdevice.combining.files.model_file import (
    ModelFile,
    TensorSpec,
    Writing,
    check_replaceable,
    unreadable,
)
from crossdevice.errors import FileError
from crossdevice.values.registry import missing_library

FORMATS = {
    ".safetensors": ("safetensors_files", "SafetensorsFile", "written_safetensors"),
    ".index.json": ("sharded_files", "ShardedModel", "written_shards"),
    ".npz": ("numpy_files", "NumpyFile", "written_npz"),
    ".npy": ("numpy_files", "NumpyFile", "written_npy"),
    ".pt": ("torch_files", "TorchFile", "written_torch"),
    ".pth": ("torch_files", "TorchFile", "written_torch"),
    ".bin": ("torch_files", "TorchFile", "written_torch"),
}
"""Module, reader and writer of each file extension; loaded on demand, as PyTorch may be missing."""

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""Names of a model's files in a folder of its own."""


def open_model(path: Path) -> ModelFile:
    """Opens a file of tensors, or the model in a folder."""
    try:
        if path.is_dir():
            path = path / (INDEX if (path / INDEX).exists() else SINGLE)
        if not path.exists():
            raise FileError(f"{path} does not exist")
        is_regular = path.is_file()
    except OSError as error:
        raise unreadable(path, error.strerror or error) from error
    if not is_regular:  # reading from a pipe would wait for ever
        raise FileError(f"{path} is not a regular file; expected one that can be read at any place")
    opened: ModelFile = _load(path, 1)(path)
    return opened


def new_model(path: Path, tensors: Mapping[str, TensorSpec], like: ModelFile) -> Writing:
    """Creates a file of these tensors that appears when complete; other contents are those of `like`."""
    if path.is_dir():
        path = path / (INDEX if like.path.name.endswith(".index.json") else SINGLE)
    writing: Writing = _load(path, 2)(path, tensors, like)
    return writing


def check_output(path: Path) -> None:
    """Refuses an output that cannot be, before anything is read."""
    if os.path.isdir(path):  # not Path.is_dir, which raises for a name that is too long
        return
    check_replaceable(path)
    if not path.parent.is_dir():
        raise FileError(f"{path} cannot be written: there is no folder {str(path.parent)!r}")
    _load(path, 2)


def _load(path: Path, column: int) -> Any:
    for ending, row in FORMATS.items():
        if path.name.endswith(ending):
            try:
                module = importlib.import_module(f"crossdevice.combining.files.{row[0]}")
            except ModuleNotFoundError as error:
                raise FileError(f"{path} needs {missing_library(error)}") from error
            return getattr(module, row[column])
    folder = "" if path.suffix else "; a folder has to exist"
    raise FileError(f"{path} has an unknown ending; expected one of {', '.join(FORMATS)}{folder}")

"""Checks of arguments, made before anything is sent; they raise what PyTorch's own backends raise."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensors = Sequence[torch.Tensor]


def check_tensors(name: str, tensors: Tensors) -> None:
    """Refuses empty lists, sparse tensors, and tensors of several dtypes or sizes in one list."""
    if not tensors:
        raise ValueError(f"crossdevice {name}: requires non-empty tensor list")
    first = tensors[0]
    for number, tensor in enumerate(tensors):
        if tensor.layout != torch.strided:
            raise ValueError(
                f"crossdevice {name}: only supports dense tensors; tensor {number} is {tensor.layout}"
            )
        if tensor.dtype != first.dtype:
            raise ValueError(
                f"crossdevice {name}: invalid tensor type at index {number} (expected {first.dtype}, got "
                f"{tensor.dtype})"
            )
        if tensor.device.type != first.device.type:
            raise ValueError(
                f"crossdevice {name}: tensor {number} is on {tensor.device}, and tensor 0 is on "
                f"{first.device}; expected one type of device"
            )


def check_alike(name: str, tensors: Tensors) -> None:
    """The same for tensors of which each stands for one device, so that they have one size too."""
    check_tensors(name, tensors)
    for number, tensor in enumerate(tensors):
        if tensor.shape != tensors[0].shape:
            raise ValueError(
                f"crossdevice {name}: invalid tensor size at index {number} (expected "
                f"{list(tensors[0].shape)}, got {list(tensor.shape)})"
            )


def check_root(name: str, root: int, size: int, root_tensor: int = 0, num_tensors: int = 1) -> None:
    """Refuses a root that is no rank of the group, or a tensor of it that is not in its list."""
    if not 0 <= root < size:
        raise ValueError(f"crossdevice {name}: invalid root rank: {root}; expected one from 0 to {size - 1}")
    if not 0 <= root_tensor < num_tensors:
        raise ValueError(
            f"crossdevice {name}: invalid root tensor: {root_tensor}; expected one from 0 to "
            f"{num_tensors - 1}"
        )


def check_lists(name: str, lists: Sequence[Tensors], tensors: Tensors, size: int, of: str) -> None:
    """Compares lists with an entry for each rank to the tensors they belong to."""
    check_alike(name, tensors)
    if len(lists) != len(tensors):
        raise ValueError(
            f"crossdevice {name}: requires input/output tensor lists to have the same length; got "
            f"{len(lists)} {of} lists for {len(tensors)} tensors"
        )
    for number, each in enumerate(lists):
        expected = size * len(tensors)
        if len(each) != expected:
            raise ValueError(
                f"crossdevice {name}: invalid {of} tensor list at index {number} (expected length "
                f"{expected}, got {len(each)})"
            )
        for tensor in each:
            if tensor.dtype != tensors[0].dtype:
                raise ValueError(
                    f"crossdevice {name}: invalid tensor type at index {number} (expected "
                    f"{tensors[0].dtype}, got {tensor.dtype})"
                )
            if tensor.layout != torch.strided:
                raise ValueError(f"crossdevice {name}: only supports dense tensors; got {tensor.layout}")


def check_root_lists(
    name: str, lists: Sequence[Tensors], tensors: Tensors, root: int, rank: int, size: int, of: str
) -> None:
    """The same for lists that only the root of a gather or a scatter has."""
    other = "input" if of == "output" else "output"
    check_root(name, root, size)
    if len(tensors) != 1:
        raise ValueError(
            f"crossdevice {name}: requires a single-element {other} tensor list; got {len(tensors)}"
        )
    check_tensors(name, tensors)
    if rank != root:
        if any(len(each) for each in lists):
            raise ValueError(f"crossdevice {name}: requires empty {of} on non-root")
        return
    if len(lists) != 1:
        raise ValueError(f"crossdevice {name}: requires a single-element {of} list on root; got {len(lists)}")
    if len(lists[0]) != size:
        raise ValueError(
            f"crossdevice {name}: Incorrect {of} list size {len(lists[0])}. {of.capitalize()} list size "
            f"should be {size}, same as size of the process group."
        )
    check_alike(name, [*tensors, *lists[0]])


def check_whole(name: str, whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    """Refuses a whole that is not `size` parts, or has another dtype."""
    if whole.dtype != part.dtype:
        raise ValueError(
            f"crossdevice {name}: output tensor must have the same type as input tensor; got {whole.dtype} "
            f"and {part.dtype}"
        )
    if whole.numel() != part.numel() * size:
        raise ValueError(
            f"crossdevice {name}: input tensor must be the same size as output size times world size; got "
            f"{whole.numel()} elements for {size} parts of {part.numel()}"
        )


def split_lengths(tensor: torch.Tensor, sizes: Sequence[int], size: int) -> list[int]:
    """The lengths of an all-to-all's parts along the first axis."""
    rows = tensor.shape[0] if tensor.ndim else 1
    if not sizes:
        if rows % size:
            raise ValueError(
                f"Tensor's dim 0 does not divide equally across group size: {rows} rows for {size} ranks"
            )
        return [rows // size] * size
    if len(sizes) != size:
        raise ValueError(f"Number of tensor splits not equal to group size: {len(sizes)} for {size} ranks")
    if sum(sizes) != rows:
        raise ValueError(
            f"Split sizes doesn't match total dim 0 size: they add up to {sum(sizes)}, not {rows}"
        )
    return list(sizes)

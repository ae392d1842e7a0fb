"""Checks of arguments before anything is sent, with the errors of PyTorch's own backends."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from crossdevice.errors import CrossDeviceError
from crossdevice.values.quantities import counted

Tensors = Sequence[torch.Tensor]


class ArgumentError(CrossDeviceError, ValueError, RuntimeError):
    """An argument that is refused on this rank alone, before anything is sent.

    Programs expect a RuntimeError where gloo checks it, and a ValueError where `torch.distributed` does.
    """


def check_tensors(name: str, tensors: Tensors, of: str = "") -> None:
    """Refuses empty lists, sparse tensors, and tensors of several dtypes or sizes in one list."""
    if not tensors:
        raise ArgumentError(f"crossdevice {name}: requires non-empty {of}tensor list")
    first = tensors[0]
    if len(tensors) == 1 and first.layout == torch.strided:
        return
    for number, tensor in enumerate(tensors):
        if tensor.layout != torch.strided:
            raise ArgumentError(
                f"crossdevice {name}: invalid tensor layout at index {number}: only supports dense tensors; "
                f"got {tensor.layout}"
            )
        if tensor.dtype != first.dtype:
            raise ArgumentError(
                f"crossdevice {name}: tensors must all have the same type; invalid tensor type at index "
                f"{number} (expected {first.dtype}, got {tensor.dtype})"
            )
        if tensor.device.type != first.device.type:
            raise ArgumentError(
                f"crossdevice {name}: tensor {number} is on {tensor.device}, and tensor 0 is on "
                f"{first.device}; expected one type of device"
            )


def check_alike(name: str, tensors: Tensors) -> None:
    """Checks tensors that stand for one device each, so that they also have one size."""
    check_tensors(name, tensors)
    for number, tensor in enumerate(tensors[1:], 1):
        if tensor.shape != tensors[0].shape:
            raise ArgumentError(
                f"crossdevice {name}: invalid tensor size at index {number} (expected "
                f"{list(tensors[0].shape)}, got {list(tensor.shape)})"
            )


def check_single(name: str, tensors: Tensors, of: str = "") -> None:
    """Refuses more tensors than one, as gloo does."""
    if len(tensors) != 1:
        raise ArgumentError(
            f"crossdevice {name}: requires a single-element {of}tensor list; got "
            f"{counted(len(tensors), 'tensor')}"
        )


def check_root(name: str, root: int, size: int, root_tensor: int = 0, num_tensors: int = 1) -> None:
    """Refuses a root that is no rank of the group, or a tensor of it that is not in its list."""
    if not 0 <= root < size:
        raise ArgumentError(
            f"crossdevice {name}: invalid root rank: {root}; expected one from 0 to {size - 1}"
        )
    if not 0 <= root_tensor < num_tensors:
        raise ArgumentError(
            f"crossdevice {name}: invalid root tensor: {root_tensor}; expected one from 0 to "
            f"{num_tensors - 1}"
        )


def check_lists(name: str, lists: Sequence[Tensors], tensors: Tensors, size: int, of: str) -> None:
    """Compares lists with an entry for each rank to the tensors they belong to."""
    check_tensors(name, tensors, "input " if of == "output" else "")
    check_alike(name, tensors)
    if len(lists) != len(tensors):
        raise ArgumentError(
            f"crossdevice {name}: requires input/output tensor lists to have the same length; got "
            f"{counted(len(lists), f'{of} list')} for {counted(len(tensors), 'tensor')}"
        )
    for number, each in enumerate(lists):
        expected = size * len(tensors)
        if len(each) != expected:
            raise ArgumentError(
                f"crossdevice {name}: invalid {of} tensor list at index {number} (expected length "
                f"{expected}, got {len(each)})"
            )
        for tensor in each:
            if tensor.dtype != tensors[0].dtype:
                raise ArgumentError(
                    f"crossdevice {name}: invalid tensor type at index {number} (expected "
                    f"{tensors[0].dtype}, got {tensor.dtype})"
                )
            if tensor.layout != torch.strided:
                raise ArgumentError(f"crossdevice {name}: only supports dense tensors; got {tensor.layout}")


def check_own(name: str, target: torch.Tensor, own: torch.Tensor, index: int) -> None:
    """Refuses an output, by its place in a list, that cannot hold this rank's own input."""
    if target.dtype != own.dtype:
        raise ArgumentError(
            f"crossdevice {name}: invalid tensor type at index {index} of the outputs (expected {own.dtype}, "
            f"got {target.dtype})"
        )
    if target.numel() != own.numel():
        raise ArgumentError(
            f"crossdevice {name}: invalid tensor size at index {index} of the outputs (expected "
            f"{list(own.shape)} as this rank's input, got {list(target.shape)})"
        )


def check_own_part(
    name: str, output: torch.Tensor, whole: torch.Tensor, lengths: Sequence[Sequence[int]], rank: int
) -> None:
    """Refuses an output, split by rows, that is too small for this rank's own part."""
    if output.dtype != whole.dtype:
        raise ArgumentError(
            f"crossdevice {name}: output has {output.dtype}, and input {whole.dtype}; expected one dtype"
        )
    room, own = (
        tensor.numel() // max(sum(rows), 1) * rows[rank]
        for tensor, rows in zip((output, whole), lengths, strict=True)
    )
    if room != own:
        raise ArgumentError(
            f"crossdevice {name}: invalid split sizes at index {rank}: this rank keeps {own} elements of the "
            f"input, and the output has room for {room} of its own"
        )


def check_coalesced(name: str, lists: Sequence[Tensors], tensors: Tensors, size: int) -> None:
    """Compares a list for each rank to the tensors that each of them brings."""
    check_tensors(name, tensors[:1], "input ")
    if len(lists) != size:
        raise ArgumentError(
            f"crossdevice {name}: output lists should be equal to world size: {len(lists)} for "
            f"{counted(size, 'rank')}"
        )
    for number, each in enumerate(lists):
        if len(each) != len(tensors):
            raise ArgumentError(
                f"crossdevice {name}: invalid output size at index {number} (expected length {len(tensors)}, "
                f"got {len(each)})"
            )
        for target, own in zip(each, tensors, strict=True):
            check_own(name, target, own, number)


def check_contiguous(tensors: Tensors) -> None:
    """Refuses tensors that PyTorch refuses in an all-to-all of one tensor."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ArgumentError("Tensors must be contiguous")


def check_peer(name: str, peer: int, rank: int, size: int) -> None:
    """Refuses to send to, or receive from, an invalid rank: gloo would end the process."""
    if not 0 <= peer < size or peer == rank:
        raise ArgumentError(
            f"crossdevice {name}: invalid rank: {peer}; expected one from 0 to {size - 1} other than {rank}"
        )


def check_tag(name: str, tag: int, end: int) -> None:
    """Refuses tags that the group uses itself."""
    if not 0 <= tag < end:
        raise ArgumentError(f"crossdevice {name}: invalid tag: {tag}; expected one from 0 to {end - 1}")


def check_root_lists(
    name: str, lists: Sequence[Tensors], tensors: Tensors, root: int, rank: int, size: int, of: str
) -> None:
    """Checks lists that only the root of a gather or a scatter has."""
    other = "input" if of == "output" else "output"
    check_root(name, root, size)
    check_single(name, tensors, f"{other} ")
    check_tensors(name, tensors)
    if rank != root:
        if any(len(each) for each in lists):
            raise ArgumentError(f"crossdevice {name}: requires empty {of} on non-root")
        return
    if len(lists) != 1:
        raise ArgumentError(
            f"crossdevice {name}: requires a single-element {of} list containing a list with "
            f"{counted(size, 'tensor')} on root; got {counted(len(lists), 'list')}"
        )
    if len(lists[0]) != size:
        raise ArgumentError(
            f"crossdevice {name}: Incorrect {of} list size {len(lists[0])}. {of.capitalize()} list size "
            f"should be {size}, same as size of the process group."
        )
    check_alike(name, [*tensors, *lists[0]])


def check_whole(name: str, whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    """Refuses a whole that is not `size` parts, or has another dtype."""
    if whole.dtype != part.dtype:
        raise ArgumentError(
            f"crossdevice {name}: output tensor must have the same type as input tensor; got {whole.dtype} "
            f"and {part.dtype}"
        )
    if whole.numel() != part.numel() * size:
        raise ArgumentError(
            f"crossdevice {name}: input tensor must be the same size as output size times world size; got "
            f"{counted(whole.numel(), 'element')} for {counted(size, 'part')} of {part.numel()}"
        )


def split_lengths(tensor: torch.Tensor, sizes: Sequence[int], size: int) -> list[int]:
    """Returns the lengths of an all-to-all's parts along the first axis."""
    rows = tensor.shape[0] if tensor.ndim else 1
    if not sizes:
        if rows % size:
            raise ArgumentError(
                f"Tensor's dim 0 does not divide equally across group size: {counted(rows, 'row')} for "
                f"{counted(size, 'rank')}"
            )
        return [rows // size] * size
    if len(sizes) != size:
        raise ArgumentError(
            f"Number of tensor splits not equal to group size: {len(sizes)} for {counted(size, 'rank')}"
        )
    if sum(sizes) != rows:
        raise ArgumentError(
            f"Split sizes doesn't match total dim 0 size: they add up to {sum(sizes)}, not {rows}"
        )
    return list(sizes)

"""Arrays on GPUs that other processes reach, copied by whoever wants them: what gathers and broadcasts do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from crossdevice.execution.processes.peers import find_peers, known_peers
from crossdevice.execution.tracing import Work, recorded
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.device import Device, device_of


def offered_gpu(arrays: Sequence[Any], group: ProcessGroup) -> Device | None:
    """The GPU that all arrays are on, PyTorch's tensors, if others may reach it, as far as is known."""
    places = set(map(device_of, arrays))
    if len(places) != 1 or group.size == 1 or not all(hasattr(array, "data_ptr") for array in arrays):
        return None
    gpu, peers = Device.parse(places.pop() or "cpu"), known_peers(group)
    is_reached = peers is None or (peers.why_not is None and peers.gpu == gpu)
    return gpu if gpu.type == "cuda" and is_reached else None


def are_reached(call: GroupCall, gpu: Device | None, are_offered: Sequence[bool]) -> bool:
    """Whether ranks copy from each other's GPU memory, once it is known which of them offer theirs."""
    if not all(are_offered):
        return False
    find_peers(call, gpu)
    peers = known_peers(call.group)
    return peers is not None and peers.why_not is None


class PeerCopy(NamedTuple):
    """An array of this rank, of as many bytes as are copied to it, and where they are."""

    target: Any
    position: int
    """Among the arrays that all ranks show, in the order of ranks."""
    offset_bytes: int = 0


def copy_from_all(call: GroupCall, shown: Sequence[Any], copies: Sequence[PeerCopy]) -> None:
    """Shows arrays to the other ranks, and copies from what all of them show."""
    from crossdevice.kernels.cuda import tensors

    peers = known_peers(call.group)
    assert peers is not None
    assert peers.gpu is not None
    assert peers.addresses is not None
    place = tensors.device_named(peers.gpu.type, peers.gpu.index)

    def copy(addresses: list[int], stream: int) -> None:
        for target, position, offset_bytes in copies:
            tensors.copy(target, addresses[position] + offset_bytes, stream)

    num_bytes = sum(target.nbytes for target, *_ in copies)
    with (
        tensors.on_device(place),
        recorded(Work("copy", "from the GPU memory of all processes", (peers.gpu,), num_bytes)),
    ):
        # Arrays without elements are nowhere.
        found = [array if array.numel() else tensors.empty((1,), "uint8", place) for array in shown]
        peers.addresses.visit(call, place, found, tensors.addresses_of(found), copy)


def fetched(call: GroupCall, arrays: Sequence[Any], lengths: Sequence[Sequence[int]]) -> list[list[Any]]:
    """For each rank so many elements of its flat arrays: views of new memory, where they are end to end."""
    buffers = [
        array.new_empty(sum(of_ranks)).split(list(of_ranks))
        for array, *of_ranks in zip(arrays, *lengths, strict=True)
    ]
    parts = [list(of_rank) for of_rank in zip(*buffers, strict=True)]
    flat = [part for of_rank in parts for part in of_rank]
    copy_from_all(call, arrays, [PeerCopy(part, position) for position, part in enumerate(flat)])
    return parts

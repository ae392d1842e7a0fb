"""Arrays of any length from all ranks, and one rank's arrays for all.

They are flat arrays on the host, or PyTorch's on one GPU: these stay there if ranks reach each other's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import Array, Backend
from crossdevice.backends.registry import backend_named
from crossdevice.execution.processes.peer_copies import are_reached, fetched, offered_gpu
from crossdevice.execution.processes.peers import known_peers
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.process_groups.protocol import Message
from crossdevice.process_groups.receive_buffers import receive_buffer
from crossdevice.values.device import Device, device_of

Flat = NDArray[Any]


def arrays_of_all_ranks(call: GroupCall, arrays: Sequence[Array]) -> list[list[Array]]:
    """For each rank its flat arrays, which may differ in length from rank to rank, not in dtype."""
    gpu = offered_gpu(arrays, call.group)
    numbers = np.array([*map(len, arrays), gpu is not None], np.int64)
    of_ranks = [np.frombuffer(record, np.int64).tolist() for record in call.all_gather(numbers.tobytes())]
    lengths = [found[:-1] for found in of_ranks]
    if are_reached(call, gpu, [bool(found[-1]) for found in of_ranks]):
        return fetched(call, arrays, lengths)
    flats = list(map(_on_host, arrays))
    parts = [
        [receive_buffer(member, [length], flat.dtype) for length, flat in zip(own, flats, strict=True)]
        for member, own in zip(call.group.members, lengths, strict=True)
    ]
    parts[call.group.rank] = flats
    call.all_gather_into(parts)
    return parts


def joined(parts: Sequence[Array], axis: int, backend: Backend, device: Device) -> Array:
    """Parts of all ranks end to end, as an array of a library on a device; the host's may be adopted."""
    if not isinstance(parts[0], np.ndarray):
        buffer, shape = parts[0]._base, list(parts[0].shape)
        shape[axis] = sum(part.shape[axis] for part in parts)
        is_joined = buffer is not None and math.prod(shape[:axis]) == 1  # as they were fetched
        there = buffer.reshape(shape) if is_joined else backend.concat(parts, axis, device)
        return there if device_of(there) == device else backend.copy(there, device)
    whole = np.concatenate(parts, axis=axis)
    return backend.from_host(whole.reshape(-1), whole.shape, device)


def arrays_of_rank(call: GroupCall, arrays: Sequence[Array], rank: int) -> list[Array]:
    """One rank's flat arrays, which every rank has in the same lengths and dtypes."""
    peers = known_peers(call.group)
    if peers is not None and peers.why_not is None:  # which all ranks know, or none
        gpu = offered_gpu(arrays, call.group)
        answers = call.all_gather(b"0" if gpu is None else b"1")
        if are_reached(call, gpu, [answer == b"1" for answer in answers]):
            wanted = [0 if call.group.rank == rank else len(array) for array in arrays]
            lengths = [wanted if other == rank else [0] * len(arrays) for other in range(call.group.size)]
            return fetched(call, arrays, lengths)[rank]
    return _flats_of_rank(call, list(map(_on_host, arrays)), rank)


def _flats_of_rank(call: GroupCall, arrays: Sequence[Flat], rank: int) -> list[Flat]:
    # From each a byte back: MPI may let a rank send to others who take another rank's arrays.
    taken = np.ones(1 if any(array.size for array in arrays) else 0, np.uint8)
    if call.group.rank == rank:
        others = call.others()
        call.exchange(
            [Message(peer, array) for peer in others for array in arrays],
            [Message(peer, taken.copy()) for peer in others],
        )
        return list(arrays)
    buffers = [np.empty_like(array) for array in arrays]
    call.exchange([Message(rank, taken)], [Message(rank, buffer) for buffer in buffers])
    return buffers


def _on_host(array: Array) -> Flat:
    return array if isinstance(array, np.ndarray) else backend_named("torch").to_host(array)

"""Arrays of any length from all ranks, end to end, and one rank's arrays for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.process_groups.group_call import GroupCall
from crossdevice.process_groups.protocol import Message
from crossdevice.process_groups.rooms import room_for

Flat = NDArray[Any]


def arrays_of_all_ranks(call: GroupCall, arrays: Sequence[Flat]) -> list[list[Flat]]:
    """For each rank its flat arrays, which may differ in length from rank to rank, not in dtype."""
    lengths = np.array([array.size for array in arrays], np.int64)
    of_ranks = [np.frombuffer(record, np.int64) for record in call.all_gather(lengths.tobytes())]
    parts = [
        [room_for(member, [length], array.dtype) for length, array in zip(lengths, arrays, strict=True)]
        for member, lengths in zip(call.group.members, of_ranks, strict=True)
    ]
    parts[call.group.rank] = list(arrays)
    call.all_gather_into(parts)
    return parts


def arrays_of_rank(call: GroupCall, arrays: Sequence[Flat], rank: int) -> list[Flat]:
    """One rank's flat arrays, which every rank has in the same lengths and dtypes."""
    # From each a byte back: MPI may let a rank send to others who take another rank's arrays.
    taken = np.ones(1 if any(array.size for array in arrays) else 0, np.uint8)
    if call.group.rank == rank:
        others = call.others()
        call.exchange(
            [Message(peer, array) for peer in others for array in arrays],
            [Message(peer, taken.copy()) for peer in others],
        )
        return list(arrays)
    rooms = [np.empty_like(array) for array in arrays]
    call.exchange([Message(rank, taken)], [Message(rank, room) for room in rooms])
    return rooms

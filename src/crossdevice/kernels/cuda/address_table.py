"""The addresses of many tasks in the GPU's memory, where a kernel finds them: sent only when they change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from crossdevice.kernels.cuda.launching import block_elements
from crossdevice.kernels.cuda.task import KernelTask

ADDRESS_BYTES = 8

_captured: list[torch.Tensor] = []
"""What CUDA graphs read whenever they are replayed, so it may never go."""


class _Sent(NamedTuple):
    """A table in the GPU's memory: for which addresses, and on which stream it was sent."""

    addresses: list[int]
    stream: int
    table: torch.Tensor


class AddressTable:
    """Groups of tasks, each of one arithmetic and one number of inputs and outputs."""

    def __init__(self, groups: Sequence[Sequence[KernelTask]], device: torch.device) -> None:
        self._groups = groups
        self._device = device
        places = [place for group in groups for task in group for place in (*task.inputs, *task.outputs)]
        self._positions = np.array([place.position for place in places], np.int64)
        self._offsets = np.array([place.offset for place in places], np.int64)
        rows = [rows_of(group) for group in groups]
        self._num_rows = [len(part) for part in rows]
        self._rows = torch.from_numpy(np.concatenate(rows)).to(device)
        self._sent: _Sent | None = None

    def on_device(self, addresses: list[int], stream: int) -> Iterator[tuple[KernelTask, int, int, int]]:
        """For each group one of its tasks, the number of its rows, and where its addresses and rows are."""
        sent = self._sent
        if sent is None or sent.stream != stream or sent.addresses != addresses:
            # A new table, not the old one overwritten: kernels on other streams may still read that.
            sent = self._sent = _Sent(addresses, stream, self._uploaded(addresses))
        place_of_addresses, place_of_rows = sent.table.data_ptr(), self._rows.data_ptr()
        for group, num_rows in zip(self._groups, self._num_rows, strict=True):
            yield group[0], num_rows, place_of_addresses, place_of_rows
            num_places = len(group[0].inputs) + len(group[0].outputs)
            place_of_addresses += len(group) * num_places * ADDRESS_BYTES
            place_of_rows += num_rows * self._rows.stride(0) * ADDRESS_BYTES

    def numbers_for(self, addresses: Sequence[int]) -> NDArray[np.int64]:
        """What the table holds: for every task where its inputs start, then where its outputs do."""
        return np.array(addresses, np.int64)[self._positions] + self._offsets

    def _uploaded(self, addresses: Sequence[int]) -> torch.Tensor:
        numbers = torch.from_numpy(self.numbers_for(addresses))
        if self._device.type != "cuda":
            return numbers
        # PyTorch reuses pinned memory only after the copy is done.
        pinned = torch.empty(numbers.shape, dtype=torch.int64, pin_memory=True).copy_(numbers)
        if torch.cuda.is_current_stream_capturing():
            _captured.append(pinned)
        return pinned.to(self._device, non_blocking=True)


def rows_of(tasks: Sequence[KernelTask]) -> NDArray[np.int64]:
    """For each program of a launch the task, the block of it, and the task's number of elements."""
    block = block_elements(tasks[0].arithmetic)
    sizes = np.array([task.num_elements for task in tasks], np.int64)
    num_blocks = -(-sizes // block)
    task = np.repeat(np.arange(len(tasks)), num_blocks)
    firsts = np.cumsum(num_blocks) - num_blocks
    return np.stack([task, np.arange(len(task)) - firsts[task], sizes[task]], axis=1)

"""The fused pass over a GPU's memory: all tasks of a batch, in one launch for each arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from crossdevice.kernels.cuda.families import (
    AddressOffset,
    KernelTask,
    Launch,
    Start,
    block_elements,
    rows_of,
)

ADDRESS_BYTES = 8

_captured: list[torch.Tensor] = []
"""Memory that CUDA graphs read whenever they are replayed, so it may never go."""


class _Sent(NamedTuple):
    """A table in the GPU's memory: for which addresses, and on which stream it was sent."""

    addresses: list[int]
    stream: int
    table: torch.Tensor
    starts: list[Start]


class AddressTable:
    """Groups of tasks, each of one arithmetic and one number of inputs and outputs: a launch for each."""

    def __init__(self, groups: Sequence[Sequence[KernelTask]], device: torch.device) -> None:
        from crossdevice.kernels.cuda.triton_launching import launch_by_table

        self._device = device
        places = [place for group in groups for task in group for place in (*task.inputs, *task.outputs)]
        self._positions = np.array([place.position for place in places], np.int64)
        self._offsets = np.array([place.offset for place in places], np.int64)
        rows = [rows_of(group) for group in groups]
        self._rows = torch.from_numpy(np.concatenate(rows)).to(device)
        self._launches: list[tuple[Launch, int, int]] = []
        place_of_addresses, place_of_rows = 0, self._rows.data_ptr()
        for group, part in zip(groups, rows, strict=True):
            arithmetic, inputs, outputs, _ = group[0]
            launch = launch_by_table(arithmetic, len(inputs), len(outputs), len(part))
            self._launches.append((launch, place_of_addresses, place_of_rows))
            place_of_addresses += len(group) * (len(inputs) + len(outputs)) * ADDRESS_BYTES
            place_of_rows += part.nbytes
        self._sent: _Sent | None = None

    def run(self, addresses: list[int], stream: int) -> None:
        """Launches all groups on the arrays at these addresses; `stream` is PyTorch's current one."""
        sent = self._sent_for(addresses, stream)
        for start in sent.starts:
            start(stream)

    def _sent_for(self, addresses: list[int], stream: int) -> _Sent:
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # Copied by the graph itself on every replay, so it is valid only inside the graph.
            pinned = self._pinned(addresses)
            _captured.extend((pinned, self._rows))
            return self._send(pinned, addresses, stream)
        sent = self._sent
        if (
            sent is None
            or sent.stream != stream
            or (sent.addresses is not addresses and sent.addresses != addresses)
        ):
            # A new table, not the old one overwritten: kernels on other streams may still read that.
            sent = self._sent = self._send(self._pinned(addresses), addresses, stream)
        return sent

    def _send(self, pinned: torch.Tensor, addresses: list[int], stream: int) -> _Sent:
        table = pinned.to(self._device, non_blocking=True)
        start = table.data_ptr()
        starts = [
            launch((start + place_of_addresses, place_of_rows))
            for launch, place_of_addresses, place_of_rows in self._launches
        ]
        return _Sent(addresses, stream, table, starts)

    def numbers_for(self, addresses: Sequence[int]) -> NDArray[np.int64]:
        """Computes the table: for every task the addresses of its inputs, then of its outputs."""
        return np.array(addresses, np.int64)[self._positions] + self._offsets

    def _pinned(self, addresses: Sequence[int]) -> torch.Tensor:
        """Returns the table in pinned memory, for an asynchronous copy; PyTorch reuses it after the copy."""
        numbers = torch.from_numpy(self.numbers_for(addresses))
        return numbers.pin_memory() if self._device.type == "cuda" else numbers


MAX_ARGUMENTS = 40
"""Maximum number of addresses passed as arguments; more addresses or tasks are passed in a table."""


class _Alone(NamedTuple):
    """A task that is launched by itself."""

    launch: Launch
    arrays: tuple[AddressOffset, ...]
    num_elements: int

    def on(self, addresses: list[int]) -> Start:
        """Returns a function that launches the pass on the arrays at these addresses."""
        return self.launch(
            [*[addresses[position] + offset for position, offset in self.arrays], self.num_elements]
        )


class GpuPass:
    """Tasks on the arrays of one device, which is the current one; prepared, and compiled, before these."""

    def __init__(self, tasks: Sequence[KernelTask], device: torch.device) -> None:
        from crossdevice.kernels.cuda.triton_launching import launch_by_arguments

        kinds: dict[tuple[object, ...], list[KernelTask]] = {}
        for task in tasks:
            if task.num_elements:
                kinds.setdefault((task.arithmetic, len(task.inputs), len(task.outputs)), []).append(task)
        self._alone: list[_Alone] = []
        tabled: list[list[KernelTask]] = []
        for kind in kinds.values():
            arithmetic, inputs, outputs, num_elements = kind[0]
            has_many = arithmetic.max_arrays is None or len(inputs) + len(outputs) > MAX_ARGUMENTS
            if len(kind) > 1 or has_many:
                tabled.append(kind)
                continue
            num_programs = -(-num_elements // block_elements(arithmetic))
            launch = launch_by_arguments(arithmetic, len(inputs), len(outputs), num_programs)
            self._alone.append(_Alone(launch, (*inputs, *outputs), num_elements))
        self._table = AddressTable(tabled, device) if tabled else None

    def run(self, addresses: list[int], stream: int) -> None:
        """Launches all tasks on the arrays at these addresses; `stream` is PyTorch's current one."""
        self.bound(addresses)(stream)

    def bound(self, addresses: list[int]) -> Start:
        """Returns a function that launches all tasks on the arrays at these addresses."""
        starts, table = [task.on(addresses) for task in self._alone], self._table
        if table is None and len(starts) == 1:
            return starts[0]

        def start_all(stream: int) -> None:
            for start in starts:
                start(stream)
            if table is not None:
                table.run(addresses, stream)

        return start_all

"""The fused pass over a GPU's memory: all tasks of a batch, in one launch for each arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from crossdevice.kernels.cuda.address_table import AddressTable
from crossdevice.kernels.cuda.families import block_elements
from crossdevice.kernels.cuda.task import AddressOffset, KernelTask, Launch, Start

MAX_ARGUMENTS = 40
"""Addresses that a launch takes as arguments; more of them, or more tasks, come in a table."""


class _Alone(NamedTuple):
    """A task that is launched by itself."""

    launch: Launch
    arrays: tuple[AddressOffset, ...]
    num_elements: int

    def on(self, addresses: list[int]) -> Start:
        """A function that starts it on the arrays at these addresses."""
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
            if len(kind) > 1 or len(inputs) + len(outputs) > MAX_ARGUMENTS:
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
        """A function that launches all tasks on the arrays at these addresses."""
        starts, table = [task.on(addresses) for task in self._alone], self._table
        if table is None and len(starts) == 1:
            return starts[0]

        def start_all(stream: int) -> None:
            for start in starts:
                start(stream)
            if table is not None:
                table.run(addresses, stream)

        return start_all

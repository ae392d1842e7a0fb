"""The fused pass over a GPU's memory: all tasks of a batch, in one launch for each arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from crossdevice.kernels.cuda.address_table import AddressTable
from crossdevice.kernels.cuda.launching import block_elements, launch_by_arguments, launch_by_table
from crossdevice.kernels.cuda.task import KernelTask

MAX_ARGUMENTS = 40
"""Addresses that a launch takes as arguments; more of them, or more tasks, come in a table."""


class GpuPass:
    """Tasks on the arrays of one device, prepared before these are there."""

    def __init__(self, tasks: Sequence[KernelTask], device: torch.device) -> None:
        self._number = device.index or 0
        kinds: dict[tuple[object, ...], list[KernelTask]] = {}
        for task in tasks:
            if task.num_elements:
                kinds.setdefault((task.arithmetic, len(task.inputs), len(task.outputs)), []).append(task)
        self._alone = [kind[0] for kind in kinds.values() if _fits_arguments(kind)]
        tabled = [kind for kind in kinds.values() if not _fits_arguments(kind)]
        self._table = AddressTable(tabled, device) if tabled else None

    def run(self, addresses: list[int], stream: int) -> None:
        """Launches all tasks on the arrays at these addresses; `stream` is PyTorch's current one."""
        for arithmetic, inputs, outputs, num_elements in self._alone:
            launch = launch_by_arguments(arithmetic, len(inputs), len(outputs), self._number)
            launch(
                -(-num_elements // block_elements(arithmetic)),
                stream,
                tuple([addresses[number] + offset for number, offset in inputs]),
                tuple([addresses[number] + offset for number, offset in outputs]),
                num_elements,
            )
        if self._table is not None:
            for task, num_rows, place_of_addresses, place_of_rows in self._table.on_device(addresses, stream):
                launch = launch_by_table(task.arithmetic, len(task.inputs), len(task.outputs), self._number)
                launch(num_rows, stream, place_of_addresses, place_of_rows)


def _fits_arguments(tasks: Sequence[KernelTask]) -> bool:
    return len(tasks) == 1 and len(tasks[0].inputs) + len(tasks[0].outputs) <= MAX_ARGUMENTS

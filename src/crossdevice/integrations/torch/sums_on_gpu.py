"""Sums of gradients on GPUs, moved to the host at the end of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from crossdevice.integrations.torch.gradient_sums import DenseSum, GradientSum
from crossdevice.kernels.cuda.driver import gpu_unavailable, kernels_unavailable

if TYPE_CHECKING:
    from crossdevice.kernels.cuda.gpu_sums import GpuSums

Place = tuple[torch.device, np.dtype[Any]]
"""A device, and the dtype of the elements there."""


class _Group(NamedTuple):
    """Parameters with gradients that are added in one launch."""

    numbers: Sequence[int]
    sums: GpuSums


class SumsOnGpu:
    """Sums of all parameters with dense gradients on a GPU that has the kernels."""

    def __init__(self) -> None:
        self._groups: dict[Place, list[_Group]] = {}
        self._used: set[int] = set()
        """Parameters that have something in a sum on a GPU, in this step."""

    @property
    def num_apart(self) -> int:
        """The number of elements that parts cannot hold; waits for GPUs."""
        groups = [group for groups in self._groups.values() for group in groups]
        return sum(group.sums.num_apart for group in groups if self._used & {*group.numbers})

    def add(
        self, gradients: Mapping[int, torch.Tensor], weight: int, sums: Mapping[int, GradientSum]
    ) -> set[int]:
        """Adds those gradients, times a weight, that can be added on a GPU; returns their numbers.

        A group in which more elements need more than its parts than there is room for moves to the host.
        """
        taken: set[int] = set()
        by_place: dict[Place, dict[int, torch.Tensor]] = {}
        for number, gradient in gradients.items():
            total = sums[number]
            if isinstance(total, DenseSum) and is_added_there(gradient):
                flat = torch.view_as_real(gradient) if gradient.is_complex() else gradient
                by_place.setdefault((gradient.device, total.part), {})[number] = flat
        for place, arrays in by_place.items():
            groups = self._groups.setdefault(place, [])
            new = sorted({*arrays} - {number for group in groups for number in group.numbers})
            if new:
                groups.append(_group_of(new, [arrays[number].numel() for number in new], place))
            for group in groups:
                mine = {n: arrays[number] for n, number in enumerate(group.numbers) if number in arrays}
                if not mine:
                    continue
                if group.sums.is_full:
                    self._move(group, sums)
                group.sums.add(mine, weight)
                taken |= {group.numbers[n] for n in mine}
        self._used |= taken
        return taken

    def move_to_host(self, sums: Mapping[int, GradientSum]) -> None:
        """Adds the sums on GPUs to those of the host, and resets them."""
        for groups in self._groups.values():
            for group in groups:
                if self._used & {*group.numbers}:
                    self._move(group, sums)
        self._used = set()

    def clear(self) -> None:
        """Resets the sums and keeps the memory."""
        for groups in self._groups.values():
            for group in groups:
                group.sums.clear()
        self._used = set()

    def _move(self, group: _Group, sums: Mapping[int, GradientSum]) -> None:
        for number, moved in zip(group.numbers, group.sums.on_host(), strict=True):
            total = sums.get(number)
            if number in self._used and isinstance(total, DenseSum):
                total.take(moved)
        group.sums.clear()


def is_added_there(gradient: torch.Tensor) -> bool:
    """Returns True if the gradient is on a GPU that has the kernels."""
    return (
        gradient.is_cuda and kernels_unavailable() is None and gpu_unavailable(gradient.get_device()) is None
    )


def _group_of(numbers: Sequence[int], sizes: Sequence[int], place: Place) -> _Group:
    from crossdevice.kernels.cuda.gpu_sums import GpuSums  # Triton takes its time

    device, dtype = place
    return _Group(numbers, GpuSums(sizes, dtype, device))

"""Sums of the gradients of each parameter in a training step: of dense ones, and of rows of embeddings.

Dense gradients on GPUs are added there; at the end of the step their sums move to the host.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from crossdevice.backends.protocol import dtype_named
from crossdevice.backends.registry import backend_named
from crossdevice.errors import OptionError
from crossdevice.kernels.cuda.driver import gpu_unavailable, kernels_unavailable
from crossdevice.kernels.host.running_sum import RunningSum
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.device import host_device
from crossdevice.values.dtypes import PARTS

if TYPE_CHECKING:
    from crossdevice.kernels.cuda.gpu_sums import GpuSums

LARGEST_WEIGHT = 1 << 53
"""Whole numbers up to here are float64 without rounding."""


class DenseSum:
    """The sum of the dense gradients of one parameter, in the order of its indices."""

    def __init__(self, dtype: str, shape: torch.Size) -> None:
        self.kind = ["dense", dtype]
        self.part = dtype_named(PARTS.get(dtype, dtype))
        self.size = shape.numel() * (2 if dtype in PARTS else 1)

    @functools.cached_property
    def running(self) -> RunningSum:
        """The sum on the host, if any: gradients may be added up on a GPU until the step ends."""
        return RunningSum(self.size, self.part, "exact")

    @property
    def num_apart(self) -> int:
        """The number of elements that are kept as fractions."""
        return self.running.num_apart if "running" in vars(self) else 0

    def emptied(self) -> GradientSum:
        """Resets the sum and keeps the memory."""
        if "running" in vars(self):
            self.running.clear()
        return self

    def take(self, moved: RunningSum) -> None:
        """Adds a sum from elsewhere."""
        if "running" in vars(self):
            self.running.merge(moved)
        else:
            self.running = moved

    def running_for(self, gradient: torch.Tensor) -> RunningSum:  # noqa: ARG002 - rows need it
        """Returns the sum for a gradient."""
        return self.running

    def flat(self, gradient: torch.Tensor) -> NDArray[Any]:
        """Returns the elements of a gradient, on the host."""
        flat: NDArray[Any] = backend_named("torch").to_host(gradient).view(self.part)
        return flat

    def match_ranks(self, call: GroupCall) -> None:
        """Does nothing: dense sums have the same elements on all ranks."""

    def gradient(self, out: NDArray[Any], parameter: torch.Tensor) -> torch.Tensor:
        """Returns the result as a gradient, with the parameter's device and layout."""
        whole = out.view(dtype_named(self.kind[1]))
        made: torch.Tensor = backend_named("torch").from_host(whole, tuple(parameter.shape), host_device(0))
        if made.stride() == parameter.stride() and parameter.device == made.device:
            return made
        return torch.empty_like(parameter, dtype=made.dtype).copy_(made)


class RowSum:
    """The sum of sparse gradients of one parameter, over the union of their rows."""

    def __init__(self, dtype: str, shape: torch.Size) -> None:
        self.kind = ["rows", dtype]
        self.part = dtype_named(PARTS.get(dtype, dtype))
        self.width = shape[1:].numel() * (2 if dtype in PARTS else 1)
        self.rows: NDArray[np.int64] = np.empty(0, np.int64)
        self.running = RunningSum(0, self.part, "exact")

    @property
    def size(self) -> int:
        """The number of elements of all rows that were added."""
        return self.running.size

    @property
    def num_apart(self) -> int:
        """The number of elements that are kept as fractions."""
        return self.running.num_apart

    def emptied(self) -> GradientSum:
        """Drops what was added; other rows may come."""
        self.rows, self.running = np.empty(0, np.int64), RunningSum(0, self.part, "exact")
        return self

    def running_for(self, gradient: torch.Tensor) -> RunningSum:
        """Returns the sum for a gradient, with room for its rows."""
        # In the order in which the backward pass has left repeated rows, which is the micro-batch's own.
        self.extend(np.unique(gradient._indices()[0].cpu().numpy()))
        return self.running

    def flat(self, gradient: torch.Tensor) -> NDArray[Any]:
        """Returns the elements of all rows of the sum, on the host; rows without a gradient are -0.0."""
        gradient = gradient.coalesce()
        # Rows that are absent must change nothing, not even the sign of a zero.
        spread = np.full((len(self.rows), self.width), -0.0, self.part)
        places = np.searchsorted(self.rows, gradient.indices()[0].cpu().numpy())
        values = backend_named("torch").to_host(gradient.values()).view(self.part)
        spread[places] = values.reshape(-1, self.width)
        return spread.reshape(-1)

    def extend(self, rows: NDArray[np.int64]) -> None:
        """Makes room for more rows."""
        united = np.union1d(self.rows, rows)
        if len(united) == len(self.rows):
            return
        places = np.searchsorted(united, self.rows)
        elements = (places[:, None] * self.width + np.arange(self.width)).reshape(-1)
        self.running = self.running.spread_to(len(united) * self.width, elements)
        self.rows = united

    def match_ranks(self, call: GroupCall) -> None:
        """Makes room for the rows of all ranks."""
        for rows in call.all_gather_uneven(self.rows.astype("<i8").tobytes()):
            self.extend(np.frombuffer(rows, "<i8").astype(np.int64))

    def gradient(self, out: NDArray[Any], parameter: torch.Tensor) -> torch.Tensor:
        """Returns the result as a gradient, with the parameter's device and layout."""
        whole = out.view(dtype_named(self.kind[1]))
        shape = (len(self.rows), *parameter.shape[1:])
        values = backend_named("torch").from_host(whole, shape, host_device(0))
        indices = torch.from_numpy(self.rows)[None]
        return torch.sparse_coo_tensor(
            indices,
            values,
            parameter.shape,
            device=parameter.device,
            is_coalesced=True,
            check_invariants=False,
        )


GradientSum = DenseSum | RowSum


def no_weight() -> OptionError:
    """Makes the error of a step in which no micro-batch counts."""
    return OptionError("the weights of all workers add up to 0; a mean needs a positive sum of weights")


def whole_weight(weight: int) -> int:
    """Returns the weight of a micro-batch, if it is a whole number that float64 holds."""
    try:
        factor = -1 if isinstance(weight, bool) else operator.index(weight)
    except TypeError:
        factor = -1
    if not 0 <= factor <= LARGEST_WEIGHT:
        raise OptionError(f"the weight must be a whole number from 0 to 2**53; got {weight!r}")
    return factor


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
            if isinstance(total, DenseSum) and is_added_on_gpu(gradient):
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


def is_added_on_gpu(gradient: torch.Tensor) -> bool:
    """Returns True if the gradient is on a GPU that has the kernels."""
    return (
        gradient.is_cuda and kernels_unavailable() is None and gpu_unavailable(gradient.get_device()) is None
    )


def _group_of(numbers: Sequence[int], sizes: Sequence[int], place: Place) -> _Group:
    from crossdevice.kernels.cuda.gpu_sums import GpuSums  # Triton takes its time

    device, dtype = place
    return _Group(numbers, GpuSums(sizes, dtype, device))

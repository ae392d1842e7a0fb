"""The measured work: one collective on a number of devices, with the bytes and factors of nccl-tests."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from crossdevice.errors import CrossDeviceError, OptionError
from crossdevice.values.dtypes import FLOATS, INTEGERS, ITEM_BYTES, result_dtype
from crossdevice.values.reduce_op import ReduceOp

ResultPlace = Literal["given", "fresh", "in_place"]
"""Place of results: memory the caller brought, new memory, or that of the inputs."""

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "gather")
DTYPES = (*FLOATS, *INTEGERS)

_DTYPE_NAMES = {"half": "float16", "float": "float32", "double": "float64"}
_OP_NAMES = {"AVG": "MEAN"}

GIGABYTE = 1e9
"""Bandwidths are in powers of ten, as nccl-tests prints them; sizes are in powers of two."""


class UnsupportedWorkError(CrossDeviceError, NotImplementedError):
    """Workload that a competitor cannot do; the message names what it lacks."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """One collective over arrays of `shapes` on each of `num_devices` replicas.

    >>> Workload("all_reduce", "SUM", "float32", 4, ((1024,),)).bus_factor
    1.5
    """

    collective: str
    op: str
    dtype: str
    num_devices: int
    shapes: tuple[tuple[int, ...], ...]
    is_spread: bool = False
    """True if magnitudes of floats differ by up to 10^11 between replicas, and not by about 10."""

    @staticmethod
    def of_size(collective: str, op: str, dtype: str, num_devices: int, size_bytes: int) -> Workload:
        """Returns work with a `size` column of about `size_bytes`: one whole element per replica or more."""
        shares = num_devices if collective == "gather" else 1
        count = max(1, size_bytes // (ITEM_BYTES[dtype] * shares))
        return Workload(collective, op, dtype, num_devices, ((count,),))

    @property
    def reduces(self) -> bool:
        """True if replicas are combined, not only copied."""
        return self.collective in ("all_reduce", "reduce")

    @property
    def num_elements(self) -> int:
        """Number of elements of one replica."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def count(self) -> int:
        """The `count` column; for a gather the number of elements of the result."""
        return self.num_elements * (self.num_devices if self.collective == "gather" else 1)

    @property
    def size_bytes(self) -> int:
        """The `size` column."""
        return self.count * ITEM_BYTES[self.dtype]

    @property
    def root(self) -> int:
        """The replica that gives or gets; -1 if all do."""
        return -1 if self.collective == "all_reduce" else 0

    @property
    def num_inputs(self) -> int:
        """Number of replicas with an input."""
        return 1 if self.collective == "broadcast" else self.num_devices

    @property
    def num_results(self) -> int:
        """Number of destinations."""
        return 1 if self.collective in ("reduce", "gather") else self.num_devices

    @property
    def result_dtype(self) -> str:
        """The dtype of the results."""
        return result_dtype(self.dtype, ReduceOp(self.op)) if self.reduces else self.dtype

    @property
    def bus_factor(self) -> float:
        """busbw / algbw: traffic of the slowest link in a good algorithm, per byte of `size`."""
        from_others = (self.num_devices - 1) / self.num_devices
        return {"all_reduce": 2 * from_others, "gather": from_others}.get(self.collective, 1.0)

    @property
    def moved_bytes(self) -> int:
        """The least that is read and written in one memory if every destination has a result of its own."""
        if self.collective == "gather":
            return 2 * self.size_bytes
        return (self.num_inputs + self.num_results) * self.size_bytes

    def bus_bandwidth_of_copy(self, copy_bandwidth: float) -> float:
        """Returns the busbw of this work at the speed of a copy, which reads and writes each byte."""
        return copy_bandwidth * self.size_bytes / self.moved_bytes * self.bus_factor


def sizes_between(smallest: int, largest: int, factor: int) -> list[int]:
    """Sizes from the smallest, each `factor` times the one before, up to the largest.

    >>> sizes_between(1024, 5000, 2)
    [1024, 2048, 4096]
    """
    if largest < smallest:
        raise OptionError(f"the largest size, {largest} bytes, is below the smallest, {smallest}")
    if factor < 2:
        raise OptionError(f"the step between sizes is a factor of 2 or more; got {factor}")
    sizes = [smallest]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    return sizes


def dtype_of(text: str) -> str:
    """Returns the dtype of that name, ours or nccl-tests': float is float32."""
    name = _DTYPE_NAMES.get(text, text)
    if name not in DTYPES:
        raise OptionError(f"{text!r} is not a dtype to measure; expected one of {', '.join(DTYPES)}")
    return name


def op_of(text: str) -> str:
    """Returns the operation of that name, ours or nccl-tests': avg is MEAN."""
    return ReduceOp(_OP_NAMES.get(text.upper(), text)).name

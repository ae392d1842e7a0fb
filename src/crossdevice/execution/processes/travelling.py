"""Arrays that cross from one process to another: its replicas', or one partial result for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from numpy.typing import NDArray

from crossdevice.backends.protocol import Array
from crossdevice.plans.reduced_leaf import ReducedLeaf
from crossdevice.plans.tasks import TaskPlan
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.process_groups.shared.shared_memory import SharedMemory
from crossdevice.values.device import Device
from crossdevice.values.dtypes import COMPLEXES, INTEGERS, ITEM_BYTES
from crossdevice.values.options import Precision
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights

Flat: TypeAlias = NDArray[Any]

Delivery: TypeAlias = Callable[[], list[tuple[Array, ...]]]
"""Puts what has come on its destinations, also into `out`; for when no other rank is waited for any more."""

Inputs: TypeAlias = "Mapping[int, Sequence[Any]]"
"""By leaf, the flat array of each replica of this rank."""

Results: TypeAlias = "Mapping[tuple[int, int], Sequence[Any]]"
"""By leaf and replica, the flat arrays that are to hold a result of this rank: all come to hold the same."""


class SmallArrays(NamedTuple):
    """Memory in which a rank finds the arrays of all ranks after one exchange, or one step.

    In shared memory there are two of each, by parity of the step; elsewhere nobody reads an array of the
    last exchange.
    """

    own: Sequence[Sequence[Flat]]
    """Where this rank's replicas go."""
    inputs: Sequence[Sequence[Flat]]
    """The replicas of all ranks, in order."""
    of_ranks: Sequence[Sequence[Flat]]
    """The same by rank, for an exchange."""
    shared: SharedMemory | None


class Program(Protocol):
    """The tasks of one rank on one transport, prepared: all but the arrays."""

    plan: TaskPlan

    def run(self, call: GroupCall, inputs: Inputs, results: Results, weights: Weights | None = None) -> None:
        """Makes this rank's results, of the inputs of all ranks, which make the same call."""

    def small_arrays(self) -> SmallArrays | None:
        """Memory for arrays of which every rank combines all; None unless that is the plan."""

    def explained(self) -> str:
        """Human-readable description of what this rank does, for arrays in private memory."""


class Emit(Protocol):
    """Emits the tasks of a call, proved: a layout of which all but this is known."""

    def __call__(self, *, is_small: bool, seen_by: int | None) -> TaskPlan:
        """With `is_small` every rank combines everything; with `seen_by` as that rank sees it."""


PrepareProgram: TypeAlias = Callable[[Emit, Sequence[ReducedLeaf], ProcessGroup, tuple[Device, ...]], Program]
"""How a transport prepares the tasks for these leaves, none if they are copied, on these devices."""

_WIDE = {
    "float16": "float64",
    "bfloat16": "float64",
    "float32": "float64",
    "complex64": "complex128",
}


def partial_dtype(
    dtype: str, op: ReduceOp, precision: Precision, most_replicas: int, *, is_weighted: bool = False
) -> str | None:
    """The dtype of one partial result per process; None if its replicas' arrays travel themselves.

    They do whenever a partial result would not have the bits of the whole: with weights, for medians, under
    `exact`, and for true means of integers. Under `accurate`, partial sums are as wide as the accumulator,
    and travel only if that is fewer bytes than the arrays, so that one replica per process sends what a ring
    would.

    >>> partial_dtype("float32", ReduceOp.SUM, "accurate", most_replicas=4)
    'float64'
    >>> partial_dtype("float32", ReduceOp.SUM, "accurate", most_replicas=2) is None
    True
    """
    if most_replicas == 1 or is_weighted or op.is_order_statistic:
        return None
    if precision == "fast" or op in (ReduceOp.MIN, ReduceOp.MAX):
        return dtype
    if dtype in INTEGERS:
        return None if op is ReduceOp.MEAN else dtype
    wide = _WIDE.get(dtype)
    if wide is None or precision == "exact" or (op is ReduceOp.PROD and dtype in COMPLEXES):
        return None
    return wide if ITEM_BYTES[wide] < most_replicas * ITEM_BYTES[dtype] else None

"""Programs, which transports prepare: tasks of one rank, and the flat arrays on which they run."""

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

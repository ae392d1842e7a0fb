"""Programs, which transports prepare: tasks of one rank, and the flat arrays on which they run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from numpy.typing import NDArray

from crossdevice.backends.protocol import Array
from crossdevice.execution.signature_cache import SignatureCache
from crossdevice.kernels.host.fused_pass import fused_batch, repeated_pass
from crossdevice.plans.tasks import ReducedLeaf, Ref, Task, TaskPlan
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.process_groups.shared.shared_memory import SharedMemory
from crossdevice.values.device import Device
from crossdevice.values.recipe import COPYING
from crossdevice.values.weights import Weights

Flat: TypeAlias = NDArray[Any]

ALONE_BYTES = 128 << 10
"""Up to here, of what all ranks bring to windows, every rank combines everything: one step instead of two."""

SMALL_TASKS_BYTES = 1 << 20
"""Below, a plain copy is faster than a pass that has to be laid out, and threads take longer to wake."""

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


def targets_of(results: Results, ref: Ref) -> list[Flat]:
    """Returns a range of all arrays that are to hold a result."""
    buffer, start, stop = ref
    return [array[start:stop] for array in results[buffer.leaf, buffer.replica]]


class TaskPasses:
    """The own tasks of a program as passes over arrays that differ from call to call.

    Those of few bytes are laid out once, for given numbers of arrays; the rest is laid out in each call, and
    shared by threads.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        """`tasks` are those of one rank."""
        self._recipe = tasks[0].recipe if tasks else COPYING
        self._are_copies = all(task.is_copy for task in tasks)
        num_bytes = sum([ref.num_bytes for task in tasks for ref in (*task.inputs, *task.outputs)])
        self._is_small = num_bytes < SMALL_TASKS_BYTES
        self._kept: SignatureCache[list[Callable[[Any, Any], None]]] = SignatureCache()

    def run(
        self, place: Hashable, tasks: Sequence[tuple[Sequence[Flat], Sequence[Flat]]], weights: Weights | None
    ) -> None:
        """Runs tasks, whose inputs and outputs these are; those at one `place` have the same sizes."""
        if not self._is_small or weights is not None:
            fused_batch(tasks, self._recipe.with_weights(weights))
        elif self._are_copies:
            for (source,), targets in tasks:
                for target in targets:
                    target[:] = source
        else:
            key = place, *[len(outputs) for _, outputs in tasks]
            passes = self._kept.get(key)
            if passes is None:
                passes = self._kept[key] = [repeated_pass(*task, self._recipe) for task in tasks]
            for combine, (inputs, outputs) in zip(passes, tasks, strict=True):
                combine(tuple(inputs), tuple(outputs))


class Emit(Protocol):
    """Emits the tasks of a call, proved: a layout of which all but this is known."""

    def __call__(self, *, is_small: bool, seen_by: int | None) -> TaskPlan:
        """With `is_small` every rank combines everything; with `seen_by` as that rank sees it."""


PrepareProgram: TypeAlias = Callable[[Emit, Sequence[ReducedLeaf], ProcessGroup, tuple[Device, ...]], Program]
"""How a transport prepares the tasks for these leaves, none if they are copied, on these devices."""

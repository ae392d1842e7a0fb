"""Dense batches, prepared once per signature: packs, plans and passes are kept, arrays come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from crossdevice.backends.protocol import Array, Backend
from crossdevice.execution.local.gpu_passes import GpuPasses, fused_pass_unavailable
from crossdevice.execution.local.host_passes import FlatPasses, HostPasses
from crossdevice.execution.local.passes import Results, in_sequence
from crossdevice.execution.local.stepped_packs import SteppedPacks
from crossdevice.execution.reading.leaf_spec import Columns, Dense, LeafSpec, Outs, items_of
from crossdevice.execution.tracing import Work, flight_recorder, now
from crossdevice.values.device import Device
from crossdevice.values.distributed import DistributedValues
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import UNKNOWN_WEIGHTS, Weights

if TYPE_CHECKING:
    from crossdevice.execution.local.planning import Planner

MAX_PROVED_PACKS = 32
"""Packs whose plans are proved for a fused pass, which is the same for any number of packs. Algorithms whose
plans vary by pack (roots that take turns) repeat themselves long before."""


class Prepared(Protocol):
    """A call that was read, checked, planned and proved: all of it but its arrays."""

    def run(self, columns: Columns, outs: Outs, weights: Weights | None = None) -> list[tuple[Array, ...]]:
        """For each leaf its result on each destination, written to `outs` where given."""

    def bind(self, columns: Columns, outs: Columns, weights: Weights | None = None) -> Callable[[], None]:
        """A function that makes the call with these arrays, and writes to `outs`, whenever it is called."""

    def flat_passes(self) -> FlatPasses | None:
        """The same for arrays that kernels read themselves; None unless all is done in the host's memory."""


class CheckedCall(Protocol):
    """A call that was read and has passed every check, ready to be made, kept, bound or started."""

    @property
    def dense(self) -> Sequence[Dense]:
        """Its leaves: arrays, where results go, and `out`; the shape of a leaf may be that of one array."""

    @property
    def container(self) -> type[DistributedValues]:
        """The container of results on several destinations."""

    @property
    def is_dense(self) -> bool:
        """True if it can be repeated on other arrays: all leaves are plain arrays, read as they are."""

    @property
    def weights(self) -> Weights | None:
        """The weights of the replicas."""

    @property
    def places(self) -> Sequence[tuple[int, tuple[Device, ...]]]:
        """For each value the number of its leaves, and the destinations of their results."""

    @property
    def bytes_of_results(self) -> Sequence[int] | None:
        """Bytes of a result of each leaf, where inputs and results of a leaf are of one length each."""

    @property
    def check_outs(self) -> Callable[[Columns, Outs], None]:
        """The check of memory for the results of another call like this; it keeps no arrays."""

    def prepared(self, planner: Planner) -> Prepared | None:
        """The call without its arrays; None if it cannot be repeated on others."""

    def run(self, planner: Planner) -> list[Any]:
        """The wrapped result of each value."""

    def wrapped(self, results: Iterable[Sequence[Any]]) -> list[Any]:
        """The results of all leaves, as one value for each that was read."""


class CallInFull:
    """A call of which nothing can be kept, such as one by a function of the user's."""

    dense: Sequence[Dense] = ()
    container: type[DistributedValues] = DistributedValues
    is_dense = False
    weights: Weights | None = None
    places: Sequence[tuple[int, tuple[Device, ...]]] = ()
    bytes_of_results: Sequence[int] | None = None

    def __init__(self, make: Callable[[], list[Any]]) -> None:
        self._make = make

    def check_outs(self, columns: Columns, outs: Outs) -> None:
        """Does nothing: the call itself checks."""

    def prepared(self, planner: Planner) -> None:
        """None: it cannot be repeated on other arrays."""

    def run(self, planner: Planner) -> list[Any]:  # noqa: ARG002
        """The wrapped result of each value."""
        return self._make()

    def wrapped(self, results: Iterable[Sequence[Any]]) -> list[Any]:
        """The results themselves."""
        return list(results)


class PreparedReduction:
    """Everything about a batch of dense leaves that does not depend on their elements."""

    def __init__(
        self,
        specs: Sequence[LeafSpec],
        op: ReduceOp,
        options: CommunicationOptions,
        planner: Planner,
        *,
        is_weighted: bool = False,
    ) -> None:
        algorithm = planner.algorithm
        dtypes = {number: spec.result_dtype(op, is_weighted) for number, spec in enumerate(specs)}
        recipes = [
            recipe_for(spec.own_op or op, options, len(spec.devices), is_weighted and spec.own_op is None)
            for spec in specs
        ]
        fused = _fused_passes(specs, dtypes, recipes, options, algorithm.reduce_to_device)
        apart = {number: spec for number, spec in enumerate(specs) if number not in fused}
        stepped = SteppedPacks(apart, dtypes)
        for number, pack in enumerate(algorithm.packing.packs(items_of(specs), options.bytes_per_pack)):
            leaf = pack[0].item
            own_op = specs[leaf].own_op or op
            if leaf in fused and options.precision != "fast":
                if number < MAX_PROVED_PACKS:
                    planner.prove(specs[leaf], number, options.precision, own_op)
                continue
            num_elements = sum(stop - start for _, start, stop in pack)
            plan = planner.plan_pack(specs[leaf], num_elements, number, options.precision, own_op)
            fused.get(leaf, stepped).add_pack(pack, plan, recipes[leaf])
        if options.precision != "fast":
            # Replicas in order, whatever the plan: the bits of a plan that is run step by step.
            for leaf, passes in fused.items():
                passes.add_leaf(leaf, recipes[leaf])
        self._num_leaves = len(specs)
        self._parts: list[HostPasses | GpuPasses | SteppedPacks] = [
            *dict.fromkeys(fused.values()),
            *([stepped] if apart else []),
        ]
        only = self._parts[0] if len(specs) == 1 else None
        self._alone = only if isinstance(only, HostPasses) and only.is_alone else None
        self._work = _work(planner.name, specs, op, options, num_fused=len(fused))

    def run(self, columns: Columns, outs: Outs, weights: Weights | None = None) -> list[tuple[Array, ...]]:
        """For each leaf its result on each destination, written to `outs` where given."""
        # Not `with recorded(...)`: small calls spend their time here.
        started = now()
        try:
            if self._alone is not None:
                results = [self._alone.run_alone(columns[0], outs[0], weights)]
            else:
                results = self._run(columns, outs, weights)
        except Exception as error:
            flight_recorder.events.append((self._work, started, now(), 1))
            flight_recorder.dump_after(error)
            raise
        flight_recorder.events.append((self._work, started, now(), 1))
        return results

    def flat_passes(self) -> FlatPasses | None:
        """The same for arrays that kernels read themselves; None unless all is done in the host's memory."""
        part = self._parts[0] if len(self._parts) == 1 else None
        return part.flat_passes(self._work) if isinstance(part, HostPasses) else None

    def _run(self, columns: Columns, outs: Outs, weights: Weights | None) -> list[tuple[Array, ...]]:
        results: Results = {}
        for part in self._parts:
            results.update(part.run(columns, outs, weights))
        return [results[number] for number in range(self._num_leaves)]

    def bind(self, columns: Columns, outs: Columns, weights: Weights | None = None) -> Callable[[], None]:
        """A function that reduces these arrays into those of `outs` whenever it is called."""
        return in_sequence([part.bound(columns, outs, weights) for part in self._parts])


def _fused_passes(
    specs: Sequence[LeafSpec],
    dtypes: Mapping[int, str],
    recipes: Sequence[Recipe],
    options: CommunicationOptions,
    via: Device | None,
) -> dict[int, HostPasses | GpuPasses]:
    """The fused pass of each leaf that has one: all of its devices, and `via`, share one memory."""
    if options.lowering == "off":
        return {}
    on_host: dict[int, LeafSpec] = {}
    on_gpus: dict[tuple[Backend, Device], dict[int, LeafSpec]] = {}
    for number, spec in enumerate(specs):
        if spec.shares_host_memory and (via is None or via.is_host):
            on_host[number] = spec
        gpu = spec.shared_gpu if via in (None, spec.shared_gpu) else None
        if gpu is not None and fused_pass_unavailable(spec, recipes[number], dtypes[number]) is None:
            on_gpus.setdefault((spec.backend, gpu), {})[number] = spec
    fused: dict[int, HostPasses | GpuPasses] = {}
    if on_host:
        host_passes = HostPasses(on_host, dtypes, shares_results=options.share_results)
        fused.update(dict.fromkeys(on_host, host_passes))
    for (_, gpu), leaves in on_gpus.items():
        gpu_passes = GpuPasses(leaves, dtypes, gpu, shares_results=options.share_results)
        fused.update(dict.fromkeys(leaves, gpu_passes))
    return fused


def recipe_for(
    op: ReduceOp, options: CommunicationOptions, num_replicas: int, is_weighted: bool = False
) -> Recipe:
    """Returns the recipe for this many replicas; the order of a plan and weights are filled in later."""
    if op.is_order_statistic:
        op.sorted_range(num_replicas)  # raises if there are too few
    if is_weighted:
        return Recipe(ReduceOp.SUM, options.precision, weights=UNKNOWN_WEIGHTS)
    if op is ReduceOp.MEAN:
        return Recipe(ReduceOp.SUM, options.precision, num_replicas)
    return Recipe(op, options.precision)


def _work(
    name: str, specs: Sequence[LeafSpec], op: ReduceOp, options: CommunicationOptions, *, num_fused: int
) -> Work:
    """The entry of the flight recorder for each run."""
    devices = tuple(dict.fromkeys(device for spec in specs for device in (*spec.devices, *spec.destinations)))
    num_bytes = sum(spec.num_bytes for spec in specs)
    how = f"{num_fused} fused, {len(specs) - num_fused} step by step"
    return Work("reduce", f"{name} {op.name}", devices, num_bytes, f"{options.precision}, {how}")

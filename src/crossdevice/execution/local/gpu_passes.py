"""The part of a batch that shares one GPU's memory: its plans, lowered to fused passes on that GPU."""

from __future__ import annotations

import functools
import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from crossdevice.backends.protocol import Array, Backend
from crossdevice.execution.local.passes import LeafRange, Passes, Results
from crossdevice.execution.reading.leaf_spec import Columns, LeafSpec, Out, Outs
from crossdevice.execution.reading.outputs import delivered
from crossdevice.execution.tracing import Work, flight_recorder, now
from crossdevice.kernels.cuda.driver import gpu_unavailable, kernels_unavailable
from crossdevice.kernels.cuda.families import (
    AddressOffset,
    KernelTask,
    arranged,
    parts_in,
)
from crossdevice.values.device import Device
from crossdevice.values.dtypes import ITEM_BYTES
from crossdevice.values.recipe import Recipe
from crossdevice.values.weights import Weights

if TYPE_CHECKING:
    from crossdevice.kernels.cuda.gpu_pass import GpuPass
    from crossdevice.kernels.cuda.result_blocks import ResultBlocks, Wanted

Result = TypeVar("Result")


def fused_pass_unavailable(spec: LeafSpec, recipe: Recipe, dtype: str) -> str | None:
    """Reason a leaf on one GPU is reduced step by step; None if a fused pass does it."""
    if not spec.backend.shares_gpu_arrays:
        return f"arrays of {spec.backend.name} do not reach the kernels of the GPU"
    arrangement = arranged(recipe, spec.dtype, dtype)
    if isinstance(arrangement, str):
        return arrangement
    most = arrangement.arithmetic.max_arrays
    if most is not None and max(len(spec.devices), len(spec.destinations)) > most:
        return f"this kernel of the GPU takes {most} replicas at most"
    return kernels_unavailable() or gpu_unavailable(spec.devices[0].index)


def _bits_of(weights: Weights | None) -> list[int]:
    """The bits of the weights, of their divisor and of what that lacks, as whole numbers."""
    if weights is None:
        return []
    return array("q", array("d", [*weights.factors, weights.divisor, weights.rest]).tobytes()).tolist()


class _Prepared(NamedTuple):
    """A pass, and the memory it needs for results that are given none."""

    work: GpuPass
    blocks: ResultBlocks
    numbers: list[int]
    """The leaves with results in the blocks."""


class GpuPasses(Passes):
    """Passes over leaves of one library on one GPU, prepared before there are arrays.

    All work goes to the stream that is current for the library: after what was put there before, and
    before what comes next. Only the first call waits for the GPU. With `shares_results`, and always
    where arrays are immutable, all destinations of a leaf get one memory.
    """

    def __init__(
        self,
        specs: Mapping[int, LeafSpec],
        dtypes: Mapping[int, str],
        device: Device,
        *,
        shares_results: bool,
    ) -> None:
        # Only now: importing PyTorch and Triton takes seconds.
        from crossdevice.kernels.cuda import gpu_pass, result_blocks, tensors

        super().__init__(specs)
        self._kernels, self._memory, self._tensors = gpu_pass, result_blocks, tensors
        self._dtypes = dtypes
        self._backend: Backend = next(iter(specs.values())).backend
        self._is_torch = self._backend.name == "torch"
        self._shares = shares_results or self._backend.is_immutable
        self._device = device
        self._place = tensors.device_named(device.type, device.index)
        self._prepared: dict[tuple[bool, ...], _Prepared] = {}
        self._reducing = Work("reduce", "fused passes", (device,))

    def run(self, columns: Columns, outs: Outs, weights: Weights | None = None) -> Results:
        """The results of each leaf, in new memory or in `outs`."""
        started = now()
        results = self._on_stream(functools.partial(self._run, columns, outs, weights))
        flight_recorder.events.append((self._reducing, started, now(), 1))
        return results

    def bound(self, columns: Columns, outs: Columns, weights: Weights | None = None) -> Callable[[], Any]:
        """A function that reduces these arrays into those of `outs` whenever it is called."""
        arrays = [array for number in self._specs for array in columns[number]]
        targets = [self._writable(number, outs[number]) for number in self._specs]
        if not self._is_torch or None in targets or not self._tensors.are_plain(arrays):
            # Copies have to be made anew in each call, and other libraries' streams waited for.
            return functools.partial(self.run, columns, outs, weights)
        written = [tensor for tensors in targets for tensor in tensors or ()]
        work, mark_written = self._prepared_for(targets).work, self._backend.mark_written
        # Aliases keep the memory of a tensor that is given another one, which is noticed after a launch.
        kept = [tensor.detach() for tensor in (*arrays, *written)]
        start = work.bound(_bits_of(weights) + self._tensors.addresses_of(kept))
        place, is_current, stream_of = self._place, self._tensors.is_current, self._tensors.stream_of

        def launch(_kept: object = kept) -> None:
            if is_current(place):
                start(stream_of(place))
            else:
                with self._tensors.working_on(place, None):
                    start(stream_of(place))
            mark_written(written)

        return launch

    def _on_stream(self, work: Callable[[], Result]) -> Result:
        """Does work with this device and the library's own stream as PyTorch's current ones."""
        handle = self._backend.gpu_stream(self._device)
        if handle is None and self._tensors.is_current(self._place):
            return work()
        with self._tensors.working_on(self._place, handle):
            return work()

    def _run(self, columns: Columns, outs: Outs, weights: Weights | None) -> Results:
        inputs = self._tensors.tensors_of([array for number in self._specs for array in columns[number]])
        targets = [self._writable(number, outs[number]) for number in self._specs]
        work, blocks, numbers = self._prepared_for(targets)
        given = [tensor for tensors in targets if tensors is not None for tensor in tensors]
        memory = blocks.blocks()
        addresses = self._tensors.addresses_of([*inputs, *given, *memory])
        work.run(_bits_of(weights) + addresses, self._tensors.stream_of(self._place))
        if self._backend.is_immutable:
            self._tensors.hold_until_done(inputs)
        # The GPU is at work by now: results are cut from their blocks meanwhile.
        made = dict(zip(numbers, blocks.cut(memory), strict=True))
        # The usual call, in a hurry: PyTorch's tensors are results as they are, and no `out` was written to.
        if (
            self._is_torch
            and not self._shares
            and len(made) == len(self._specs)
            and outs.count(None) == len(outs)
        ):
            return made
        results = {number: self._adopted(number, parts, outs[number]) for number, parts in made.items()}
        written = {
            number: tuple(outs[number] or ())
            for number, tensors in zip(self._specs, targets, strict=True)
            if tensors is not None
        }
        self._backend.mark_written(list(itertools.chain.from_iterable(written.values())))
        return results | written

    def _writable(self, number: int, out: Out) -> Sequence[Any] | None:
        """The tensors of `out` if kernels may and can write to all of them."""
        if out is None or number in self._read_twice:
            return None
        return self._tensors.writable_tensors(out)

    def _prepared_for(self, targets: Sequence[Sequence[Any] | None]) -> _Prepared:
        are_given = tuple([tensors is not None for tensors in targets])
        known = self._prepared.get(are_given)
        if known is None:
            known = self._prepared[are_given] = self._prepare(are_given)
        return known

    def _prepare(self, are_given: Sequence[bool]) -> _Prepared:
        """The pass for leaves of which some are given tensors to write to.

        Addresses come in this order: of the inputs, of the tensors given, of the blocks. Before them are the
        bits of the weights, if there are any, of their divisor and of what that lacks.
        """
        positions = itertools.count(len(self._weights))

        def places(number: int) -> list[AddressOffset]:
            return [AddressOffset(position) for position in itertools.islice(positions, number)]

        sources = {number: places(len(spec.devices)) for number, spec in self._specs.items()}
        given = itertools.compress(self._specs.items(), are_given)
        targets = {number: places(len(spec.destinations)) for number, spec in given}
        numbers = [number for number in self._specs if number not in targets]
        blocks = self._memory.ResultBlocks([self._wanted(number) for number in numbers], self._place)
        first_block = next(positions)
        for order, number in enumerate(numbers):
            offsets = blocks.places_of(order)
            targets[number] = [AddressOffset(first_block + block, offset) for block, offset in offsets]
        tasks = [
            made
            for recipe, ranges in self._passes.items()
            for task in ranges
            for made in self._for_kernels(task, recipe, sources[task.leaf], targets[task.leaf])
        ]
        return _Prepared(self._kernels.GpuPass(tasks, self._place), blocks, numbers)

    @functools.cached_property
    def _weights(self) -> tuple[AddressOffset, ...]:
        """Returns the places of the weights and their divisor; all leaves have as many replicas."""
        if all(recipe.weights is None for recipe in self._passes):
            return ()
        spec = next(iter(self._specs.values()))
        return tuple(map(AddressOffset, range(len(spec.devices) + 2)))

    def _wanted(self, number: int) -> Wanted:
        spec = self._specs[number]
        count = 1 if self._shares else len(spec.destinations)
        return self._memory.wanted(spec.shape, self._dtypes[number], count)

    def _for_kernels(
        self,
        task: LeafRange,
        recipe: Recipe,
        sources: Sequence[AddressOffset],
        targets: Sequence[AddressOffset],
    ) -> Iterator[KernelTask]:
        """A task as kernels take it; nothing if it only writes to results that share another's memory."""
        spec, dtype = self._specs[task.leaf], self._dtypes[task.leaf]
        arrangement = arranged(recipe, spec.dtype, dtype)
        assert not isinstance(arrangement, str), arrangement  # asked before, by fused_pass_unavailable
        written = [targets[position] for position in task.outputs if position < len(targets)]
        if not written:
            return
        read = [sources[position] for position in arrangement.positions or range(len(sources))]
        moved = [place.moved(task.start * ITEM_BYTES[spec.dtype]) for place in read]
        yield KernelTask(
            arrangement.arithmetic,
            (*moved, *self._weights),
            tuple(place.moved(task.start * ITEM_BYTES[dtype]) for place in written),
            (task.stop - task.start) * parts_in(spec.dtype),
        )

    def _adopted(self, number: int, made: Sequence[Any], out: Out) -> tuple[Array, ...]:
        backend, destinations = self._backend, self._specs[number].destinations
        arrays = tuple(made) if self._is_torch else tuple([backend.from_dlpack(tensor) for tensor in made])
        if self._shares:
            arrays = tuple([backend.read_only(arrays[0], device) for device in destinations])
        return delivered(arrays, out, backend)

"""Tasks of ranks of one host, which combine what the others show them in windows of shared memory.

In each round a rank brings what others read, combines what is its own to combine, and collects what others
have made for it. While a rank combines it can rely on the others having brought their part, and once all
have brought the next one the results of this round are there: so there is one step for each round, and one
more at the end unless results stay with those who make them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, cast

from crossdevice.backends.protocol import dtype_named
from crossdevice.execution.processes.programs import (
    ALONE_BYTES,
    Emit,
    Flat,
    Inputs,
    Results,
    SmallArrays,
    TaskPasses,
    targets_of,
)
from crossdevice.execution.processes.reduced_batch import Wanted, WantedCopies, not_shared
from crossdevice.execution.processes.verifying import LeafSums, Verification
from crossdevice.execution.signature_cache import SignatureCache
from crossdevice.execution.tracing import Work, recorded
from crossdevice.kernels.host.fused_pass import STREAMED_BYTES, fused_batch, fused_pass, selected_kernels
from crossdevice.kernels.host.meeting import compiled_meeting
from crossdevice.kernels.host.resources.threads import num_threads
from crossdevice.kernels.host.summed_pass import MovablePasses, Summed, bound_sums, movable_passes
from crossdevice.kernels.position_keys import ROW_BYTES
from crossdevice.plans.tasks import (
    LINE_ELEMENTS,
    ReducedLeaf,
    Ref,
    Round,
    Task,
    TaskPlan,
    packed_bytes,
    rounds_of,
)
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.process_groups.shared.shared_arrays import NOWHERE, Place
from crossdevice.process_groups.shared.shared_memory import WINDOW_BYTES, SharedMemory
from crossdevice.values.device import Device
from crossdevice.values.dtypes import ITEM_BYTES
from crossdevice.values.quantities import counted
from crossdevice.values.recipe import COPYING
from crossdevice.values.weights import Weights

MAX_ITEM_BYTES = max(ITEM_BYTES.values())

ROUNDS_AHEAD = 64
"""Rounds of a verified call that are laid out at once: after a pass Python's own memory is in no cache."""

KEPT_ROUNDS, KEPT_CALLS = 512, 4
"""Rounds and kinds of verified calls that are laid out once: each round takes some KB."""


def windows_unavailable(wanted: Wanted) -> str | None:
    """Reason a leaf does not go through windows; None if ranks share memory, and enough of it."""
    group, counts = wanted.group, wanted.counts
    if group.shared is None:
        return not_shared(group)
    if counts is not None and WINDOW_BYTES // group.size < max(counts) * LINE_ELEMENTS * MAX_ITEM_BYTES:
        return f"a window cannot show parts of {counted(max(counts), 'array')} at once"
    return None


def window_copies_unavailable(wanted: WantedCopies) -> str | None:
    """Reason copies do not go through windows; None if ranks share memory."""
    return not_shared(wanted.group) if wanted.group.shared is None else None


def are_small(leaves: Sequence[ReducedLeaf]) -> bool:
    """Returns True if every rank is to combine everything."""
    numbers = [leaves[0].num_arrays(rank) for rank in range(len(leaves[0].counts))]
    return packed_bytes(leaves) * sum(numbers) <= ALONE_BYTES


def prepare_windows(
    emit: Emit, leaves: Sequence[ReducedLeaf], group: ProcessGroup, devices: tuple[Device, ...]
) -> Windows:
    """The program of this rank, which has to know what everybody puts into windows, and where."""
    assert group.shared is not None
    is_small = bool(leaves) and are_small(leaves)
    return Windows(emit(is_small=is_small, seen_by=None), group.shared, devices)


class InPlace(NamedTuple):
    """Arrays that ranks have in shared memory, so that nobody need copy them to or from a window."""

    inputs: Sequence[Flat | None]
    """By rank; None for those that are in private memory."""
    outputs: Sequence[Flat] | None = None
    """The outputs of all ranks; None if any of them is in private memory."""

    @property
    def is_complete(self) -> bool:
        """True if nothing goes through windows."""
        return self.outputs is not None and all(array is not None for array in self.inputs)


class _Combined(NamedTuple):
    """An own task of a round: its inputs, which are views of windows or own ranges, and where results go."""

    task: Task
    inputs: Sequence[Flat | Ref]
    outputs: Sequence[Ref]
    made: Flat | None


class _Steps(NamedTuple):
    """A rank's work in one round, with the windows of one parity."""

    place: int
    """A number that no other round has; those of both parities of one have the same sizes."""
    brought: Sequence[tuple[Ref, Flat]]
    partials: Sequence[tuple[Task, Flat]]
    combined: Sequence[_Combined]
    collected: Sequence[tuple[Flat, Ref, Task]]
    readers: Sequence[tuple[int, Ref]]
    """Who reads what this rank has put into its window: others, and itself of its partials."""


class _WatchedRound(NamedTuple):
    """Steps of a rank in a round of a verified call."""

    now: _Steps
    bring: Sequence[Callable[[], None]]
    combine: Callable[[], None]
    collect: Callable[[], None]


class _LaidOut(NamedTuple):
    """All rounds of a verified call, for arrays of the same sizes that may be elsewhere."""

    rounds: Sequence[_WatchedRound]
    passes: MovablePasses
    sums: LeafSums


class Windows:
    """The tasks of one rank, run in shared memory.

    The bits are those of any other transport: an element is made of the same contributions, in the order of
    ranks, by the same kernel.
    """

    def __init__(self, plan: TaskPlan, shared: SharedMemory, devices: tuple[Device, ...] = ()) -> None:
        """`devices` are those of this process, for the record of what ran."""
        self.shared, self.plan = shared, plan
        shared.steps.meet = compiled_meeting()
        rounds = rounds_of(plan, WINDOW_BYTES)
        self._rounds = [
            (self._steps(place, each, 0), self._steps(place, each, 1)) for place, each in enumerate(rounds)
        ]
        self._are_copies = all(task.is_copy for task in plan.results)
        self._is_alone = plan.are_combined_by_all
        self._own = [task for task in plan.results if task.worker == shared.rank]
        self._passes = TaskPasses(self._own)
        self._recipe = plan.results[0].recipe if plan.results else COPYING
        self._is_lone = not self._is_alone and _has_one_array_each(plan)
        self._nothing_in_place = InPlace([None] * plan.size)
        made_bytes = sum(
            ref.num_bytes for task in plan.results for ref in task.outputs if ref.buffer.rank == shared.rank
        )
        self._is_streamed = made_bytes * plan.size >= STREAMED_BYTES
        self._laid_out: SignatureCache[_LaidOut] = SignatureCache(KEPT_CALLS)
        self._work = Work("reduce", "through shared memory", devices, plan.bytes_sent(shared.rank))

    def explained(self) -> str:
        """Human-readable description of what this rank does with arrays in private memory."""
        steps = [each for each, _ in self._rounds]
        num_bytes = sum(view.nbytes for each in steps for _, view in (*each.brought, *each.partials))
        part = "everything" if self._is_alone else "its shard"
        num_steps = len(steps) + (not self._is_alone)
        return (
            f"brings {self.plan.travelling} to shared memory, {counted(num_bytes, 'byte')}, and combines "
            f"{part} there, in {counted(num_steps, 'step')}"
        )

    # ---------------------------------------------------------------- one call

    def run(self, call: GroupCall, inputs: Inputs, results: Results, weights: Weights | None = None) -> None:
        """Makes this rank's results, round by round."""
        verification = cast("Verification | None", call.hops)
        with recorded(self._work):
            if verification is None:
                self._run(call, inputs, results, weights)
            else:
                self._run_watched(call, inputs, results, weights, verification)

    def _run(self, call: GroupCall, inputs: Inputs, results: Results, weights: Weights | None) -> None:
        arrays, steps = self.shared.arrays, self.shared.steps
        found, place = self._nothing_in_place, NOWHERE
        before: _Steps | None = None
        is_lone = self._is_lone
        if is_lone:
            ((source,),), (targets,) = inputs.values(), results.values()
            place = arrays.place_of(source)
        for number, of_parities in enumerate(self._rounds):
            now = of_parities[steps.parity]
            if place == NOWHERE:
                self._bring(now, inputs)
            if is_lone and number == 0:
                call.step([arrays.num_freed, *place, *arrays.place_of(targets[0])])
                found = self._in_place(source, targets[0])
                if found.is_complete:
                    self._combine_in_place(found, weights)
                    break
            else:
                call.step()
            if before is not None:
                self._collect(before, results)
            self._combine(now, inputs, results, found, weights)
            if found.outputs is None:
                before = now
        if self._is_alone:
            return
        call.step()
        if before is not None:
            self._collect(before, results)
        elif found.outputs is not None:
            for copy in targets[1:]:
                copy[:] = targets[0]

    def _bring(self, now: _Steps, inputs: Inputs) -> None:
        for ref, view in now.brought:
            view[:] = inputs[ref.buffer.leaf][ref.buffer.replica][ref.start : ref.stop]
        if now.partials:
            fused_batch(_partials(now, inputs), now.partials[0][0].recipe)
        self._tell_of_brought(now)

    def _combine(
        self, now: _Steps, inputs: Inputs, results: Results, found: InPlace, weights: Weights | None
    ) -> None:
        self._passes.run(now.place, self._own_passes(now, inputs, results, found), weights)
        if found.outputs is None:
            self._tell_of_made(now)

    def _own_passes(
        self, now: _Steps, inputs: Inputs, results: Results, found: InPlace
    ) -> list[tuple[list[Flat], list[Flat]]]:
        """Lists the inputs and outputs of the own tasks of a round."""
        tasks = []
        for task, sources, targets, made in now.combined:
            arrays = []
            for source in sources:
                if isinstance(source, Ref):
                    buffer, start, stop = source
                    source = inputs[buffer.leaf][buffer.replica][start:stop]
                arrays.append(source)
            if found is not self._nothing_in_place:
                start, stop = task.inputs[0][1:]
                for peer, array in enumerate(found.inputs):
                    if array is not None:
                        arrays[peer] = array[start:stop]
            if found.outputs is not None:
                start, stop = task.outputs[0][1:]
                outputs = [output[start:stop] for output in found.outputs]
            else:
                outputs = []
                for buffer, start, stop in targets:
                    for array in results[buffer.leaf, buffer.replica]:
                        outputs.append(array[start:stop])
                if made is not None:
                    outputs.append(made)
            tasks.append((arrays, outputs))
        return tasks

    def _collect(self, before: _Steps, results: Results) -> None:
        tasks = [([view], targets_of(results, ref)) for view, ref, _ in before.collected]
        fused_batch(tasks, COPYING, is_streamed=self._is_streamed)

    def _tell_of_brought(self, now: _Steps) -> None:
        if self.shared.on_shown is not None:
            for _, view in (*now.brought, *now.partials):
                self.shared.on_shown(view)

    def _tell_of_made(self, now: _Steps) -> None:
        if self.shared.on_shown is not None:
            for _, _, _, made in now.combined:
                if made is not None:
                    self.shared.on_shown(made)

    # ---------------------------------------------------------------- a verified call

    def _run_watched(
        self,
        call: GroupCall,
        inputs: Inputs,
        results: Results,
        weights: Weights | None,
        verification: Verification,
    ) -> None:
        """As `_run`; adds up what is shown, seen and made while it is in a cache."""
        collect: Callable[[], None] | None = None
        for now, bringing, combine, collect_these in self._watched(inputs, results, weights, verification):
            for bring in bringing:
                bring()
            self._tell_of_brought(now)
            call.step()
            if collect is not None:
                collect()
            combine()
            self._tell_of_made(now)
            collect = collect_these
        if not self._is_alone:
            call.step()
            if collect is not None:
                collect()
        verification.note_shared()

    def _watched(
        self, inputs: Inputs, results: Results, weights: Weights | None, verification: Verification
    ) -> Iterator[_WatchedRound]:
        """Yields the rounds of a call; those of a call like an earlier one are not laid out again."""
        bases = [*itertools.chain(*inputs.values()), *itertools.chain(*results.values())]
        parity = self.shared.steps.parity
        key = parity, num_threads(), selected_kernels(), *map(len, results.values())
        # Not there while it is in use: what an error has interrupted is not used again.
        kept = self._laid_out.pop(key, None) if weights is None else None
        if kept is not None:
            verification.sums = kept.sums
            kept.sums.clear()
            kept.passes.move(bases)
            yield from kept.rounds
            self._laid_out[key] = kept
            return
        sums, is_kept = verification.sums, weights is None and len(self._rounds) <= KEPT_ROUNDS
        rounds: list[_WatchedRound] = []
        for first in range(0, len(self._rounds), ROUNDS_AHEAD):
            ahead = [
                self._watched_round(
                    of_parities[(parity + number) % 2], inputs, results, weights, verification
                )
                for number, of_parities in enumerate(self._rounds[first : first + ROUNDS_AHEAD], first)
            ]
            yield from ahead
            rounds += ahead if is_kept else ()
        each_pass = [each for _, bring, *others in rounds for each in (*bring, *others)]
        passes = movable_passes(each_pass, bases)
        if passes is not None:
            self._laid_out[key] = _LaidOut(rounds, passes, sums)

    def _watched_round(
        self,
        now: _Steps,
        inputs: Inputs,
        results: Results,
        weights: Weights | None,
        verification: Verification,
    ) -> _WatchedRound:
        return _WatchedRound(
            now,
            self._bringing(now, inputs, verification),
            self._combining(now, inputs, results, weights, verification),
            self._collecting(now, results, verification),
        )

    def _bringing(
        self, now: _Steps, inputs: Inputs, verification: Verification
    ) -> Sequence[Callable[[], None]]:
        readers: dict[Ref, tuple[int, ...]] = {}
        for peer, ref in now.readers:
            readers[ref] = (*readers.get(ref, ()), peer)
        shown = {ref: verification.sums_shown(ref.buffer, peers) for ref, peers in readers.items()}
        copies: list[tuple[list[Flat], list[Flat]]] = []
        summed: list[list[Summed]] = []
        for ref, view in now.brought:  # copied as it is digested: its reader sees what was stored
            source = _own(inputs, ref)
            copies.append(([source], []))
            copied = Summed(source, shown[ref], _row_offset(ref), target=view)
            summed.append([copied, *verification.of_input(ref, source)])
        bring_copies = bound_sums(copies, summed, COPYING)
        if not now.partials:
            return (bring_copies,)
        tasks, summed = _partials(now, inputs), []
        for (maker, view), (arrays, _) in zip(now.partials, tasks, strict=True):
            (ref,) = maker.outputs
            of_inputs = map(verification.of_input, maker.inputs, arrays)
            partial = Summed(view, shown[ref], _row_offset(ref))
            summed.append([partial, *itertools.chain.from_iterable(of_inputs)])
        return bring_copies, bound_sums(tasks, summed, now.partials[0][0].recipe)

    def _combining(
        self,
        now: _Steps,
        inputs: Inputs,
        results: Results,
        weights: Weights | None,
        verification: Verification,
    ) -> Callable[[], None]:
        tasks, summed = self._own_passes(now, inputs, results, self._nothing_in_place), []
        for (task, sources, targets, _), (arrays, outputs) in zip(now.combined, tasks, strict=True):
            of_task: list[Summed] = []
            for ref, source, array in zip(task.inputs, sources, arrays, strict=True):
                if isinstance(source, Ref):
                    of_task += verification.of_input(ref, array)
                    continue
                # Of a copy where it is to be: that it was copied is checked, too.
                place = outputs[0] if self._are_copies else array
                of_task.append(Summed(place, verification.sums_seen(ref.buffer), _row_offset(ref)))
            if targets:
                of_task += verification.of_result(task, outputs[0])
            summed.append(of_task)
        return bound_sums(tasks, summed, self._recipe.with_weights(weights))

    def _collecting(self, now: _Steps, results: Results, verification: Verification) -> Callable[[], None]:
        tasks = [([view], targets_of(results, ref)) for view, ref, _ in now.collected]
        summed = [
            verification.of_result(task, targets[0])
            for (_, _, task), (_, targets) in zip(now.collected, tasks, strict=True)
        ]
        return bound_sums(tasks, summed, COPYING)

    # ---------------------------------------------------------------- arrays that are in shared memory

    def _in_place(self, source: Flat, total: Flat) -> InPlace:
        """After the first step: which arrays of all ranks are in shared memory."""
        shared = self.shared
        inputs: list[Flat | None] = []
        outputs: list[Flat | None] = []
        for rank in range(self.plan.size):
            num_freed, *numbers = shared.steps.numbers_of(rank, 0, 1 + 2 * len(NOWHERE))
            shared.arrays.note_freed(rank, num_freed)
            ends = Place(*numbers[: len(NOWHERE)]), Place(*numbers[len(NOWHERE) :])
            for arrays, place, own in zip((inputs, outputs), ends, (source, total), strict=True):
                if place == NOWHERE or rank == shared.rank:
                    arrays.append(None if place == NOWHERE else own)
                else:
                    arrays.append(shared.arrays.array_at(rank, place, own))
        everywhere = [output for output in outputs if output is not None]
        return InPlace(inputs, everywhere if len(everywhere) == len(outputs) else None)

    def _combine_in_place(self, found: InPlace, weights: Weights | None) -> None:
        """Combines the own shard straight from the inputs of all ranks to their outputs."""
        assert found.outputs is not None
        for task in self._own:
            start, stop = task.inputs[0][1:]
            inputs = [array[start:stop] for array in found.inputs if array is not None]
            outputs = [output[start:stop] for output in found.outputs]
            fused_pass(inputs, outputs, task.recipe.with_weights(weights))

    def small_arrays(self) -> SmallArrays | None:
        """Memory for arrays of which every rank combines all, as they are; None if the plan is any other."""
        if not self._is_alone or len(self._rounds) != 1 or all(task.is_copy for task in self._own):
            return None
        found = []
        for now in self._rounds[0]:
            views = dict(now.brought)
            if len(now.combined) != 1 or now.partials:
                return None
            sources = now.combined[0].inputs
            inputs = [views[source] if isinstance(source, Ref) else source for source in sources]
            found.append((list(views.values()), inputs))
        own, inputs_of_parities = zip(*found, strict=True)
        return SmallArrays(own, inputs_of_parities, [], self.shared)

    # ---------------------------------------------------------------- what is known before there are arrays

    def _steps(self, place: int, now: Round, parity: int) -> _Steps:
        rank, windows, made_windows = self.shared.rank, self.shared.brought[parity], self.shared.made[parity]

        def view(window: Flat, start: int, ref: Ref) -> Flat:
            return cast(Flat, window[start : start + ref.num_bytes].view(dtype_named(ref.buffer.dtype)))

        views = {ref: view(windows[ref.buffer.rank], start, ref) for ref, start in now.brought.items()}
        own = {ref: found for ref, found in views.items() if ref.buffer.rank == rank}
        combined, collected = [], []
        for number, task in enumerate(now.tasks):
            targets = [ref for ref in task.outputs if ref.buffer.rank == rank]
            made = None
            if number in now.made:
                made = view(made_windows[task.worker], now.made[number], task.outputs[0])
            if task.worker == rank:
                inputs = [
                    ref if ref.buffer.rank == rank and ref.buffer.role == "input" else views[ref]
                    for ref in task.inputs
                ]
                combined.append(_Combined(task, inputs, targets, made))
            elif made is not None:
                collected += [(made, ref, task) for ref in targets]
        shown = [
            (task, ref)
            for task in now.tasks
            for ref in task.inputs
            if ref.buffer.rank != task.worker or ref.buffer.role == "partial"
        ]
        return _Steps(
            place,
            [(ref, found) for ref, found in own.items() if ref.buffer.role == "input"],
            [(self.plan.making(ref), found) for ref, found in own.items() if ref.buffer.role == "partial"],
            combined,
            collected,
            [(task.worker, ref) for task, ref in shown if ref.buffer.rank == rank],
        )


def _has_one_array_each(plan: TaskPlan) -> bool:
    """Returns True if there is one leaf, of which each rank has one array that travels as it is."""
    buffers = {ref.buffer for task in plan.tasks for ref in (*task.inputs, *task.outputs)}
    return all(buffer.role != "partial" for buffer in buffers) and len(buffers) == 2 * plan.size


def _row_offset(ref: Ref) -> int:
    """Returns the byte of its array at which a range starts, rounded down to a row of sums."""
    return ref.start * ITEM_BYTES[ref.buffer.dtype] // ROW_BYTES * ROW_BYTES


def _own(inputs: Inputs, ref: Ref) -> Flat:
    buffer, start, stop = ref
    return cast(Flat, inputs[buffer.leaf][buffer.replica][start:stop])


def _partials(now: _Steps, inputs: Inputs) -> list[tuple[list[Flat], list[Flat]]]:
    """Lists the inputs and outputs of what is combined before it is shown."""
    return [([_own(inputs, ref) for ref in maker.inputs], [view]) for maker, view in now.partials]

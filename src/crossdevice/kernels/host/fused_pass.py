"""The entry to the fused pass: compiled where numba can, in NumPy where it cannot, with the same bits."""

from __future__ import annotations

import functools
import itertools
import struct
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from crossdevice import runtime
from crossdevice.errors import OptionError
from crossdevice.kernels.families import ORDERED_FAMILIES, family_of, positions_of, program_of
from crossdevice.kernels.host.reference.numpy_pass import numpy_pass
from crossdevice.kernels.host.resources.pool import pool_bytes
from crossdevice.kernels.host.resources.threads import num_threads, run_together
from crossdevice.kernels.host.sorted_pass import sorted_pass
from crossdevice.kernels.host.standby import STANDBY_BYTES, Standby, standby
from crossdevice.kernels.host.work_list import (
    HEADER_WORDS,
    LEFT_WORD,
    LEFTOVER_WORDS,
    MANY_INPUTS,
    NO_LEFTOVERS,
    OBJECT_HEADER_BYTES,
    ROW_WORDS,
    SCRATCH_BYTES,
    TUPLE_HEADER_BYTES,
    WORD_BYTES,
    Pieces,
    Task,
    WorkList,
    as_words,
    halves,
    limited_range_bytes,
    pieces_in,
    ranges_of,
    traffic_bytes,
)
from crossdevice.values.dtypes import FLOATS, SHORT_FLOATS
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import Weights

KERNELS = ("numba", "numpy")

Arrays = Sequence[NDArray[Any]]


class AddressTable:
    """Addresses of arrays' elements, laid out as kernels find them in a tuple of ndarrays."""

    __slots__ = ("_pack", "_pointers", "_words", "number", "place")

    number: int
    place: int
    """The address of the first pointer."""

    def __init__(self, number: int) -> None:
        self.number, self._pack = number, struct.Struct(f"{number}q").pack_into
        self._words = array("q", bytes(number * WORD_BYTES))
        first = self._words.buffer_info()[0] - OBJECT_HEADER_BYTES
        self._point(array("q", range(first, first + number * WORD_BYTES, WORD_BYTES)))

    def fill(self, addresses: list[int]) -> None:
        """Takes the place of the addresses before."""
        self._pack(self._words, 0, *addresses)

    @property
    def addresses(self) -> NDArray[np.int64]:
        """The addresses, which may be written to."""
        return np.frombuffer(self._words, np.int64)

    def at(self, positions: Sequence[int]) -> AddressTable:
        """Returns the pointers at these positions, to the addresses of this table."""
        table = AddressTable.__new__(AddressTable)
        table._words = self._words
        table._point(array("q", [self._pointers[position] for position in positions]))
        return table

    def _point(self, pointers: array[int]) -> None:
        self._pointers, self.place = pointers, pointers.buffer_info()[0]


Pointers: TypeAlias = "tuple[Any, ...] | AddressTable"
"""A tuple of ndarrays, or addresses of objects that keep their data pointer where ndarrays do."""

THREADED_BYTES = 6 << 20
"""Traffic (all that is read and written) from which a second thread is woken.

From cache to cache, two threads lose to one at 4 MiB, where waking costs as much as the work, and win at 8.
"""

STREAMED_BYTES = 24 << 20
"""Traffic from which results bypass the cache, unless they replace inputs, which are in it. Smaller results
stay in the cache for their next reader."""

RANGES_PER_THREAD = 8
"""Number of ranges per thread, so that threads end together even if one starts late."""

MAX_INPUTS = 1 << 15
"""Maximum number of 16-bit integers with a sum that always fits 32 bits."""


class _Scratch(threading.local):
    """Memory of each thread in which kernels keep accumulators while they read many inputs."""

    memory: array[int] | None = None

    def place(self) -> int:
        """Returns the address of this thread's memory."""
        if self.memory is None:
            self.memory = array("q", bytes(SCRATCH_BYTES))
        return self.memory.buffer_info()[0]


_scratch = _Scratch()

_rooms: list[tuple[array[int], int]] = []
"""Room for leftovers, with its address, that no pass of any thread uses; taken and given back in one step."""


def _room_for_leftovers() -> tuple[array[int], int]:
    try:
        return _rooms.pop()
    except IndexError:
        room = NO_LEFTOVERS[:]
        return room, room.buffer_info()[0]


class PreparedPass(NamedTuple):
    """All that is known about a pass before its arrays are."""

    kernel: Callable[..., None]
    divisor: float
    is_exact: bool
    part: np.dtype[Any] | None
    """Real dtype of a complex element."""
    positions: tuple[int, ...] | None
    """Order of the inputs from left to right, if it is not the given one."""
    program: array[Any]
    """Instructions for inputs that combine as a tree; the weights of a recipe that has some."""
    address: int = 0
    """The address of the kernel's code, for compiled code that calls it."""

    @property
    def needs_views(self) -> bool:
        """True if the kernel needs views of the arrays instead of the arrays themselves."""
        return self.part is not None or self.positions is not None


_kernels: str | None = None
_prepared: dict[tuple[Recipe, np.dtype[Any], np.dtype[Any]], PreparedPass | None] = {}


def fused_pass(inputs: Arrays, outputs: Arrays, recipe: Recipe) -> None:
    """Combines contiguous, native `inputs` of one dtype and size, and any shape, into every output.

    Each input is read once and each output written once. An output may be one of the inputs; it may
    not overlap one otherwise. The bits are those of `numpy_pass`.
    """
    prepared = prepared_for(recipe, inputs[0].dtype, outputs[0].dtype)
    if prepared is None or len(inputs) > MAX_INPUTS:
        _pass_without_kernel(inputs, outputs, recipe)
        return
    if recipe.weights is not None:
        prepared = _with_weights(prepared, recipe)
    arrays, results = _as_read(inputs, prepared), _as_written(outputs, prepared)
    if traffic_bytes(arrays, results) >= THREADED_BYTES:
        SharedPasses([(arrays, results)], prepared, recipe)()
    else:
        SmallPass(arrays, results, prepared, recipe)(arrays, results)


def repeated_pass(inputs: Arrays, outputs: Arrays, recipe: Recipe) -> Callable[[Arrays, Arrays], None]:
    """Returns a function that repeats this pass over tuples of as many arrays of these dtypes and sizes."""
    prepared = prepared_for(recipe, inputs[0].dtype, outputs[0].dtype)
    is_small = traffic_bytes(inputs, outputs) < THREADED_BYTES and len(inputs) <= MAX_INPUTS
    if prepared is None or not is_small or prepared.needs_views:
        return functools.partial(fused_pass, recipe=recipe)
    return SmallPass(inputs, outputs, _with_weights(prepared, recipe), recipe)


def fused_batch(tasks: Sequence[tuple[Arrays, Arrays]], recipe: Recipe, *, is_streamed: bool = False) -> None:
    """Does many passes of one recipe, of any dtypes and sizes, as one: threads share the whole list.

    `is_streamed` says that results are part of more, too much for the cache, which they bypass then.
    """
    for work in bound_batch(tasks, recipe, is_streamed=is_streamed, is_repeated=False):
        work()


def bound_batch(
    tasks: Sequence[tuple[Arrays, Arrays]],
    recipe: Recipe,
    *,
    is_streamed: bool = False,
    is_repeated: bool = True,
) -> list[Callable[[], None]]:
    """Returns functions that do many passes of one recipe, repeatedly, but one call at a time.

    They keep the arrays alive and read their addresses in each call; sizes must not change.
    """
    works: list[Callable[[], None]] = []
    groups: dict[int, tuple[PreparedPass, list[Task]]] = {}
    for inputs, outputs in tasks:
        prepared = prepared_for(recipe, inputs[0].dtype, outputs[0].dtype)
        if prepared is None or len(inputs) > MAX_INPUTS:
            works.append(functools.partial(_pass_without_kernel, inputs, outputs, recipe))
        else:
            _, group = groups.setdefault(id(prepared), (prepared, []))
            group.append((_as_read(inputs, prepared), _as_written(outputs, prepared)))
    return works + [
        SharedPasses(
            group, _with_weights(prepared, recipe), recipe, is_streamed=is_streamed, is_repeated=is_repeated
        )
        for prepared, group in groups.values()
    ]


def kernel_of(
    tasks: Sequence[tuple[Arrays, Arrays]], recipe: Recipe
) -> tuple[PreparedPass, list[Task]] | None:
    """Returns the one kernel that does these passes from start to end, and the tasks as it reads them.

    None if they take several kernels, or one that leaves uncertain results to NumPy.
    """
    all_prepared = [prepared_for(recipe, inputs[0].dtype, outputs[0].dtype) for inputs, outputs in tasks]
    prepared = all_prepared[0]
    if any(each is not prepared for each in all_prepared) or any(len(each) > MAX_INPUTS for each, _ in tasks):
        return None
    if prepared is None or prepared.is_exact:
        return None
    laid_out = [(_as_read(inputs, prepared), _as_written(outputs, prepared)) for inputs, outputs in tasks]
    return _with_weights(prepared, recipe), laid_out


def scratch_place() -> int:
    """Returns the address of the memory in which kernels of this thread keep accumulators."""
    return _scratch.place()


def _pass_without_kernel(inputs: Arrays, outputs: Arrays, recipe: Recipe) -> None:
    """Runs a pass that no single kernel does: with a compiled sort, or in NumPy."""
    inputs, outputs = _flat(inputs), _flat(outputs)
    if recipe.op.is_order_statistic and selected_kernels() == "numba":
        sorted_pass(inputs, outputs, recipe, fused_pass)
    else:
        numpy_pass(inputs, outputs, recipe)


def select_kernels(name: str | None) -> None:
    """Chooses "numba" or "numpy"; None restores CROSSDEVICE_KERNELS, or numba if it is available."""
    global _kernels, _prepared
    _kernels = None if name is None else _checked_kernels(name, "the name of kernels")
    _prepared = {}  # a new dict, not a cleared one: a SmallPass compares identities


def are_kernels_selected() -> bool:
    """Returns True if the choice of kernels is settled, without settling it."""
    return _kernels is not None


def load_kernels(recipe: Recipe, dtype: np.dtype[Any]) -> None:
    """Imports what compiled kernels need and loads one, whatever is in use meanwhile."""
    name = _checked_kernels(runtime.KERNELS.read() or None, runtime.KERNELS.variable)
    if name == "numba":
        _prepare(recipe, dtype, dtype)


def selected_kernels() -> str:
    """Names the kernels in use: "numba" or "numpy"."""
    global _kernels
    if _kernels is None:
        # The other variables are needed for some sizes only, and must be refused before the first result is
        # written, not between two of them.
        for check in (num_threads, pool_bytes):
            check()
        _kernels = _checked_kernels(runtime.KERNELS.read() or None, runtime.KERNELS.variable)
    return _kernels


def _checked_kernels(given: str | None, source: str) -> str:
    if given not in (None, *KERNELS):
        raise OptionError(f"{source} must be one of {', '.join(KERNELS)}; got {given!r}")
    if given == "numpy":
        return given
    try:
        # Only now, on first use: importing numba takes up to a second.
        from crossdevice.kernels.host.llvm import numba_pass
    except ImportError as error:
        if given == "numba":
            raise OptionError(f"{source} is numba, which cannot be imported: {error}") from error
        return "numpy"
    return "numba" if numba_pass.can_run_here() else "numpy"


def prepared_for(recipe: Recipe, dtype: np.dtype[Any], into: np.dtype[Any]) -> PreparedPass | None:
    """Returns the prepared pass for this recipe and these dtypes; None if no kernel does it."""
    if recipe.weights is not None:
        recipe = recipe.key
    try:
        return _prepared[recipe, dtype, into]
    except KeyError:
        prepared = _prepare(recipe, dtype, into) if selected_kernels() == "numba" else None
        # Two threads may both come here; all calls must use the one that was kept.
        return _prepared.setdefault((recipe, dtype, into), prepared)


def _prepare(recipe: Recipe, dtype: np.dtype[Any], into: np.dtype[Any]) -> PreparedPass | None:
    from crossdevice.kernels.host.llvm import numba_pass
    from crossdevice.kernels.host.llvm.standby import address_of

    part = None
    if dtype.kind == "c" and dtype == into:
        part = dtype = into = np.empty(0, dtype).real.dtype
        if recipe.op is ReduceOp.PROD:
            return None
    family = _compiled_family(recipe, dtype.name, into.name)
    if family is None or ("float16" in (dtype.name, into.name) and not numba_pass.has_half_conversions()):
        return None
    shape, positions, program = "chain", None, None
    if recipe.order is not None and family in ORDERED_FAMILIES:
        positions = positions_of(recipe.order)
        if positions is None:
            shape, program = "tree", program_of(recipe.order)
            if program is None:
                return None
    element = dtype.name
    if family in ("wide", "compensated", "weighted") and dtype != into:
        element += f" {into.name}"
    if family == "wrapping":  # which does not know signs, so one kernel does for both
        element = element.removeprefix("u")
    kernel: Any = numba_pass.compiled_kernel(f"{shape} {family} {recipe.op.name} {element}")
    is_exact = family in MAY_LEAVE_PIECES
    # The compiled function itself: numba's dispatcher would look at the type of every argument again.
    entry = kernel.get_overload(numba_pass.SIGNATURE)
    divisor, words = divisor_for(recipe, into), array("q", program or ())
    return PreparedPass(entry, divisor, is_exact, part, positions, words, address_of(kernel))


EXACT_FAMILIES = {"float64": "exact_double", "float16": "exact_half", "bfloat16": "true_in_single"}
"""Exact-sum families that are faster for one dtype."""

MAY_LEAVE_PIECES = ("exact", *EXACT_FAMILIES.values(), "weighted_exact", "weighted_exact_in_double")
"""Families with kernels that leave uncertain results to NumPy."""


def _compiled_family(recipe: Recipe, dtype: str, into: str) -> str | None:
    """Returns the fastest compiled family with the bits of `family_of`."""
    family = family_of(recipe, dtype, into)
    is_accurate_sum = (recipe.op, recipe.precision) == (ReduceOp.SUM, "accurate")
    if dtype == into and dtype in SHORT_FLOATS and is_accurate_sum:
        return "wide" if recipe.weights is None else "weighted"
    if family == "exact":
        return EXACT_FAMILIES.get(dtype, family)
    if family == "weighted_exact" and dtype != "float64":
        return "weighted_exact_in_double"
    # float32 holds sums of bfloat16 exactly where exponents lie close together, at half the cost.
    if family == "wide" and dtype == into == "bfloat16" and recipe.op is ReduceOp.SUM:
        return "exact_in_single"
    return {"widened": "wide", "narrowed": "compensated"}.get(family or "", family)


def _with_weights(prepared: PreparedPass, recipe: Recipe) -> PreparedPass:
    weights = recipe.weights
    if weights is None:
        return prepared
    return prepared._replace(divisor=weights.divisor, program=weights.words)


def divisor_for(recipe: Recipe, into: np.dtype[Any]) -> float:
    """Returns the divisor of a kernel; under "fast" it is rounded to the result's dtype."""
    if recipe.divisor is None:
        return 1.0
    if recipe.precision != "fast" and into.name in (*FLOATS, *SHORT_FLOATS):
        return float(recipe.divisor)
    with np.errstate(over="ignore"):
        return float(into.type(recipe.divisor))


def _as_read(inputs: Arrays, prepared: PreparedPass) -> tuple[NDArray[Any], ...]:
    if prepared.positions is not None:
        inputs = [inputs[position] for position in prepared.positions]
    return _as_written(inputs, prepared)


def _as_written(outputs: Arrays, prepared: PreparedPass) -> tuple[NDArray[Any], ...]:
    if prepared.part is None:
        return tuple(outputs)
    return tuple(array.view(prepared.part) for array in _flat(outputs))


def _flat(arrays: Arrays) -> list[NDArray[Any]]:
    """Views with one axis; kernels need none, since they look at addresses only."""
    return [array.reshape(-1) for array in arrays]


class SmallPass:
    """A single-threaded pass over any tuples of arrays like those it was made for."""

    def __init__(self, inputs: Arrays, outputs: Arrays, prepared: PreparedPass, recipe: Recipe) -> None:
        self._size, self._recipe = inputs[0].size, recipe
        row = (0, len(inputs), 0, len(outputs), 0, self._size, False, 0)
        self._words = as_words([row], prepared.divisor, prepared.program, is_shared=False)
        self._place = self._words.buffer_info()[0]
        self._has_many_inputs = len(inputs) >= MANY_INPUTS
        self._kernel, self._is_exact, self._program = prepared.kernel, prepared.is_exact, prepared.program
        self._made_for = _prepared

    def __call__(self, inputs: Arrays, outputs: Arrays) -> None:
        """Does the pass over these arrays."""
        if self._made_for is not _prepared:  # other kernels have been selected
            fused_pass(inputs, outputs, self._recipe)
            return
        arrays, results = id(inputs) + TUPLE_HEADER_BYTES, id(outputs) + TUPLE_HEADER_BYTES
        scratch = _scratch.place() if self._has_many_inputs else 0
        if not self._is_exact:
            self._kernel(self._place, arrays, results, 0, scratch)
            return
        room = _room_for_leftovers()
        self._kernel(self._place, arrays, results, room[1], scratch)
        if room[0][0]:
            _run_pieces(inputs, outputs, pieces_in(room[0], self._size), self._recipe)
        _rooms.append(room)


def participants_for(traffic: int) -> int:
    """Returns how many threads take the rows of a pass that reads and writes that much."""
    return 1 if traffic < THREADED_BYTES else min(num_threads(), 2 * traffic // THREADED_BYTES)


def _standby_for(traffic: int, num_participants: int) -> Standby | None:
    """Returns the worker that may be awake for repeated passes; None if one is of little use."""
    is_worth_it = STANDBY_BYTES <= traffic < STREAMED_BYTES and num_participants <= 2
    return standby() if is_worth_it else None


class SharedPasses:
    """Tasks of one kernel, laid out so that threads take the work of all of them."""

    def __init__(
        self,
        tasks: Sequence[Task],
        prepared: PreparedPass,
        recipe: Recipe,
        *,
        is_streamed: bool = False,
        is_repeated: bool = False,
        settle: Callable[[Arrays, Arrays, Pieces, Recipe], None] | None = None,
    ) -> None:
        traffic = sum(traffic_bytes(*task) for task in tasks)
        self._participants = participants_for(traffic)
        self._standby = _standby_for(traffic, self._participants) if is_repeated else None
        self._work_list = WorkList(
            tasks,
            prepared.divisor,
            prepared.program,
            range_bytes=traffic // (RANGES_PER_THREAD * self._participants),
            is_shared=self._participants > 1,
            is_streamed=is_streamed or traffic >= STREAMED_BYTES,
            may_leave_pieces=prepared.is_exact,
            has_two_lists=self._standby is not None,
        )
        self._recipe = recipe
        self._settle = settle or _run_pieces
        self._is_exact = prepared.is_exact
        self._is_alone = self._participants == 1 and self._standby is None
        self._has_many_inputs = any(len(inputs) >= MANY_INPUTS for inputs, _ in tasks)
        self._kernel, self._address = prepared.kernel, prepared.address
        self._places = self._work_list.places

    def __call__(self) -> None:
        """Runs the kernel, then computes in NumPy what the kernel left."""
        if self._is_alone:
            self._work()
        elif self._standby is None:
            self._work_list.restart()
            run_together(self._work, self._participants)
        else:
            self._work_list.restart()
            self._standby.run(self._work, self._participants, self._address, self._places, self._scratch())
        if self._is_exact:
            for (inputs, outputs), pieces in self._work_list.pieces_left():
                self._settle(inputs, outputs, pieces, self._recipe)

    def _work(self) -> None:
        # A method, so that threads keep this object and its arrays alive while they work.
        for place in self._places:
            self._kernel(place, 0, 0, 0, self._scratch())

    def _scratch(self) -> int:
        return _scratch.place() if self._has_many_inputs else 0


class Viewer(Protocol):
    """A backend as kernels use it: arrays seen as ndarrays."""

    def host_view(self, array: Any) -> NDArray[Any]:
        """Returns a host array's elements as a flat, contiguous, native ndarray: a view, else a copy."""


class PassLayout(NamedTuple):
    """One pass of `RepeatedPasses`: the positions of its inputs and outputs among all, and its elements."""

    inputs: Sequence[int]
    outputs: Sequence[int]
    start: int
    stop: int


class RepeatedPasses:
    """Passes of one recipe and one pair of dtypes, laid out once, over any arrays of the same sizes.

    Several threads may call it at once. Arrays are contiguous, native, and of any shape.
    """

    def __init__(
        self, layouts: Sequence[PassLayout], recipe: Recipe, dtype: np.dtype[Any], into: np.dtype[Any]
    ) -> None:
        """Raises LookupError if no kernel does the passes."""
        prepared = prepared_for(recipe, dtype, into)
        if prepared is None or any(len(layout.inputs) > MAX_INPUTS for layout in layouts):
            raise LookupError
        layouts = [layout for layout in layouts if layout.start < layout.stop]
        self._layouts, self._recipe, self._prepared = layouts, recipe, prepared
        self._made_for = _prepared
        scale = 1 if prepared.part is None else 2  # a complex element is two
        itemsize = dtype.itemsize
        traffics = [
            (layout.stop - layout.start) * itemsize * (len(layout.inputs) + len(layout.outputs))
            for layout in layouts
        ]
        traffic = sum(traffics)
        self._participants = participants_for(traffic)
        range_bytes = limited_range_bytes(traffic // (RANGES_PER_THREAD * self._participants))
        rows: list[list[int]] = []
        self._layout_of_row: list[PassLayout] = []
        order = prepared.positions
        inputs, self._input_positions = _laid_out(
            [own if order is None else [own[position] for position in order] for own, *_ in layouts]
        )
        outputs, self._output_positions = _laid_out([layout.outputs for layout in layouts])
        for layout, own, first_input, first_output in zip(layouts, traffics, inputs, outputs, strict=True):
            places = [first_input * WORD_BYTES, len(layout.inputs)]
            places += [first_output * WORD_BYTES, len(layout.outputs)]
            size, first = (layout.stop - layout.start) * scale, layout.start * scale
            for start, stop in ranges_of(size, own // range_bytes):
                rows.append([*places, first + start, first + stop, traffic >= STREAMED_BYTES, 0])
                self._layout_of_row.append(layout)
        self._rows = rows
        self._has_many_inputs = any(len(layout.inputs) >= MANY_INPUTS for layout in layouts)
        self._kernel = prepared.kernel
        self._standby = None if len(rows) == 1 else _standby_for(traffic, self._participants)
        self._is_alone = self._participants == 1 and self._standby is None and not prepared.is_exact
        self._lay_out()

    def _lay_out(self) -> None:
        """Makes the words of all rows, which say where pointers are among all."""
        rows, prepared = self._rows, self._prepared
        if prepared.is_exact:
            for number, row in enumerate(rows):
                row[7] = number * (LEFTOVER_WORDS * WORD_BYTES)
        parts = [rows] if self._standby is None else halves(rows)
        is_shared = self._participants > 1
        lists = [as_words(part, prepared.divisor, prepared.program, is_shared=is_shared) for part in parts]
        self._starts = [0, *itertools.accumulate(map(len, lists[:-1]))]
        self._words = sum(lists, array("q"))
        self._place = self._words.buffer_info()[0]
        self._firsts = np.array(
            [
                start + HEADER_WORDS + number * ROW_WORDS
                for start, part in zip(self._starts, parts, strict=True)
                for number in range(len(part))
            ],
            np.int64,
        )

    def __call__(
        self,
        read: Pointers,
        written: Pointers,
        first_written: int,
        weights: Weights | None,
        viewer: Viewer,
        inputs: tuple[Any, ...],
        outputs: tuple[Any, ...],
    ) -> None:
        """Does the passes; `first_written` of the second pointers are passed over.

        `viewer` makes ndarrays of arrays, for elements that a kernel leaves to NumPy.
        """
        if self._made_for is not _prepared:  # other kernels have been selected
            tasks = [
                (
                    [viewer.host_view(inputs[position])[start:stop] for position in own],
                    [viewer.host_view(outputs[position])[start:stop] for position in targets],
                )
                for own, targets, start, stop in self._layouts
            ]
            fused_batch(tasks, self._recipe.with_weights(weights))
            return
        kernel = self._kernel
        scratch = _scratch.place() if self._has_many_inputs else 0
        # Both are kept here while a kernel reads pointers from them.
        if self._input_positions is not None:
            read = _selected(read, self._input_positions)
        if self._output_positions is not None:
            written = _selected(written, [first_written + position for position in self._output_positions])
            first_written = 0
        read_place, written_place = place_of(read), place_of(written) + first_written * WORD_BYTES
        if self._is_alone and weights is None:
            kernel(self._place, read_place, written_place, 0, scratch)
            return
        # Words of this call: threads count in them, kernels note what they left, weights are in them.
        prepared, recipe, words = self._prepared, self._recipe, self._words[:]
        leftovers = NO_LEFTOVERS * (len(self._rows) * prepared.is_exact)
        left_place = leftovers.buffer_info()[0] if prepared.is_exact else 0
        if weights is not None and recipe.weights is not None:
            recipe = recipe.with_weights(weights)
            prepared = _with_weights(prepared, recipe)
            header = as_words([], prepared.divisor, prepared.program, is_shared=False)
            for start in self._starts:
                words[start + 3 : start + LEFT_WORD] = header[3:LEFT_WORD]
        place = words.buffer_info()[0]
        places = [place + start * WORD_BYTES for start in self._starts]

        # Threads keep this alive while they work, also once a second interrupt has ended the wait for them.
        alive = read, written, words, leftovers, prepared, weights, inputs, outputs

        def work(_: object = alive) -> None:
            for own in places:
                kernel(own, *bases, _scratch.place() if self._has_many_inputs else 0)

        bases = read_place, written_place, left_place
        if self._standby is not None:  # which hands a worker rows, and nothing to add
            for word, base in zip((0, 2, 7), bases, strict=True):
                np.frombuffer(words, np.int64)[self._firsts + word] += base
            bases = 0, 0, 0
            self._standby.run(work, self._participants, prepared.address, places, scratch)
        elif self._participants == 1:
            work()
        else:
            run_together(work, self._participants)
        if prepared.is_exact and any(words[start + LEFT_WORD] for start in self._starts):
            for row, first in enumerate(range(0, len(leftovers), LEFTOVER_WORDS)):
                if leftovers[first]:
                    left = leftovers[first : first + LEFTOVER_WORDS]
                    self._settle(row, left, viewer, inputs, outputs, recipe)

    def _settle(
        self,
        row: int,
        leftovers: array[int],
        viewer: Viewer,
        inputs: tuple[Any, ...],
        outputs: tuple[Any, ...],
        recipe: Recipe,
    ) -> None:
        """Computes in NumPy what the kernel left of a row."""
        layout = self._layout_of_row[row]
        _run_pieces(
            _as_read([viewer.host_view(inputs[position]) for position in layout.inputs], self._prepared),
            _as_written([viewer.host_view(outputs[position]) for position in layout.outputs], self._prepared),
            pieces_in(leftovers, self._rows[row][5]),
            recipe,
        )


_tables: dict[int, list[AddressTable]] = {}
"""Tables that no call of any thread uses, by their sizes; taken and given back in one step."""

MAX_TABLE_SIZES = 64


def pointers_of(found: tuple[Any, ...] | list[int] | None) -> Pointers | None:
    """Returns what kernels read: ndarrays as they are, addresses in a table, to be given back."""
    if not isinstance(found, list):
        return found
    number = len(found)
    try:
        table = _tables[number].pop()
    except (KeyError, IndexError):
        table = AddressTable(number)
    table.fill(found)
    return table


def give_back(table: AddressTable) -> None:
    """Keeps a table for other calls."""
    if len(_tables) >= MAX_TABLE_SIZES and table.number not in _tables:
        _tables.clear()
    _tables.setdefault(table.number, []).append(table)


def place_of(pointers: Pointers) -> int:
    """Returns the address of the first pointer."""
    return id(pointers) + TUPLE_HEADER_BYTES if isinstance(pointers, tuple) else pointers.place


def _laid_out(groups: Sequence[Sequence[int]]) -> tuple[list[int], list[int] | None]:
    """Returns where each group of positions begins, and all positions in this order.

    Returns None for the order if the positions of every group follow each other as they are.
    """
    if all(list(group) == [*range(group[0], group[0] + len(group))] for group in groups):
        return [group[0] for group in groups], None
    return [0, *itertools.accumulate(map(len, groups))][:-1], list(itertools.chain.from_iterable(groups))


def _selected(pointers: Pointers, positions: list[int]) -> Pointers:
    if isinstance(pointers, tuple):
        return tuple([pointers[position] for position in positions])
    return pointers.at(positions)


def _run_pieces(inputs: Arrays, outputs: Arrays, pieces: Pieces, recipe: Recipe) -> None:
    """Computes in NumPy the pieces that the kernel left as uncertain."""
    inputs, outputs = _flat(inputs), _flat(outputs)
    where = np.concatenate([np.arange(start, stop) for start, stop in pieces])
    result = np.empty(where.size, outputs[0].dtype)
    numpy_pass([item[where] for item in inputs], [result], recipe)
    for item in outputs:
        item[where] = result

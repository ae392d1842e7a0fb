"""Sums of weighted arrays that grow from call to call, and are rounded once when they are asked for."""

from __future__ import annotations

import functools
import threading
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from crossdevice.kernels.host.fused_pass import participants_for, selected_kernels
from crossdevice.kernels.host.reference.numpy_pass import BLOCK_ELEMENTS
from crossdevice.kernels.host.reference.rounding import with_one_nan
from crossdevice.kernels.host.reference.running import (
    NUM_PARTS,
    add_weighted,
    rounded_fraction,
    rounded_parts,
    with_neutral_rests,
)
from crossdevice.kernels.host.resources.pool import result_pool
from crossdevice.kernels.host.resources.threads import run_together
from crossdevice.kernels.host.wide_sums import (
    has_rounding_kernel,
    narrowed_batch,
    rounded_batch,
    summed_batch,
    summing_kernels,
)
from crossdevice.kernels.host.work_list import Pieces, Task, address_of
from crossdevice.values.dtypes import FLOATS
from crossdevice.values.options import Precision
from crossdevice.values.weights import Weights

Floats = NDArray[np.float64]

Kept = TypeVar("Kept")

AddRange = Callable[[int, int], None]
"""Adds some inputs to the elements from start to stop."""

INPUTS_AT_ONCE = 8
"""Inputs that are read side by side; more of them hinder each other."""

RANGE_ELEMENTS = 1 << 15
"""Elements per range: all inputs of a range are added first, so that its parts stay in the cache."""

LONG_RANGE_ELEMENTS = 1 << 18
"""Elements per range where inputs are read once, chosen so that threads end together."""

SHORT_ELEMENTS, ROWS_AT_ONCE = 1 << 12, 1 << 8
"""Elements up to which a sum shares a call of a kernel with others, and the sums of such a call."""

MAX_LEFTOVERS = 1 << 10
"""Elements that the parts cannot hold, after which Python looks at them."""

FEW = 1 << 8
"""Infinities and NaNs in a range, after which they are added by NumPy."""

MIN_CROWD, CROWDED_SHARE = 1 << 12, 256
"""Limits on elements kept apart, as a count and as a share, before all elements get one more part."""

LARGEST = Fraction(np.finfo(np.float64).max)

ONE = Fraction(1)

_allocating = threading.Lock()


class RunningSum:
    """One number per element: the sum of all arrays added so far, each times its weight.

    Under `"accurate"` it is kept in float64, that of float64 with its rounding errors, and has the bits that
    adding all arrays at once has. Under `"exact"` it is kept without any error, whatever the order: elements
    that two float64 (three for float64) cannot hold, as exponents lie too far apart, are kept as fractions.
    Where these become many, every element gets one more float64.
    """

    def __init__(self, size: int, dtype: np.dtype[Any], precision: Precision) -> None:
        """Makes an empty sum of `size` elements of a float dtype, or of integers, which are always exact."""
        self.dtype = dtype
        self.family = sum_family(dtype, precision)
        self.size = size
        parts = [(size, np.dtype(np.float64))] * NUM_PARTS[self.family]
        self._parts: tuple[Floats, ...] = tuple(result_pool.empty_batch(parts))
        self.fractions: dict[int, Fraction] = {}
        """Exact remainders that the parts do not hold, by element."""
        self.specials: dict[int, float] = {}
        """Sums of infinities and NaNs, by element, where parts hold the rest."""
        self._many_specials: Floats | None = None
        """Sums of infinities and NaNs of all elements (0: none), once a range has many."""
        self._is_empty = True

    @property
    def parts(self) -> tuple[Floats, ...]:
        """float64 arrays that add up to the sum so far."""
        if self._is_empty:
            # Adding to -0.0 leaves every number, and every zero, as it is.
            for number, part in enumerate(self._parts):
                part.fill(0.0 if number else -0.0)
            self._is_empty = False
        return self._parts

    @property
    def all_specials(self) -> dict[int, float]:
        """Sums of infinities and NaNs, by element, few or many."""
        if self._many_specials is None:
            return self.specials
        found = {int(place): float(self._many_specials[place]) for place in self._special_places}
        return {
            element: found.get(element, 0.0) + self.specials.get(element, 0.0)
            for element in {*found, *self.specials}
        }

    def travelling_parts(self, start: int, stop: int) -> list[Floats]:
        """Returns the parts of some elements; an infinite or NaN sum is in the first part."""
        parts = [part[start:stop] for part in self.parts]
        few = _within(self.specials, start, stop) if self.specials else {}
        if not few and self._many_specials is None:
            return parts
        specials = np.zeros(stop - start)
        if self._many_specials is not None:
            specials += self._many_specials[start:stop]
        with np.errstate(invalid="ignore"):
            for element, special in few.items():
                specials[element] += special
        places = np.flatnonzero(specials)
        first, *rests = (part.copy() for part in parts)
        first[places] = specials[places]
        for rest in rests:
            rest[places] = 0.0
        return [first, *rests]

    @property
    def num_apart(self) -> int:
        """The number of elements that the parts cannot hold."""
        return len(self.fractions)

    def clear(self) -> None:
        """Resets the sum and keeps the memory."""
        self.fractions, self.specials, self._many_specials = {}, {}, None
        self._is_empty = True

    def load(self, parts: Sequence[Floats]) -> None:
        """Takes parts that were added elsewhere; sums that are infinite or NaN are in the first of them."""
        for own, part in zip(self._parts, parts, strict=True):
            own[:] = part
        self._is_empty = False
        (places,) = np.nonzero(~np.isfinite(parts[0]))
        if places.size:
            self._many_specials = np.zeros(self.size)
            self._many_specials[places] = parts[0][places]
            self._parts[0][places] = -0.0

    def keep_apart(self, element: int, value: float, weight: float) -> None:
        """Adds a finite value times a weight to an element that the parts cannot hold."""
        term = Fraction(value) * Fraction(weight)
        self.fractions[element] = self.fractions.get(element, Fraction(0)) + term

    def copy_of(self, start: int, stop: int) -> RunningSum:
        """Copies the elements from start to stop into a sum of its own."""
        copied = RunningSum(stop - start, self.dtype, "exact" if self.is_exact else "accurate")
        while copied.family != self.family:
            copied.widen()
        copied._is_empty = False
        for part, own in zip(copied.parts, self.parts, strict=True):
            part[:] = own[start:stop]
        copied.fractions = _within(self.fractions, start, stop)
        copied.specials = _within(self.specials, start, stop)
        if self._many_specials is not None:
            copied._many_specials = self._many_specials[start:stop].copy()
        return copied

    def spread_to(self, size: int, places: NDArray[np.intp]) -> RunningSum:
        """Returns a larger sum with these elements at other places and all others empty."""
        spread = RunningSum(size, self.dtype, "exact" if self.is_exact else "accurate")
        while spread.family != self.family:
            spread.widen()
        for part, own in zip(spread.parts, self.parts, strict=True):
            part[places] = own
        spread.fractions = {int(places[element]): value for element, value in self.fractions.items()}
        spread.specials = {int(places[element]): value for element, value in self.all_specials.items()}
        return spread

    @property
    def is_exact(self) -> bool:
        """True if nothing is ever rounded."""
        return self.family.startswith("expansion")

    def widen(self) -> None:
        """Gives all elements one more part and moves values that were kept apart into it where they fit."""
        (more,) = result_pool.empty_batch([(self.size, np.dtype(np.float64))])
        more.fill(0.0)
        self._parts = (*self._parts, more)
        self.family = f"expansion{len(self._parts)}"
        for element, fraction in list(self.fractions.items()):
            left = fraction + sum(Fraction(part[element]) for part in self.parts)
            terms = []
            for _ in self._parts:
                terms.append(float(left) if abs(left) <= LARGEST else 0.0)
                left -= Fraction(terms[-1])
            if not left:
                del self.fractions[element]
                for part, term in zip(self.parts, terms, strict=True):
                    part[element] = term

    def widen_if_crowded(self) -> None:
        """Widens the sum while more elements are kept apart than may be."""
        while (
            self.num_apart > max(MIN_CROWD, self.size // CROWDED_SHARE)
            and self.is_exact
            and f"expansion{len(self._parts) + 1}" in NUM_PARTS
        ):
            self.widen()

    def task_of(self, inputs: Sequence[NDArray[Any]]) -> tuple[Callable[..., None], Task] | None:
        """Returns the pass that adds these arrays, to an empty sum or not; None if it has no kernel."""
        kernels = summing_kernels(self.dtype) if self.family == "wide" else None
        if kernels is None or inputs[0].dtype != self.dtype:
            return None
        is_first, self._is_empty = self._is_empty, False
        return kernels[0 if is_first else 1], (tuple(inputs), self._parts)

    def add(self, inputs: Sequence[NDArray[Any]], weights: Sequence[float]) -> None:
        """Adds flat, contiguous, native arrays of one dtype, in this order."""
        add_all([(self, inputs, weights)])

    def steps_of(self, inputs: Sequence[NDArray[Any]], weights: Sequence[float]) -> list[AddRange]:
        """Returns functions that add these arrays to a range of the elements, to be called in this order."""
        pairs = [(inputs, weights)]
        if inputs[0].dtype.kind in "iub":
            pairs = [_as_floats(item, weight) for item, weight in zip(inputs, weights, strict=True)]
        return [
            self._step(arrays[first : first + INPUTS_AT_ONCE], factors[first : first + INPUTS_AT_ONCE])
            for arrays, factors in pairs
            for first in range(0, len(arrays), INPUTS_AT_ONCE)
        ]

    def merge(self, other: RunningSum) -> None:
        """Adds all that another sum of the same dtype holds."""
        self.add(with_neutral_rests(other.parts), [1.0] * len(other.parts))
        for element, fraction in other.fractions.items():
            self.fractions[element] = self.fractions.get(element, Fraction(0)) + fraction
        for element, special in other.all_specials.items():
            self.specials[element] = self.specials.get(element, 0.0) + special

    def write(self, out: NDArray[Any], divisor: Fraction = ONE) -> None:
        """Writes the sum over a divisor, rounded once to the dtype of `out`; the sum stays as it is."""
        write_all([(self, out)], divisor)

    def write_slowly(self, out: NDArray[Any], divisor: Fraction) -> None:
        """Writes the sum without a compiled kernel."""
        size = self.parts[0].size
        ranges = [slice(at, min(at + BLOCK_ELEMENTS, size)) for at in range(0, size, BLOCK_ELEMENTS)]
        works = [functools.partial(self.write_some, out, each, divisor) for each in ranges]
        _share_out(works, size * 8 * len(self.parts))
        self.write_kept_apart(out, divisor)

    def write_some(self, out: NDArray[Any], where: slice | NDArray[np.intp], divisor: Fraction) -> None:
        """Writes some elements from their parts."""
        parts, number = [part[where] for part in self.parts], Weights((), tuple(_terms(divisor)))
        out[where], undecided = rounded_parts(parts, self.family, number, out.dtype)
        for element in undecided:
            place = int(where.start + element if isinstance(where, slice) else where[element])
            out[place] = self._decided(place, divisor, out.dtype)

    def write_kept_apart(self, out: NDArray[Any], divisor: Fraction) -> None:
        """Writes the elements that the parts do not hold completely."""
        for element in sorted({*self.fractions, *self.specials}):
            out[element] = self._decided(element, divisor, out.dtype)
        if self._many_specials is not None:
            places = self._special_places
            with np.errstate(all="ignore"):
                for element, special in self.specials.items():
                    self._many_specials[element] += special
                self.specials = {}
                out[places] = with_one_nan((self._many_specials[places] / float(divisor)).astype(out.dtype))

    @property
    def _special_places(self) -> NDArray[np.intp]:
        assert self._many_specials is not None
        return np.flatnonzero(self._many_specials)

    def _decided(self, element: int, divisor: Fraction, dtype: np.dtype[Any]) -> Any:
        if element in self.specials:
            special = self.specials[element] / float(divisor)
            return dtype.type(np.nan if np.isnan(special) else special)
        total = self.fractions.get(element, Fraction(0)) + sum(Fraction(part[element]) for part in self.parts)
        return rounded_fraction(total / divisor, dtype)

    def kernel_for(self, dtype: np.dtype[Any]) -> Callable[..., int] | None:
        """Returns the compiled kernel that adds arrays of this dtype, if there is one."""
        return _kernel_for(self.family, dtype) if selected_kernels() == "numba" else None

    def _step(self, inputs: Sequence[NDArray[Any]], weights: Sequence[float]) -> AddRange:
        _ = self.parts  # filled before threads share them
        kernel = self.kernel_for(inputs[0].dtype)
        if kernel is None:
            return functools.partial(self._add_range, inputs, weights)
        return lambda start, stop: _add_rows(kernel, [(self, inputs, start, stop)], weights)

    def _add_range(
        self, inputs: Sequence[NDArray[Any]], weights: Sequence[float], start: int, stop: int
    ) -> None:
        parts = [part[start:stop] for part in self.parts]
        lost = add_weighted(parts, [item[start:stop] for item in inputs], weights, self.family)
        elements = start + np.flatnonzero(lost)
        if elements.size > FEW:
            elements = self._add_specials(inputs, weights, elements)
        for element in elements:
            self._keep_apart(int(element), inputs, weights)

    def _add_specials(
        self, inputs: Sequence[NDArray[Any]], weights: Sequence[float], elements: NDArray[np.intp]
    ) -> NDArray[np.intp]:
        """Adds infinities and NaNs to those of all elements; returns the elements that have none."""
        found = np.zeros(elements.size)
        with np.errstate(all="ignore"):
            for item, weight in zip(inputs, weights, strict=True):
                values = item[elements].astype(np.float64)
                found += np.where(np.isfinite(values), 0.0, values * weight)
            with _allocating:
                if self._many_specials is None:
                    self._many_specials = np.zeros(self.size)
            self._many_specials[elements] += found
        return elements[found == 0]  # beside an infinity or a NaN finite values do not count

    def _keep_apart(self, element: int, inputs: Sequence[NDArray[Any]], weights: Sequence[float]) -> None:
        """Adds to the exact remainder of an element."""
        for item, weight in zip(inputs, weights, strict=True):
            value = float(item[element])
            if np.isfinite(value):
                self.keep_apart(element, value, weight)
            else:
                self.specials[element] = self.specials.get(element, 0.0) + value * weight


def sum_family(dtype: np.dtype[Any], precision: Precision) -> str:
    """Returns the family of arithmetic for running sums of a dtype."""
    if dtype.kind in "iub":
        return "expansion3"
    if precision == "exact":
        return "expansion3" if dtype == np.float64 else "expansion2"
    return "compensated" if dtype == np.float64 else "wide"


@functools.cache
def _kernel_for(family: str, dtype: np.dtype[Any]) -> Callable[..., int] | None:
    """Returns a compiled kernel; None if this dtype has none."""
    from crossdevice.kernels.host.llvm import accumulating, numba_pass

    if dtype.name not in FLOATS or (dtype == np.float16 and not numba_pass.has_half_conversions()):
        return None
    return accumulating.accumulating_kernel(family, dtype.name)


def _as_floats(integers: NDArray[Any], weight: float) -> tuple[list[Floats], list[float]]:
    """Splits integers into float64: 64-bit ones into two that add up to them."""
    if integers.dtype.itemsize < 8:
        return [integers.astype(np.float64)], [weight]
    lower = integers & integers.dtype.type(0xFFFFFFFF)
    return [(integers - lower).astype(np.float64), lower.astype(np.float64)], [weight, weight]


def add_all(
    tasks: Sequence[tuple[RunningSum, Sequence[NDArray[Any]], Sequence[float]]],
) -> None:
    """Adds arrays to several sums; threads share all of the work."""
    works: list[Callable[[], None]] = []
    traffic = 0
    short: dict[tuple[Callable[..., int], tuple[float, ...]], list[_Row]] = {}
    passes: dict[tuple[Callable[..., None], tuple[float, ...]], list[Task]] = {}
    for running, inputs, weights in tasks:
        found = running.task_of(inputs)
        if found is not None:
            kernel, task = found
            passes.setdefault((kernel, tuple(weights)), []).append(task)
            continue
        traffic += running.size * (8 * len(running.parts) + sum(item.itemsize for item in inputs))
        kernel_of_rows = running.kernel_for(inputs[0].dtype)
        if kernel_of_rows is not None and _is_short(running, inputs):
            rows = short.setdefault((kernel_of_rows, tuple(weights)), [])
            rows.append((running, inputs, 0, running.size))
            continue
        steps = running.steps_of(inputs, weights)
        size = running.size
        length = RANGE_ELEMENTS if len(steps) > 1 else LONG_RANGE_ELEMENTS
        works += [
            functools.partial(_take_steps, steps, start, min(start + length, size))
            for start in range(0, size, length)
        ]
    for (kernel_of_rows, factors), rows in short.items():
        works += [
            functools.partial(_add_rows, kernel_of_rows, rows[first : first + ROWS_AT_ONCE], factors)
            for first in range(0, len(rows), ROWS_AT_ONCE)
        ]
    for (kernel, factors), group in passes.items():
        summed_batch(group, kernel, factors)
    _share_out(works, traffic)
    for running, _, _ in tasks:
        running.widen_if_crowded()


_Row = tuple[RunningSum, Sequence[NDArray[Any]], int, int]
"""A sum, arrays to add, and the range of elements to which they are added."""


def _is_short(running: RunningSum, inputs: Sequence[NDArray[Any]]) -> bool:
    return running.size <= SHORT_ELEMENTS and len(inputs) <= INPUTS_AT_ONCE


def _add_rows(kernel: Callable[..., int], rows: Sequence[_Row], weights: Sequence[float]) -> None:
    """Adds arrays to sums of one family by one call of a kernel, and what it leaves one by one."""
    from crossdevice.kernels.host.llvm.accumulating import ROW_WORDS

    inputs = array("q", [address_of(item) for _, items, _, _ in rows for item in items])
    parts = array("q", [address_of(part) for running, *_ in rows for part in running.parts])
    factors, table = array("d", weights), array("q")
    places = inputs.buffer_info()[0], parts.buffer_info()[0]
    for number, (*_, start, stop) in enumerate(rows):
        for place, words in zip(places, (inputs, parts), strict=True):
            table.append(place + number * len(words) // len(rows) * words.itemsize)
        table.extend((start, stop))
    capacity = MAX_LEFTOVERS if rows[0][0].is_exact else 0
    leftovers = array("q", bytes(8 * (2 * capacity + 1)))
    done = 0
    while done < len(rows):
        first = table.buffer_info()[0] + done * ROW_WORDS * table.itemsize
        ended = done + kernel(
            *(first, len(rows) - done, len(weights), factors.buffer_info()[0]),
            *(leftovers.buffer_info()[0], capacity),
        )
        end = 1 + 2 * leftovers[0]
        for number, element in zip(leftovers[1:end:2], leftovers[2:end:2], strict=True):
            running, items, _, _ = rows[done + number]
            running._keep_apart(element, items, weights)
        if ended < len(rows):  # there are many: most likely infinities or NaNs everywhere
            running, items, _, stop = rows[ended]
            start = table[ROW_WORDS * ended + 2]
            table[ROW_WORDS * ended + 2] = min(start + BLOCK_ELEMENTS, stop)
            running._add_range(items, weights, start, table[ROW_WORDS * ended + 2])
        done = ended


def _within(kept: Mapping[int, Kept], start: int, stop: int) -> dict[int, Kept]:
    return {element - start: value for element, value in kept.items() if start <= element < stop}


def _take_steps(steps: Sequence[AddRange], start: int, stop: int) -> None:
    for step in steps:
        step(start, stop)


def write_all(tasks: Sequence[tuple[RunningSum, NDArray[Any]]], divisor: Fraction) -> None:
    """Writes several sums over one divisor, each rounded once to the dtype of its array."""
    narrow = [(running.parts[0], out) for running, out in tasks if running.family == "wide"]
    left = narrowed_batch(narrow, float(divisor)) if narrow else []
    exact: dict[int, tuple[RunningSum, NDArray[Any]]] = {}
    for running, out in tasks:
        if running.family.startswith("expansion") and has_rounding_kernel(out.dtype):
            exact[id(running.parts)] = running, out
        elif running.family != "wide" or any(out is each for _, each in left):
            running.write_slowly(out, divisor)

    def settle(parts: Sequence[Floats], _outs: Any, pieces: Pieces, _recipe: Any) -> None:
        running, out = exact[id(parts)]
        running.write_some(out, np.concatenate([np.arange(*piece) for piece in pieces]), divisor)

    works = [(running.parts, (out,)) for running, out in exact.values()]
    rounded_batch(works, Weights((), tuple(_terms(divisor))), settle)
    for running, out in exact.values():
        running.write_kept_apart(out, divisor)


def _share_out(works: Sequence[Callable[[], None]], traffic_bytes: int) -> None:
    """Runs the whole task, in several threads if it is large."""
    waiting = iter(works)

    def take() -> None:
        for work in waiting:
            work()

    run_together(take, participants_for(traffic_bytes))


def _terms(number: Fraction) -> Iterator[float]:
    """Splits a number into float64 terms that add up to it: each is the rest, rounded."""
    while number:
        yield float(number)
        number -= Fraction(float(number))

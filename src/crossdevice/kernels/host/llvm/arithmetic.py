"""Widening, combining and rounding of elements, emitted as LLVM code: one class for each way."""

# ruff: noqa: D102, ARG002 - what a method does is said once, in Arithmetic; not each needs all it is given

from __future__ import annotations

from crossdevice.kernels.host.llvm.conversions import (
    as_double,
    as_single,
    from_double,
    from_single,
    in_memory_order,
    in_widened_order,
)
from crossdevice.kernels.host.llvm.lanes import DOUBLE, INT32, INT64, SINGLE, STORED, State, Value, Vector
from crossdevice.kernels.host.reference.long_accumulator import FORMATS
from crossdevice.kernels.host.reference.rounding import two_sum
from crossdevice.kernels.host.reference.sorting import quiet_nan
from crossdevice.values.dtypes import ITEM_BYTES


class Arithmetic:
    """Arithmetic on elements of one dtype; this base class uses them as they are."""

    def __init__(self, op: str, dtype: str) -> None:
        self.op = op
        self.dtype = dtype
        self.result_dtype = dtype

    bytes_per_lane: int | None = None
    """Register bytes per element of the accumulator; None: as many as in memory."""

    bytes_ahead: int = 0
    """Distance at which inputs are prefetched; 0 leaves that to the processor.

    It finds streams by itself, but a step with many instructions fills its window before the next loads are
    in it: prefetched, 8 x 16 MiB of float32 take as long as under `accurate`, and else a sixth more.
    """

    is_weighted: bool = False
    """True if it takes a weight with each element, by `with_term`."""

    uses_divisor_rest: bool = False
    """True if the divisor's missing rest and the error bound of that rest follow its own state."""

    def widened(self, stored: Vector) -> Vector:
        """Converts elements to the form in which they are combined."""
        return stored

    def with_term(self, state: State | None, element: Vector, weight: Vector) -> State:
        """Adds one element times its weight to the accumulator (None: a new one)."""
        raise NotImplementedError

    def started(self, element: Vector) -> State:
        """Returns an accumulator that holds the first element."""
        return (element,)

    def combined(self, state: State, element: Vector) -> State:
        """Combines the accumulator with one more element."""
        (total,) = state
        return (self.of_two(total, element),)

    def of_two(self, left: Vector, right: Vector) -> Vector:
        """Returns left + right, or left * right."""
        return left * right if self.op == "PROD" else left + right

    def finished(self, state: State, divisor: Value) -> Vector:
        """Rounds to the result's dtype, and says where that is certain to be right."""
        (total,) = state
        return total.divided(divisor)

    def doubted(self, state: State, divisor: Value, num_inputs: Value) -> Vector | None:
        """Returns the lanes with uncertain results; None if all are always certain."""
        return None

    def settled(self, state: State, divisor: Value, num_inputs: Value) -> tuple[Vector, Vector | None]:
        """Returns the results of `finished` and `doubted`."""
        return self.finished(state, divisor), self.doubted(state, divisor, num_inputs)

    def fallback(self) -> Arithmetic | None:
        """Returns a slower arithmetic that settles most uncertain elements; None if there is none."""
        return None


class RoundedHalves(Arithmetic):
    """float16 and bfloat16 as their libraries do it: in float32, rounded at every step."""

    bytes_per_lane = 4

    def widened(self, stored: Vector) -> Vector:
        return as_single(stored, self.dtype)

    def of_two(self, left: Vector, right: Vector) -> Vector:
        return as_single(from_single(super().of_two(left, right), self.dtype), self.dtype)

    def finished(self, state: State, divisor: Value) -> Vector:
        return from_single(super().finished(state, divisor), self.dtype)


class Wide(Arithmetic):
    """Accumulates in float64 and rounds once, to its own dtype or to another one."""

    bytes_per_lane = 8

    def widened(self, stored: Vector) -> Vector:
        return as_double(stored, self.dtype)

    def finished(self, state: State, divisor: Value) -> Vector:
        quotient = super().finished(state, divisor)
        if self.result_dtype != self.dtype:
            quotient = in_widened_order(in_memory_order(quotient, self.dtype), self.result_dtype)
        return from_double(quotient, self.result_dtype)


class Compensated(Arithmetic):
    """float64 sums with the errors of all additions added back before the one rounding, to any float."""

    bytes_per_lane = 16

    def started(self, element: Vector) -> State:
        return element, element.lanes.constant(DOUBLE, 0.0)

    def combined(self, state: State, element: Vector) -> State:
        total, errors = state
        total, error = two_sum(total, element)
        return total, errors + error

    def finished(self, state: State, divisor: Value) -> Vector:
        return self._divided(state, divisor)

    def _divided(self, state: State, divisor: Value, divisor_rest: Vector | None = None) -> Vector:
        """Divides as `with_errors` of the reference does, which says why."""
        total, errors = state
        lanes = total.lanes
        counts = errors.differs(0.0) & errors.is_finite()
        near, rest = two_sum(total, errors)
        near = counts.select(near, total)

        def quotient() -> State:
            number = lanes.spread(divisor)
            first = near / number
            left = (counts & rest.is_finite()).select(rest, 0.0)
            left = self._remainder(near, first, number) + left
            if divisor_rest is not None:
                left = left - first * divisor_rest
            second = left / number
            return (second.differs(0.0).select(first + second, first),)

        (result,) = lanes.unless_one(divisor, (near,), quotient, divisor_rest)
        return from_double(in_widened_order(result, self.result_dtype), self.result_dtype)

    def _remainder(self, dividend: Vector, quotient: Vector, number: Vector) -> Vector:
        return (-quotient).times_plus(number, dividend)


class Extreme(Arithmetic):
    """MIN and MAX by integer comparison: negative floats with inverted bits sort like integers.

    So -0 comes before +0 by itself; NaN is given the place beyond all numbers.
    """

    def widened(self, stored: Vector) -> Vector:
        if not self._is_float:
            return stored
        bits = stored.bits()
        return (bits & self._largest > self._infinity).select(self._beyond, self._turned(bits))

    def of_two(self, left: Vector, right: Vector) -> Vector:
        relation = "<" if self.op == "MIN" else ">"
        return left.compare(relation, right, signed=not self.dtype.startswith("u")).select(left, right)

    def finished(self, state: State, divisor: Value) -> Vector:
        (best,) = state
        if not self._is_float:
            return best
        bits = (best == self._beyond).select(quiet_nan(self._infinity), self._turned(best))
        return bits.converted("bitcast", STORED[self.dtype])

    @property
    def _is_float(self) -> bool:
        return "float" in self.dtype

    @property
    def _largest(self) -> int:
        return (1 << (ITEM_BYTES[self.dtype] * 8 - 1)) - 1

    @property
    def _beyond(self) -> int:
        return -self._largest - 1 if self.op == "MIN" else self._largest

    @property
    def _infinity(self) -> int:
        return self._largest + 1 - (1 << (FORMATS[self.dtype].precision - 1))

    def _turned(self, bits: Vector) -> Vector:
        return bits ^ (bits.compare("<", 0, signed=True).select(self._largest, bits ^ bits))


class Wrapping(Arithmetic):
    """Integers that wrap around, whatever their sign."""

    def finished(self, state: State, divisor: Value) -> Vector:
        return state[0]


class WrappingMean(Wrapping):
    """The mean of integers with a sum that may have wrapped around."""

    def __init__(self, op: str, dtype: str) -> None:
        super().__init__(op, dtype)
        self.result_dtype = "float32" if ITEM_BYTES[dtype] <= 2 else "float64"

    def finished(self, state: State, divisor: Value) -> Vector:
        lanes, kind = state[0].lanes, STORED[self.result_dtype]
        if kind is SINGLE:
            divisor = lanes.build.fptrunc(divisor, SINGLE)
        return self._as_float(state[0], kind) / lanes.spread(divisor)

    def _as_float(self, total: Vector, kind: Value) -> Vector:
        return total.converted("uitofp" if self._is_unsigned else "sitofp", kind)

    @property
    def _is_unsigned(self) -> bool:
        return self.dtype.startswith("u")


class TrueMean(WrappingMean):
    """The mean of integers of up to 32 bits, summed twice as wide: 2**15 inputs fit."""

    bytes_per_lane = 8

    def finished(self, state: State, divisor: Value) -> Vector:
        # Divided in float64, which holds all sums: those of 16 bits may be too long for float32.
        total = self._as_float(state[0], DOUBLE)
        return from_double(total / total.lanes.spread(divisor), self.result_dtype)

    def widened(self, stored: Vector) -> Vector:
        wide = INT64 if ITEM_BYTES[self.dtype] == 4 else INT32
        return stored.converted("zext" if self._is_unsigned else "sext", wide)

"""How elements are widened, combined and rounded, emitted as LLVM code: one class for each way."""

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
from crossdevice.kernels.host.llvm.lanes import (
    DOUBLE,
    FORMATS,
    INT32,
    INT64,
    SINGLE,
    Lanes,
    State,
    Value,
)


class Arithmetic:
    """How elements of one dtype are widened, combined and rounded; here they are used as they are."""

    def __init__(self, op: str, dtype: str) -> None:
        self.op = op
        self.dtype = dtype
        self.result_dtype = dtype

    bytes_per_lane: int | None = None
    """What one element of the accumulator takes of the registers; None: as much as in memory."""

    is_weighted: bool = False
    """Whether it takes a weight with each element, by `with_term`, and then what weights are divided by."""

    def widened(self, lanes: Lanes, stored: Value) -> Value:
        """The form in which elements are combined."""
        return stored

    def with_term(self, lanes: Lanes, state: State | None, element: Value, weight: Value) -> State:
        """The accumulator (None: a new one) with one more element, times its weight, in it."""
        raise NotImplementedError

    def started(self, lanes: Lanes, element: Value) -> State:
        """The accumulator that holds the first element."""
        return (element,)

    def combined(self, lanes: Lanes, state: State, element: Value) -> State:
        """The accumulator with one more element in it."""
        (total,) = state
        return (self.of_two(lanes, total, element),)

    def of_two(self, lanes: Lanes, left: Value, right: Value) -> Value:
        """left + right, or left * right."""
        return (lanes.build.fmul if self.op == "PROD" else lanes.build.fadd)(left, right)

    def finished(self, lanes: Lanes, state: State, divisor: Value) -> Value:
        """What is written, and where it may be wrong (None: nowhere)."""
        (total,) = state
        if self.dtype == "float32":
            divisor = lanes.build.fptrunc(divisor, SINGLE)
        return lanes.divided(total, divisor)

    def doubted(self, lanes: Lanes, state: State, divisor: Value, num_inputs: Value) -> Value | None:
        """The lanes whose result is not certain to be right; None where all always are."""
        return None

    def fallback(self) -> Arithmetic | None:
        """What settles most doubts, at a higher price."""
        return None


class RoundedHalves(Arithmetic):
    """float16 and bfloat16 as their libraries do it: in float32, rounded at every step."""

    bytes_per_lane = 4

    def widened(self, lanes: Lanes, stored: Value) -> Value:
        return as_single(lanes, stored, self.dtype)

    def of_two(self, lanes: Lanes, left: Value, right: Value) -> Value:
        return self._rounded(lanes, super().of_two(lanes, left, right))

    def finished(self, lanes: Lanes, state: State, divisor: Value) -> Value:
        (total,) = state
        quotient = lanes.divided(total, lanes.build.fptrunc(divisor, SINGLE))
        return from_single(lanes, quotient, self.dtype)

    def _rounded(self, lanes: Lanes, single: Value) -> Value:
        return as_single(lanes, from_single(lanes, single, self.dtype), self.dtype)


class Wide(Arithmetic):
    """Accumulates in float64 and rounds once, to its own dtype or to another one."""

    bytes_per_lane = 8

    def widened(self, lanes: Lanes, stored: Value) -> Value:
        return as_double(lanes, stored, self.dtype)

    def finished(self, lanes: Lanes, state: State, divisor: Value) -> Value:
        (total,) = state
        quotient = lanes.divided(total, divisor)
        if self.result_dtype != self.dtype:
            quotient = in_memory_order(lanes, quotient, self.dtype)
            quotient = in_widened_order(lanes, quotient, self.result_dtype)
        return from_double(lanes, quotient, self.result_dtype)


class Widened(Wide):
    """Accumulates in float64 and keeps that: a partial result, to be combined with others."""

    def __init__(self, op: str, dtype: str) -> None:
        super().__init__(op, dtype)
        self.result_dtype = "float64"

    def finished(self, lanes: Lanes, state: State, divisor: Value) -> Value:
        (total,) = state
        quotient = lanes.with_one_nan(lanes.divided(total, divisor))
        return in_memory_order(lanes, quotient, self.dtype)


class Compensated(Arithmetic):
    """float64 sums with the rounding errors of all additions added back at the end."""

    bytes_per_lane = 16

    def started(self, lanes: Lanes, element: Value) -> State:
        return element, lanes.constant(DOUBLE, 0.0)

    def combined(self, lanes: Lanes, state: State, element: Value) -> State:
        total, errors = state
        total, error = lanes.two_sum(total, element)
        return total, lanes.build.fadd(errors, error)

    def finished(self, lanes: Lanes, state: State, divisor: Value) -> Value:
        return lanes.with_one_nan(self._quotient(lanes, state, divisor))

    def _quotient(self, lanes: Lanes, state: State, divisor: Value) -> Value:
        """As in `numpy_pass`, which says why."""
        total, errors = state
        build, zero = lanes.build, lanes.constant(DOUBLE, 0.0)
        counts = build.and_(build.fcmp_ordered("!=", errors, zero), lanes.is_finite(errors))
        near, rest = lanes.two_sum(total, errors)
        near = build.select(counts, near, total)

        def quotient() -> State:
            number = lanes.spread(divisor)
            first = build.fdiv(near, number)
            remainder = self._remainder(lanes, near, first, number)
            left = build.select(build.and_(counts, lanes.is_finite(rest)), rest, zero)
            second = build.fdiv(build.fadd(remainder, left), number)
            is_more = build.fcmp_ordered("!=", second, zero)
            return (build.select(is_more, build.fadd(first, second), first),)

        return lanes.unless_one(divisor, (near,), quotient)[0]

    def _remainder(self, lanes: Lanes, dividend: Value, quotient: Value, number: Value) -> Value:
        return lanes.fused_multiply_add(lanes.build.fneg(quotient), number, dividend)


class Narrowed(Compensated):
    """Partial results in float64 become a narrower dtype, rounded once; it is named after that one."""

    def __init__(self, op: str, dtype: str) -> None:
        super().__init__(op, "float64")
        self.result_dtype = dtype

    def finished(self, lanes: Lanes, state: State, divisor: Value) -> Value:
        quotient = in_widened_order(lanes, self._quotient(lanes, state, divisor), self.result_dtype)
        return from_double(lanes, quotient, self.result_dtype)


class Extreme(Arithmetic):
    """MIN and MAX by integers: the bits of floats, if those of negative ones are turned over, sort like them.

    So -0 comes before +0 by itself; NaN is given the place beyond all numbers.
    """

    def widened(self, lanes: Lanes, stored: Value) -> Value:
        if not self._is_float:
            return stored
        bits = self._bits(lanes, stored)
        integer = bits.type.element
        magnitude = lanes.build.and_(bits, lanes.constant(integer, self._largest))
        is_nan = lanes.build.icmp_unsigned(">", magnitude, lanes.constant(integer, self._infinity))
        return lanes.build.select(is_nan, lanes.constant(integer, self._beyond), self._turned(lanes, bits))

    def of_two(self, lanes: Lanes, left: Value, right: Value) -> Value:
        compare = lanes.build.icmp_unsigned if self.dtype.startswith("u") else lanes.build.icmp_signed
        return lanes.build.select(compare("<" if self.op == "MIN" else ">", left, right), left, right)

    def finished(self, lanes: Lanes, state: State, divisor: Value) -> Value:
        (best,) = state
        if not self._is_float:
            return best
        integer = best.type.element
        is_nan = lanes.build.icmp_signed("==", best, lanes.constant(integer, self._beyond))
        quiet = self._infinity | ((self._infinity & -self._infinity) >> 1)
        bits = lanes.build.select(is_nan, lanes.constant(integer, quiet), self._turned(lanes, best))
        return lanes.build.bitcast(bits, lanes.vector(FORMATS[self.dtype].stored))

    @property
    def _is_float(self) -> bool:
        return "float" in self.dtype

    @property
    def _largest(self) -> int:
        return (1 << (FORMATS[self.dtype].item_bytes * 8 - 1)) - 1

    @property
    def _beyond(self) -> int:
        return -self._largest - 1 if self.op == "MIN" else self._largest

    @property
    def _infinity(self) -> int:
        return {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF << 52}[
            self.dtype
        ]

    def _bits(self, lanes: Lanes, stored: Value) -> Value:
        return stored if self.dtype == "bfloat16" else lanes.bits(stored)

    def _turned(self, lanes: Lanes, bits: Value) -> Value:
        integer = bits.type.element
        sign = lanes.build.ashr(bits, lanes.constant(integer, integer.width - 1))
        return lanes.build.xor(bits, lanes.build.and_(sign, lanes.constant(integer, self._largest)))


class Wrapping(Arithmetic):
    """Integers that wrap around, whatever their sign."""

    def of_two(self, lanes: Lanes, left: Value, right: Value) -> Value:
        return (lanes.build.mul if self.op == "PROD" else lanes.build.add)(left, right)

    def finished(self, lanes: Lanes, state: State, divisor: Value) -> Value:
        return state[0]


class WrappingMean(Wrapping):
    """The mean of integers whose sum has wrapped around."""

    def __init__(self, op: str, dtype: str) -> None:
        super().__init__(op, dtype)
        self.result_dtype = "float32" if FORMATS[dtype].item_bytes <= 2 else "float64"

    def finished(self, lanes: Lanes, state: State, divisor: Value) -> Value:
        (total,) = state
        float_type = FORMATS[self.result_dtype].stored
        convert = lanes.build.uitofp if self._is_unsigned else lanes.build.sitofp
        if float_type is SINGLE:
            divisor = lanes.build.fptrunc(divisor, SINGLE)
        return lanes.build.fdiv(convert(total, lanes.vector(float_type)), lanes.spread(divisor))

    @property
    def _is_unsigned(self) -> bool:
        return self.dtype.startswith("u")


class TrueMean(WrappingMean):
    """The mean of integers of up to 32 bits, summed twice as wide: 2**15 inputs fit."""

    bytes_per_lane = 8

    def finished(self, lanes: Lanes, state: State, divisor: Value) -> Value:
        # Divided in float64, which holds all sums: those of 16 bits may be too long for float32.
        convert = lanes.build.uitofp if self._is_unsigned else lanes.build.sitofp
        quotient = lanes.build.fdiv(convert(state[0], lanes.vector(DOUBLE)), lanes.spread(divisor))
        return from_double(lanes, quotient, self.result_dtype)

    def widened(self, lanes: Lanes, stored: Value) -> Value:
        extend = lanes.build.zext if self._is_unsigned else lanes.build.sext
        return extend(stored, lanes.vector(INT64 if FORMATS[self.dtype].item_bytes == 4 else INT32))

"""Arithmetic on vectors of elements, emitted as LLVM code: how they are widened, combined and rounded once.

All of it is portable LLVM: a vector longer than the machine's registers is split, whatever the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

Value = Any
"""A value of llvmlite's intermediate representation."""

Builder = Any

State = tuple[Value, ...]
"""The vectors that an accumulator consists of."""

INT16, INT32, INT64 = (ir.IntType(bits) for bits in (16, 32, 64))
HALF, SINGLE, DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()


class Lanes:
    """Emits operations on vectors of `count` elements."""

    def __init__(self, builder: Builder, count: int) -> None:
        self.build = builder
        self.count = count

    def vector(self, scalar: Any) -> Any:
        """The vector type with elements of type `scalar`."""
        return ir.VectorType(scalar, self.count)

    def constant(self, scalar: Any, value: float) -> Value:
        """The same constant in all lanes."""
        return ir.Constant(self.vector(scalar), [value] * self.count)

    def spread(self, value: Value) -> Value:
        """A scalar in all lanes."""
        first = self.build.insert_element(
            ir.Constant(self.vector(value.type), ir.Undefined), value, ir.Constant(INT32, 0)
        )
        picks = ir.Constant(ir.VectorType(INT32, self.count), [0] * self.count)
        return self.build.shuffle_vector(first, first, picks)

    def load(self, address: Value, scalar: Any) -> Value:
        """Elements from any address: 1 is the only alignment that views of bytes promise."""
        loaded = self.build.load(self.build.inttoptr(address, self.vector(scalar).as_pointer()))
        loaded.align = 1
        return loaded

    def bits(self, value: Value) -> Value:
        """Floats as the integers that have their bits."""
        width = {HALF: INT16, SINGLE: INT32, DOUBLE: INT64}[value.type.element]
        return self.build.bitcast(value, self.vector(width))

    def magnitude(self, value: Value) -> Value:
        """Absolute values of floats."""
        bits = self.bits(value)
        mask = self.constant(bits.type.element, (1 << (bits.type.element.width - 1)) - 1)
        return self.build.bitcast(self.build.and_(bits, mask), value.type)

    def fused_multiply_add(self, left: Value, right: Value, addend: Value) -> Value:
        """left * right + addend, rounded once."""
        name = f"llvm.fma.v{self.count}f64"
        function_type = ir.FunctionType(left.type, [left.type] * 3)
        function = cgutils.get_or_insert_function(self.build.module, function_type, name)
        return self.build.call(function, [left, right, addend])

    def two_sum(self, left: Value, right: Value) -> tuple[Value, Value]:
        """The rounded sum and its error (Knuth)."""
        build = self.build
        total = build.fadd(left, right)
        of_right = build.fsub(total, left)
        of_left = build.fsub(total, of_right)
        return total, build.fadd(build.fsub(left, of_left), build.fsub(right, of_right))

    def is_finite(self, value: Value) -> Value:
        """Neither infinite nor NaN."""
        infinity = self.constant(value.type.element, float("inf"))
        return self.build.fcmp_ordered("<", self.magnitude(value), infinity)

    def is_nan(self, value: Value) -> Value:
        """Unordered with itself."""
        return self.build.fcmp_unordered("uno", value, value)

    def with_one_nan(self, value: Value) -> Value:
        """Every NaN as the positive quiet one, so bits are defined."""
        return self.build.select(self.is_nan(value), self.constant(value.type.element, float("nan")), value)

    def divided(self, value: Value, divisor: Value) -> Value:
        """value / divisor; a sum has divisor 1, and skips the division, which is slow in cache."""
        (result,) = self.unless_one(divisor, (value,), lambda: (self.build.fdiv(value, self.spread(divisor)),))
        return result

    def unless_one(self, divisor: Value, values: State, quotients: Callable[[], State]) -> State:
        """`values` if the divisor is 1, else the quotients."""
        places = [cgutils.alloca_once_value(self.build, value) for value in values]
        with self.build.if_then(self.build.fcmp_ordered("!=", divisor, ir.Constant(divisor.type, 1.0))):
            for quotient, place in zip(quotients(), places, strict=True):
                self.build.store(quotient, place)
        return tuple(self.build.load(place) for place in places)

    def rounded_to_odd(self, value: Value, rest: Value) -> Value:
        """`value` + `rest`, where value is nearest, with a last bit that says whether anything was lost.

        Rounding that to a format with two bits less is rounding once (Boldo, Melquiond).
        """
        build, bits = self.build, self.bits(value)
        integer = bits.type.element
        zero = self.constant(rest.type.element, 0.0)
        lost = build.fcmp_ordered("!=", rest, zero)
        opposite = build.icmp_signed(
            "<", build.xor(bits, self.bits(rest)), ir.Constant(bits.type, [0] * self.count)
        )
        too_far = build.zext(build.and_(lost, opposite), bits.type)
        odd = build.or_(build.sub(bits, too_far), build.zext(lost, self.vector(integer)))
        return build.bitcast(odd, value.type)

    def odd_single(self, wide: Value) -> Value:
        """float64 to float32, rounded to odd."""
        build = self.build
        near = build.fptrunc(wide, self.vector(SINGLE))
        back = build.fpext(near, wide.type)
        bits = self.bits(near)
        too_far = build.fcmp_ordered(">", self.magnitude(back), self.magnitude(wide))
        lost = build.fcmp_ordered("!=", back, wide)
        odd = build.or_(build.sub(bits, build.zext(too_far, bits.type)), build.zext(lost, bits.type))
        return build.bitcast(odd, near.type)


class Format(NamedTuple):
    """How one dtype is stored, widened and rounded to."""

    stored: Any
    item_bytes: int


FORMATS = {
    "float16": Format(HALF, 2),
    "bfloat16": Format(INT16, 2),
    "float32": Format(SINGLE, 4),
    "float64": Format(DOUBLE, 8),
    **{f"{sign}int{bits}": Format(ir.IntType(bits), bits // 8) for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


def as_single(lanes: Lanes, stored: Value, dtype: str) -> Value:
    """float16 or bfloat16 as float32, exactly."""
    build = lanes.build
    if dtype == "float16":
        return build.fpext(stored, lanes.vector(SINGLE))
    upper = build.shl(build.zext(stored, lanes.vector(INT32)), lanes.constant(INT32, 16))
    return build.bitcast(upper, lanes.vector(SINGLE))


def as_double(lanes: Lanes, stored: Value, dtype: str) -> Value:
    """Any float as float64, exactly."""
    if dtype == "float64":
        return stored
    single = stored if dtype == "float32" else as_single(lanes, stored, dtype)
    return lanes.build.fpext(single, lanes.vector(DOUBLE))


def from_single(lanes: Lanes, single: Value, dtype: str) -> Value:
    """float32 rounded to nearest even into float16 or bfloat16; a bfloat16 NaN is the quiet one."""
    build = lanes.build
    if dtype == "float16":
        return build.fptrunc(single, lanes.vector(HALF))
    bits = lanes.bits(single)
    sixteen = lanes.constant(INT32, 16)
    last = build.and_(build.lshr(bits, sixteen), lanes.constant(INT32, 1))
    carried = build.add(bits, build.add(last, lanes.constant(INT32, 0x7FFF)))
    upper = build.select(
        lanes.is_nan(single), lanes.constant(INT32, 0x7FC0), build.lshr(carried, sixteen)
    )
    return build.trunc(upper, lanes.vector(INT16))


def from_double(lanes: Lanes, wide: Value, dtype: str) -> Value:
    """float64 rounded once, to nearest even, into any float; NaNs become the quiet one."""
    wide = lanes.with_one_nan(wide)
    match dtype:
        case "float64":
            return wide
        case "float32":
            return lanes.build.fptrunc(wide, lanes.vector(SINGLE))
        case _:
            # NaN again: of what makes a float32 odd it sees only comparisons that are false.
            return from_single(lanes, lanes.odd_single(wide), dtype)


class Arithmetic:
    """How elements of one dtype are widened, combined and rounded; the base adds or multiplies floats as they are."""

    def __init__(self, op: str, dtype: str) -> None:
        self.op = op
        self.dtype = dtype
        self.result_dtype = dtype

    def widened(self, lanes: Lanes, stored: Value) -> Value:
        """The form in which elements are combined."""
        return stored

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

    def doubted(self, lanes: Lanes, state: State, divisor: Value) -> Value | None:
        """The lanes whose result is not certain to be right; None where all always are."""
        return None

    def fallback(self) -> Arithmetic | None:
        """What settles most doubts, at a higher price."""
        return None


class RoundedHalves(Arithmetic):
    """float16 and bfloat16 as their libraries do it: in float32, rounded at every step."""

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
    """Accumulates in float64 and rounds once."""

    def widened(self, lanes: Lanes, stored: Value) -> Value:
        return as_double(lanes, stored, self.dtype)

    def finished(self, lanes: Lanes, state: State, divisor: Value) -> Value:
        (total,) = state
        return from_double(lanes, lanes.divided(total, divisor), self.dtype)


class Compensated(Arithmetic):
    """float64 sums with the rounding errors of all additions added back at the end."""

    def started(self, lanes: Lanes, element: Value) -> State:
        return element, lanes.constant(DOUBLE, 0.0)

    def combined(self, lanes: Lanes, state: State, element: Value) -> State:
        total, errors = state
        total, error = lanes.two_sum(total, element)
        return total, lanes.build.fadd(errors, error)

    def finished(self, lanes: Lanes, state: State, divisor: Value) -> Value:
        total, errors = state
        build = lanes.build
        total = build.select(lanes.is_finite(total), build.fadd(total, errors), total)
        return lanes.with_one_nan(lanes.divided(total, divisor))


class Extreme(Arithmetic):
    """MIN and MAX by integers: a float's bits, with those of negative ones turned over, order like the floats.

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
        return {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF << 52}[self.dtype]

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

    def widened(self, lanes: Lanes, stored: Value) -> Value:
        extend = lanes.build.zext if self._is_unsigned else lanes.build.sext
        return extend(stored, lanes.vector(INT64 if FORMATS[self.dtype].item_bytes == 4 else INT32))


class Exact(Wide):
    """Sums of narrow floats in float64 that are exact, as nearly all are: 29 bits are to spare for a float32."""

    def started(self, lanes: Lanes, element: Value) -> State:
        return element, lanes.constant(INT64, 0)

    def combined(self, lanes: Lanes, state: State, element: Value) -> State:
        total, lost = state
        total, error = lanes.two_sum(total, element)
        return total, lanes.build.or_(lost, lanes.bits(error))

    def finished(self, lanes: Lanes, state: State, divisor: Value) -> Value:
        total = state[0]

        def quotient() -> State:
            number = lanes.spread(divisor)
            near = lanes.build.fdiv(total, number)
            # The remainder is exact, and has the sign of quotient - near, as the divisor is positive.
            remainder = lanes.fused_multiply_add(lanes.build.fneg(near), number, total)
            return (lanes.rounded_to_odd(near, remainder),)

        (result,) = lanes.unless_one(divisor, (total,), quotient)
        return from_double(lanes, result, self.dtype)

    def doubted(self, lanes: Lanes, state: State, divisor: Value) -> Value | None:
        total, lost = state
        # Without the sign, as -0 is no error.
        errors = lanes.build.shl(lost, lanes.constant(INT64, 1))
        has_errors = lanes.build.icmp_signed("!=", errors, lanes.constant(INT64, 0))
        # The "error" of an infinity is NaN, but an infinite total of narrow floats comes from infinite inputs.
        return lanes.build.and_(has_errors, lanes.is_finite(total))

    def fallback(self) -> Arithmetic | None:
        return Enclosed(self.op, self.dtype)


class Enclosed(Arithmetic):
    """Sums known to lie in near + rest +- doubt, where near is near + rest, rounded; like those in `exact.py`."""

    def widened(self, lanes: Lanes, stored: Value) -> Value:
        return as_double(lanes, stored, self.dtype)

    def started(self, lanes: Lanes, element: Value) -> State:
        return element, lanes.constant(DOUBLE, 0.0), lanes.constant(DOUBLE, 0.0)

    def combined(self, lanes: Lanes, state: State, element: Value) -> State:
        total, errors, lost = state
        total, error = lanes.two_sum(total, element)
        errors, error = lanes.two_sum(errors, error)
        return total, errors, lanes.build.fadd(lost, lanes.magnitude(error))

    def finished(self, lanes: Lanes, state: State, divisor: Value) -> Value:
        near, rest, _ = self._enclosure(lanes, state, divisor)
        if self.dtype == "float64":
            return near
        return from_double(lanes, lanes.rounded_to_odd(near, rest), self.dtype)

    def doubted(self, lanes: Lanes, state: State, divisor: Value) -> Value | None:
        build = lanes.build
        near, rest, doubt = self._enclosure(lanes, state, divisor)
        # Twice the doubt, as adding it up has lost some, and more than what rounding rest +- margin may lose.
        size_of_rest = lanes.magnitude(rest)
        margin = build.fadd(
            build.fmul(doubt, lanes.constant(DOUBLE, 4.0)), build.fmul(size_of_rest, lanes.constant(DOUBLE, 2.0**-51))
        )
        is_settled = build.and_(
            build.fcmp_ordered("==", build.fadd(near, build.fadd(rest, margin)), near),
            build.fcmp_ordered("==", build.fadd(near, build.fsub(rest, margin)), near),
        )
        if self.dtype != "float64":
            # To round to odd, the side on which the number lies must be known too.
            is_settled = build.and_(is_settled, build.fcmp_ordered(">", size_of_rest, margin))
        is_exact = build.fcmp_ordered("==", doubt, lanes.constant(DOUBLE, 0.0))
        is_open = build.not_(build.or_(is_settled, is_exact))
        if self.dtype != "float64":
            return build.and_(is_open, lanes.is_finite(state[0]))
        # An infinite total may be an overflow on the way to a finite sum.
        return build.or_(is_open, build.not_(lanes.is_finite(near)))

    def _enclosure(self, lanes: Lanes, state: State, divisor: Value) -> State:
        total, errors, lost = state
        near, rest = self._two_sum_keeping_zero(lanes, total, errors)
        return lanes.unless_one(
            divisor, (near, rest, lost), lambda: self._quotient(lanes, near, rest, lost, lanes.spread(divisor))
        )

    def _quotient(self, lanes: Lanes, near: Value, rest: Value, doubt: Value, number: Value) -> State:
        """One step of long division: quotient, remainder, and the remainder's quotient."""
        build, zero = lanes.build, lanes.constant(DOUBLE, 0.0)
        first = build.fdiv(near, number)
        minus_number = build.fneg(number)
        remainder = lanes.fused_multiply_add(first, minus_number, near)
        remainder, lost = lanes.two_sum(remainder, rest)
        second = build.fdiv(remainder, number)
        left = lanes.fused_multiply_add(second, minus_number, remainder)
        is_exact = build.and_(
            build.fcmp_ordered("==", build.fadd(lanes.magnitude(left), lanes.magnitude(lost)), zero),
            build.fcmp_ordered("==", doubt, zero),
        )
        # `lost` and the division put second wrong by 2**-53 each, or 2**-1074 where it underflows.
        wrong = build.fmul(lanes.magnitude(second), lanes.constant(DOUBLE, 2.0**-51))
        wrong = build.fadd(wrong, build.fadd(build.fdiv(doubt, number), lanes.constant(DOUBLE, 2.0**-1000)))
        # Remainders are exact only far above the subnormal range.
        is_tiny = build.and_(
            build.fcmp_unordered("<", lanes.magnitude(first), lanes.constant(DOUBLE, 2.0**-900)),
            build.fcmp_unordered("!=", near, zero),
        )
        wrong = build.select(is_tiny, lanes.constant(DOUBLE, float("inf")), build.select(is_exact, zero, wrong))
        return *self._two_sum_keeping_zero(lanes, first, second), wrong

    def _two_sum_keeping_zero(self, lanes: Lanes, high: Value, low: Value) -> tuple[Value, Value]:
        """Like two_sum, but with nothing to add high stays: -0 + 0 would lose its sign, and inf + NaN is no sum."""
        near, rest = lanes.two_sum(high, low)
        has_low = lanes.build.fcmp_ordered("!=", low, lanes.constant(DOUBLE, 0.0))
        return lanes.build.select(has_low, near, high), lanes.build.select(has_low, rest, lanes.constant(DOUBLE, 0.0))


FAMILIES: dict[str, type[Arithmetic]] = {
    "native": Arithmetic,
    "rounded": RoundedHalves,
    "wide": Wide,
    "compensated": Compensated,
    "extreme": Extreme,
    "wrapping": Wrapping,
    "wrapping_mean": WrappingMean,
    "true_mean": TrueMean,
    "exact": Exact,
    "enclosed": Enclosed,
}


def arithmetic_named(name: str) -> Arithmetic:
    """The arithmetic that a name of family, operation and dtype stands for.

    >>> arithmetic_named("wide SUM float32").result_dtype
    'float32'
    """
    family, op, dtype = name.split(" ")
    return FAMILIES[family](op, dtype)

"""Operations on vectors of elements, emitted as LLVM code.

All of it is portable LLVM: a vector longer than the machine's registers is split, whatever the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from crossdevice.kernels.host.reference.rounding import LARGEST_PRODUCT, SMALLEST_PRODUCT

Value = Any
"""A value of llvmlite's intermediate representation."""

Builder = Any

State = tuple[Value, ...]
"""The vectors that an accumulator consists of."""

INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
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

    def two_product(self, left: Value, right: Value) -> tuple[Value, Value, Value]:
        """The rounded product, its error, and where that is known: elsewhere it is 0.

        As in the reference's `two_product`, which knows of no other places.
        """
        build = self.build
        product = build.fmul(left, right)
        size = self.magnitude(product)
        is_known = build.and_(
            build.fcmp_ordered(">=", size, self.constant(DOUBLE, SMALLEST_PRODUCT)),
            build.and_(
                build.fcmp_ordered("<=", size, self.constant(DOUBLE, LARGEST_PRODUCT)),
                build.fcmp_ordered("<=", self.magnitude(left), self.constant(DOUBLE, LARGEST_PRODUCT)),
            ),
        )
        error = self.fused_multiply_add(left, right, build.fneg(product))
        return product, build.select(is_known, error, self.constant(DOUBLE, 0.0)), is_known

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
        """value / divisor, without a division, which is slow in cache, by 1 (a sum) and powers of two."""
        build = self.build

        def quotient() -> State:
            is_double = divisor.type == DOUBLE
            bits = build.bitcast(divisor, INT64 if is_double else INT32)
            fraction = build.and_(bits, ir.Constant(bits.type, (1 << (52 if is_double else 23)) - 1))
            has_reciprocal = build.icmp_unsigned("==", fraction, ir.Constant(bits.type, 0))
            reciprocal = self.spread(build.fdiv(ir.Constant(divisor.type, 1.0), divisor))
            return self.unless(
                has_reciprocal,
                (build.fmul(value, reciprocal),),
                lambda: (build.fdiv(value, self.spread(divisor)),),
            )

        (result,) = self.unless_one(divisor, (value,), quotient)
        return result

    def unless_one(self, divisor: Value, values: State, quotients: Callable[[], State]) -> State:
        """`values` if the divisor is 1, else the quotients."""
        is_one = self.build.fcmp_unordered("==", divisor, ir.Constant(divisor.type, 1.0))
        return self.unless(is_one, values, quotients)

    def unless(self, condition: Value, values: State, others: Callable[[], State]) -> State:
        """`values` under the condition, a scalar, else the others."""
        places = [cgutils.alloca_once_value(self.build, value) for value in values]
        with self.build.if_then(self.build.not_(condition)):
            for other, place in zip(others(), places, strict=True):
                self.build.store(other, place)
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
        """float64 to float32, rounded to odd, subnormal numbers aside: those are rounded to nearest."""
        build, bits = self.build, self.bits(wide)
        lower = (1 << 29) - 1
        cut = build.and_(bits, self.constant(INT64, ~lower))
        lost = build.icmp_unsigned(
            "!=", build.and_(bits, self.constant(INT64, lower)), self.constant(INT64, 0)
        )
        odd = build.select(lost, build.or_(cut, self.constant(INT64, lower + 1)), cut)
        # Its 24 bits fit; NaN stays NaN, as it keeps one of its bits.
        return build.fptrunc(build.bitcast(odd, wide.type), self.vector(SINGLE))

    def odd_single_or_subnormal(self, wide: Value) -> Value:
        """float64 to float32, rounded to odd, whatever it is."""
        build = self.build
        single = self.odd_single(wide)
        place = cgutils.alloca_once_value(build, single)
        magnitude = build.and_(self.bits(single), self.constant(INT32, 0x7FFFFFFF))
        # Zero counts as large here: one less than it is the largest integer of all.
        below = build.sub(magnitude, self.constant(INT32, 1))
        is_subnormal = build.icmp_unsigned("<", below, self.constant(INT32, 0x7FFFFF))
        # What was rounded up to a normal number or down to zero is far from any tie, and needs no oddness.
        with build.if_then(self.is_any(is_subnormal), likely=False):
            build.store(self._odd_by_comparison(wide), place)
        return build.load(place)

    def is_any(self, mask: Value) -> Value:
        """Whether the mask is set in any lane."""
        if self.count == 1:
            return self.build.extract_element(mask, ir.Constant(INT32, 0))
        integer = self.build.bitcast(mask, ir.IntType(self.count))
        return self.build.icmp_unsigned("!=", integer, ir.Constant(integer.type, 0))

    def _odd_by_comparison(self, wide: Value) -> Value:
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
    "float8_e4m3fn": Format(INT8, 1),
    "float8_e5m2": Format(INT8, 1),
    "float16": Format(HALF, 2),
    "bfloat16": Format(INT16, 2),
    "float32": Format(SINGLE, 4),
    "float64": Format(DOUBLE, 8),
    **{
        f"{sign}int{bits}": Format(ir.IntType(bits), bits // 8)
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
}

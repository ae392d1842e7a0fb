"""Operations on vectors of elements, emitted as LLVM code.

All of it is portable LLVM: a vector longer than the machine's registers is split, whatever the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from crossdevice.kernels.host.reference.rounding import is_error_known

Value = Any
"""A value of llvmlite's intermediate representation."""

Builder = Any

INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
HALF, SINGLE, DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()


class Lanes:
    """Makes vectors of `count` elements."""

    def __init__(self, builder: Builder, count: int) -> None:
        self.build = builder
        self.count = count

    def vector(self, kind: Any) -> Any:
        """Returns the vector type for an element type."""
        return ir.VectorType(kind, self.count)

    def constant(self, kind: Any, value: float) -> Vector:
        """Returns the same constant in all lanes."""
        return Vector(self, ir.Constant(self.vector(kind), [value] * self.count))

    def spread(self, value: Value) -> Vector:
        """Copies a scalar to all lanes."""
        nothing = ir.Constant(self.vector(value.type), ir.Undefined)
        first = Vector(self, self.build.insert_element(nothing, value, ir.Constant(INT32, 0)))
        return first.shuffled([0] * self.count)

    def load(self, address: Value, kind: Any) -> Vector:
        """Loads elements from any address: 1 is the only alignment that views of bytes promise."""
        loaded = self.build.load(self.build.inttoptr(address, self.vector(kind).as_pointer()))
        loaded.align = 1
        return Vector(self, loaded)

    def prefetch(self, address: Value, distance: int) -> None:
        """Asks for the cache line that far behind an address; what lies there need not be memory."""
        build, pointer = self.build, INT8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, INT32, INT32, INT32])
        function = build.module.declare_intrinsic("llvm.prefetch", (pointer,), kind)
        place = build.inttoptr(build.add(address, ir.Constant(INT64, distance)), pointer)
        # To read, into the nearest cache, as data.
        build.call(function, [place, *(ir.Constant(INT32, flag) for flag in (0, 3, 1))])

    def unless_one(
        self, divisor: Value, values: State, quotients: Callable[[], State], rest: Vector | None = None
    ) -> State:
        """Selects `values` if the scalar divisor is 1 and its rest (in any lane) is 0, else the quotients."""
        is_one = self.build.fcmp_unordered("==", divisor, ir.Constant(divisor.type, 1.0))
        if rest is not None:
            lacking = self.build.extract_element(rest.value, ir.Constant(INT32, 0))
            lacks_nothing = self.build.fcmp_unordered("==", lacking, ir.Constant(lacking.type, 0.0))
            is_one = self.build.and_(is_one, lacks_nothing)
        return self.unless(is_one, values, quotients)

    def unless(self, condition: Value, values: State, others: Callable[[], State]) -> State:
        """Selects `values` if the scalar condition holds, else computes the others."""
        places = [cgutils.alloca_once_value(self.build, each.value) for each in values]
        with self.build.if_then(self.build.not_(condition)):
            for other, place in zip(others(), places, strict=True):
                self.build.store(other.value, place)
        return tuple(Vector(self, self.build.load(place)) for place in places)

    def is_power_of_two(self, number: Value) -> Value:
        """Tests a positive, normal float, a scalar."""
        fraction_bits, integer = (23, INT32) if number.type == SINGLE else (52, INT64)
        bits = self.build.bitcast(number, integer)
        fraction = self.build.and_(bits, ir.Constant(integer, (1 << fraction_bits) - 1))
        return self.build.icmp_unsigned("==", fraction, ir.Constant(integer, 0))

    def either(self, condition: Value, ones: Callable[[], State], others: Callable[[], State]) -> State:
        """Computes `ones` if the scalar condition holds, else the others."""
        with self.build.if_else(condition) as (then, otherwise):
            with then:
                places = [cgutils.alloca_once_value(self.build, each.value) for each in ones()]
            with otherwise:
                for other, place in zip(others(), places, strict=True):
                    self.build.store(other.value, place)
        return tuple(Vector(self, self.build.load(place)) for place in places)


def _operator(instruction: str) -> Callable[[Vector, Operand], Vector]:
    return lambda left, right: left._made(instruction, right)


def _relation(relation: str) -> Callable[[Vector, Operand], Vector]:
    return lambda left, right: left.compare(relation, right)


class Vector:
    """Elements side by side: operators emit instructions for all of them, and numbers stand for constants.

    Integers are taken as unsigned ones.
    """

    def __init__(self, lanes: Lanes, value: Value) -> None:
        self.lanes, self.value = lanes, value
        self.kind = value.type.element

    def _made(self, instruction: str, *others: Operand) -> Vector:
        if instruction in ("add", "sub", "mul") and not isinstance(self.kind, ir.IntType):
            instruction = f"f{instruction}"
        operands = (self._like(other) for other in others)
        return Vector(self.lanes, getattr(self.lanes.build, instruction)(self.value, *operands))

    def _like(self, other: Operand) -> Value:
        return (other if isinstance(other, Vector) else self.lanes.constant(self.kind, other)).value

    def compare(self, relation: str, other: Operand, *, signed: bool = False) -> Vector:
        """Compares lanes; with NaN only `!=` holds."""
        if isinstance(self.kind, ir.IntType):
            kind = "icmp_signed" if signed else "icmp_unsigned"
        else:
            kind = "fcmp_unordered" if relation == "!=" else "fcmp_ordered"
        return Vector(self.lanes, getattr(self.lanes.build, kind)(relation, self.value, self._like(other)))

    def differs(self, other: Operand) -> Vector:
        """Masks lanes in which both are numbers and differ."""
        return Vector(self.lanes, self.lanes.build.fcmp_ordered("!=", self.value, self._like(other)))

    __add__, __sub__, __mul__ = _operator("add"), _operator("sub"), _operator("mul")
    __truediv__ = _operator("fdiv")
    __and__, __or__, __xor__ = _operator("and_"), _operator("or_"), _operator("xor")
    __lshift__, __rshift__ = _operator("shl"), _operator("lshr")
    __lt__, __le__, __gt__, __ge__ = _relation("<"), _relation("<="), _relation(">"), _relation(">=")
    __eq__, __ne__ = _relation("=="), _relation("!=")  # type: ignore[assignment]

    def __neg__(self) -> Vector:
        return self._made("fneg")

    def __invert__(self) -> Vector:
        return self._made("not_")

    def __abs__(self) -> Vector:
        bits = self.bits()
        return (bits & ((1 << (bits.kind.width - 1)) - 1)).converted("bitcast", self.kind)

    def select(self, chosen: Operand, other: Operand) -> Vector:
        """Selects per lane: `chosen` where this mask is set, else `other`."""
        like = chosen if isinstance(chosen, Vector) else other
        assert isinstance(like, Vector)
        values = like._like(chosen), like._like(other)
        return Vector(self.lanes, self.lanes.build.select(self.value, *values))

    def converted(self, instruction: str, kind: Any, lanes: Lanes | None = None) -> Vector:
        """Reinterprets the bits as elements of another type; the number of elements may change."""
        into = lanes or self.lanes
        return Vector(into, getattr(into.build, instruction)(self.value, into.vector(kind)))

    def bits(self) -> Vector:
        """Floats as the integers that have their bits."""
        integer = {HALF: INT16, SINGLE: INT32, DOUBLE: INT64}.get(self.kind)
        return self if integer is None else self.converted("bitcast", integer)

    def shuffled(self, positions: Sequence[int], other: Vector | None = None) -> Vector:
        """Picks the elements at these positions; those of the other vector follow this one's."""
        into = Lanes(self.lanes.build, len(positions))
        picks = ir.Constant(into.vector(INT32), list(positions))
        behind = self.value if other is None else other.value
        return Vector(into, into.build.shuffle_vector(self.value, behind, picks))

    def times_plus(self, factor: Vector, addend: Vector) -> Vector:
        """Returns this times the factor plus the addend, of float64, rounded once."""
        build, kind = self.lanes.build, self.value.type
        function_type, name = ir.FunctionType(kind, [kind] * 3), f"llvm.fma.v{self.lanes.count}f64"
        function = cgutils.get_or_insert_function(build.module, function_type, name)
        return Vector(self.lanes, build.call(function, [self.value, factor.value, addend.value]))

    def two_product(self, factor: Vector) -> tuple[Vector, Vector, Vector]:
        """Returns the rounded product, its error (0 where unknown), and where the error is known."""
        product = self * factor
        is_known = is_error_known(self, product)
        error = self.times_plus(factor, -product)
        return product, is_known.select(error, 0.0), is_known

    def is_finite(self) -> Vector:
        """Returns True per lane for values that are neither infinite nor NaN."""
        return abs(self) < float("inf")

    def with_one_nan(self) -> Vector:
        """Replaces every NaN by the positive quiet one, so that bits are defined."""
        return (self != self).select(float("nan"), self)

    def is_any(self) -> Value:
        """Tests whether a mask is set in any lane."""
        build, count = self.lanes.build, self.lanes.count
        if count == 1:
            return build.extract_element(self.value, ir.Constant(INT32, 0))
        integer = build.bitcast(self.value, ir.IntType(count))
        return build.icmp_unsigned("!=", integer, ir.Constant(integer.type, 0))

    def divided(self, divisor: Value, quotient_by: Callable[[Vector], Vector] | None = None) -> Vector:
        """Divides by a float64; avoids the slow division for 1 (a sum) and powers of two.

        `quotient_by` takes the place of the plain division by any other number.
        """
        lanes, build = self.lanes, self.lanes.build
        is_single = self.kind == SINGLE
        number = build.fptrunc(divisor, SINGLE) if is_single else divisor

        def by_division() -> State:
            divisors = lanes.spread(number)
            return (self / divisors if quotient_by is None else quotient_by(divisors),)

        def quotient() -> State:
            reciprocal = lanes.spread(build.fdiv(ir.Constant(number.type, 1.0), number))
            return lanes.unless(lanes.is_power_of_two(number), (self * reciprocal,), by_division)

        return lanes.unless_one(number, (self,), quotient)[0]

    def rounded_to_odd(self, rest: Vector) -> Vector:
        """Adds `rest` with rounding to odd: the last bit tells whether anything was lost.

        Rounding that to a format with two bits less is rounding once (Boldo, Melquiond).
        """
        bits, lost = self.bits(), rest.differs(0.0)
        is_too_far = lost & (bits ^ rest.bits()).compare("<", 0, signed=True)
        odd = (bits - is_too_far.converted("zext", bits.kind)) | lost.converted("zext", bits.kind)
        return odd.converted("bitcast", self.kind)

    def odd_single(self) -> Vector:
        """Rounds float64 to float32, to odd; subnormal numbers are rounded to nearest."""
        bits, lower = self.bits(), (1 << 29) - 1
        cut = bits & ~lower
        odd = (bits & lower != 0).select(cut | lower + 1, cut)
        # Its 24 bits fit; NaN stays NaN, as it keeps one of its bits.
        return odd.converted("bitcast", DOUBLE).converted("fptrunc", SINGLE)

    def odd_single_or_subnormal(self) -> Vector:
        """Rounds float64 to float32, to odd, subnormal numbers included."""
        build, single = self.lanes.build, self.odd_single()
        place = cgutils.alloca_once_value(build, single.value)
        # Zero counts as large here: one less than it is the largest integer of all.
        is_subnormal = (single.bits() & 0x7FFFFFFF) - 1 < 0x7FFFFF
        # What was rounded up to a normal number or down to zero is far from any tie, and needs no oddness.
        with build.if_then(is_subnormal.is_any(), likely=False):
            build.store(self._odd_by_comparison().value, place)
        return Vector(self.lanes, build.load(place))

    def _odd_by_comparison(self) -> Vector:
        near = self.converted("fptrunc", SINGLE)
        back = near.converted("fpext", DOUBLE)
        too_far, lost = abs(back) > abs(self), back.differs(self)
        odd = (near.bits() - too_far.converted("zext", INT32)) | lost.converted("zext", INT32)
        return odd.converted("bitcast", SINGLE)


Operand = Vector | float

State = tuple[Vector, ...]
"""The vectors that an accumulator consists of."""


STORED = {
    "float8_e4m3fn": INT8,
    "float8_e5m2": INT8,
    "float16": HALF,
    "bfloat16": INT16,
    "float32": SINGLE,
    "float64": DOUBLE,
    **{f"{sign}int{bits}": ir.IntType(bits) for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
"""The types in which elements of a dtype are read and written."""

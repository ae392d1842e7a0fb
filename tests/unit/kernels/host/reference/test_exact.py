"""Exact sums and products are the true ones, rounded once, and know no order."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdevice.kernels.host.reference import exact
from crossdevice.kernels.host.reference.exact import exact_product, exact_sum
from crossdevice.kernels.host.reference.long_accumulator import rounded_long_sum
from drawn_examples import examples

FLOATS = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.float64)]
COMPLEXES = [np.dtype(np.complex64), np.dtype(np.complex128)]
NAMES = [dtype.name for dtype in FLOATS]
MANTISSA_BITS = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}

each_float = pytest.mark.parametrize("dtype", FLOATS, ids=NAMES)
each_complex = pytest.mark.parametrize("dtype", COMPLEXES, ids=lambda dtype: dtype.name)


def unsigned(dtype):
    return np.dtype(f"u{dtype.itemsize}")


def bits_of(array):
    part = array.real.dtype if array.dtype.kind == "c" else array.dtype
    return array.view(unsigned(part)).tolist()


def value_of(pattern, dtype):
    return float(np.array([pattern], unsigned(dtype)).view(dtype)[0])


def infinity_pattern(dtype):
    exponent_bits = dtype.itemsize * 8 - 1 - MANTISSA_BITS[dtype.name]
    return ((1 << exponent_bits) - 1) << MANTISSA_BITS[dtype.name]


def sign_pattern(dtype):
    return 1 << (dtype.itemsize * 8 - 1)


def nan_pattern(dtype):
    return infinity_pattern(dtype) | 1 << (MANTISSA_BITS[dtype.name] - 1)


def rounded_pattern(value, dtype):
    """The bits of a positive Fraction rounded to nearest even, found among neighbours by bisection."""
    least, infinity = 0, infinity_pattern(dtype)
    beyond = infinity
    while beyond - least > 1:
        middle = (least + beyond) // 2
        if Fraction(value_of(middle, dtype)) <= value:
            least = middle
        else:
            beyond = middle
    below = Fraction(value_of(least, dtype))
    # The number one place above the largest finite one stands where infinity begins.
    gap = below - Fraction(value_of(least - 1, dtype)) if beyond == infinity else None
    above = below + gap if gap is not None else Fraction(value_of(beyond, dtype))
    twice = (value - below) * 2 - (above - below)
    return beyond if twice > 0 or (twice == 0 and least % 2) else least


def float_of(value):
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def expected_sum(column, divisor, dtype):
    """The bits of the sum of Python floats, or of their mean, in Fractions."""
    if any(map(math.isnan, column)) or {math.inf, -math.inf} <= set(column):
        return nan_pattern(dtype)
    for infinity in (math.inf, -math.inf):
        if infinity in column:
            return infinity_pattern(dtype) | (infinity < 0) * sign_pattern(dtype)
    total = sum(map(Fraction, column)) / (divisor or 1)
    is_negative = total < 0 if total else all(math.copysign(1, value) < 0 for value in column)
    return rounded_pattern(abs(total), dtype) | is_negative * sign_pattern(dtype)


def expected_sums(inputs, divisor, dtype):
    columns = zip(*(array.astype(np.float64).tolist() for array in inputs), strict=True)
    return [expected_sum(column, divisor, dtype) for column in columns]


def expected_product(column, dtype):
    is_negative = sum(math.copysign(1, value) < 0 for value in column) % 2
    if any(map(math.isnan, column)) or (0 in column and any(map(math.isinf, column))):
        return nan_pattern(dtype)
    if any(map(math.isinf, column)):
        return infinity_pattern(dtype) | is_negative * sign_pattern(dtype)
    magnitude = abs(math.prod(map(Fraction, column)))
    return rounded_pattern(magnitude, dtype) | is_negative * sign_pattern(dtype)


def patterns(dtype):
    """Bit patterns of any magnitude, of like magnitudes, of few significant bits, and of the odd ones out."""
    mantissa, infinity = MANTISSA_BITS[dtype.name], infinity_pattern(dtype)
    one = (infinity >> mantissa) // 2 << mantissa
    positive = st.one_of(
        st.integers(0, infinity - 1),
        st.integers(one - (3 << mantissa), one + (3 << mantissa)),
        st.integers(0, (infinity - 1) >> (mantissa - 2)).map(lambda bits: bits << (mantissa - 2)),
        st.sampled_from([0, 1, infinity - 1, 1 << mantissa, (1 << mantissa) - 1, one]),
    )
    return st.builds(
        lambda pattern, sign: pattern | sign, positive, st.sampled_from([0, sign_pattern(dtype)])
    )


@st.composite
def arrays(draw, dtype, allow_special=True, size=4):
    """1 to 9 arrays; in some columns values cancel, or all are zeros, or some are infinities and NaN."""
    number = draw(st.integers(1, 9))
    rows = st.lists(patterns(dtype), min_size=number * size, max_size=number * size)
    table = np.array(draw(rows), unsigned(dtype)).reshape(number, size)
    sign, first, last = (
        sign_pattern(dtype),
        draw(st.integers(0, number - 1)),
        draw(st.integers(0, number - 1)),
    )
    if number > 1:
        table[last, 0] = table[first, 0] ^ unsigned(dtype).type(sign)
    table[:, 1] &= unsigned(dtype).type(sign if draw(st.booleans()) else 2 * sign - 1)
    if allow_special:
        special = st.sampled_from(
            [infinity_pattern(dtype), sign | infinity_pattern(dtype), nan_pattern(dtype)]
        )
        table[first, 2] = draw(special)
        table[last, 2] = draw(special)
    return list(table.view(dtype))


def near_ties(dtype, number, size, seed):
    """Columns whose sums and means often are, or just miss, the middle between two values."""
    generator = np.random.default_rng(seed)
    shape, place = (number, size), MANTISSA_BITS[dtype.name]
    wide = generator.integers(-9, 10, shape) * 2.0 ** generator.integers(-1, 2, shape)
    with np.errstate(all="ignore"):
        return list((wide * 2.0 ** generator.choice([0, place, -place - 1], shape)).astype(dtype))


@each_float
@examples(150)
@given(data=st.data())
def test_sums_and_means_are_the_true_ones_rounded_once(dtype, data):
    inputs = data.draw(arrays(dtype))
    divisor = data.draw(st.one_of(st.none(), st.integers(1, 9), st.integers(1, 2**31)))
    assert bits_of(exact_sum(inputs, divisor, dtype)) == expected_sums(inputs, divisor, dtype)


@each_float
@pytest.mark.parametrize("divisor", [None, *range(1, 10), 2**20 - 1, 2**20 + 1, 2**31 - 1, 2**31])
def test_ties_and_what_just_misses_them_round_once(dtype, divisor):
    for number in (1, 2, 3, 8):
        inputs = near_ties(dtype, number, size=40, seed=number)
        assert bits_of(exact_sum(inputs, divisor, dtype)) == expected_sums(inputs, divisor, dtype)


@examples(150)
@given(data=st.data())
def test_float64_agrees_with_python_fractions(data):
    dtype = np.dtype(np.float64)
    inputs = data.draw(arrays(dtype, allow_special=False))
    divisor = data.draw(st.integers(1, 9))
    results = exact_sum(inputs, divisor, dtype).tolist()
    for column, result in zip(zip(*(array.tolist() for array in inputs), strict=True), results, strict=True):
        mean = sum(map(Fraction, column)) / divisor
        assert result == float_of(mean)


@each_float
@examples(80)
@given(data=st.data())
def test_bits_do_not_depend_on_the_order_of_the_inputs(dtype, data):
    inputs = data.draw(arrays(dtype))
    shuffled = data.draw(st.permutations(inputs))
    divisor = data.draw(st.one_of(st.none(), st.integers(1, 9)))
    assert bits_of(exact_sum(inputs, divisor, dtype)) == bits_of(exact_sum(shuffled, divisor, dtype))
    assert bits_of(exact_product(inputs, dtype)) == bits_of(exact_product(shuffled, dtype))


@each_float
@examples(80)
@given(data=st.data())
def test_the_long_accumulator_alone_gives_the_same_bits(dtype, data):
    inputs = data.draw(arrays(dtype, allow_special=False))
    divisor = data.draw(st.one_of(st.none(), st.integers(1, 9)))
    columns = np.stack(inputs).astype(np.float64)
    alone = rounded_long_sum(columns, divisor, dtype)
    assert bits_of(alone) == bits_of(exact_sum(inputs, divisor, dtype))


@each_float
@pytest.mark.parametrize("divisor", [None, 1, 3, 7, 8, 2**20 - 1, 2**20 + 1, 2**31 - 1])
def test_the_long_accumulator_gives_the_same_bits_on_more_than_a_chunk_of_normal_data(dtype, divisor):
    columns = np.random.default_rng(5).standard_normal((8, 5000)).astype(dtype)
    alone = rounded_long_sum(columns.astype(np.float64), divisor, dtype)
    assert bits_of(alone) == bits_of(exact_sum(list(columns), divisor, dtype))


@each_float
@pytest.mark.parametrize("divisor", [None, 1, 2, 3, 6, 7, 8])
@pytest.mark.parametrize("number", [1, 2, 3, 8])
def test_normal_data_never_needs_the_long_accumulator(dtype, divisor, number, monkeypatch):
    def refuse(columns, divisor, dtype):
        assert not columns.size
        return np.empty(0, dtype)

    monkeypatch.setattr(exact, "rounded_long_sum", refuse)
    inputs = list(np.random.default_rng(7).standard_normal((number, 20000)).astype(dtype))
    exact_sum(inputs, divisor, dtype)


@each_float
@pytest.mark.parametrize("shift", [-3, 0, 1, 7])
def test_any_distance_from_a_tie_counts_however_small(dtype, shift):
    place = 2.0 ** (shift - MANTISSA_BITS[dtype.name])
    tiny = [value_of(1, dtype)]
    while tiny[-1] < place / 4:
        tiny.append(2 * tiny[-1])
    tiny = np.array(tiny + [-value for value in tiny], dtype)
    inputs = [np.full_like(tiny, 2.0**shift), np.full_like(tiny, place / 2), tiny]
    expected = np.where(tiny > 0, 2.0**shift + place, 2.0**shift).astype(dtype)
    assert bits_of(exact_sum(inputs, None, dtype)) == bits_of(expected)
    assert bits_of(rounded_long_sum(np.stack(inputs).astype(np.float64), None, dtype)) == bits_of(expected)


@pytest.mark.parametrize("dtype", FLOATS[1:3], ids=NAMES[1:3])
def test_a_tie_is_not_taken_for_one_when_what_breaks_it_was_lost_among_the_errors(dtype):
    place, smallest = 2.0 ** -MANTISSA_BITS[dtype.name], value_of(1, dtype)
    zeros = [0] * 4
    columns = [
        ([4, 2 * place, 2.0**-60, smallest, -(2.0**-60), *zeros], 4 + 4 * place),
        ([4, 2 * place, 2.0**-60, -smallest, -(2.0**-60), *zeros], 4),
        # The errors seem to add up to 2**-120, and are -3 * 2**-120.
        ([4, 2 * place, 2.0**-60, *[-(2.0**-120)] * 4, -(2.0**-60), 2.0**-120], 4),
    ]
    inputs = list(np.array([column for column, _ in columns]).T.astype(dtype))
    results = [result for _, result in columns]
    assert exact_sum(inputs, None, dtype).astype(float).tolist() == results
    assert exact_sum(inputs, 4, dtype).astype(float).tolist() == [result / 4 for result in results]


def test_a_mean_is_not_taken_for_a_tie_when_what_breaks_it_was_lost_from_the_remainder():
    dtype, divisor, quotient = np.dtype(np.float64), 2**20 - 1, 2**52 + 2**19
    half_above = divisor * quotient + (divisor + 1) // 2
    assert int(float(half_above)) == half_above
    inputs = [np.full(2, float(half_above)), np.full(2, -0.5), np.array([2.0**-52, -(2.0**-52)])]
    assert exact_sum(inputs, divisor, dtype).tolist() == [quotient + 1, quotient]


@each_float
def test_a_small_difference_divides_to_full_precision(dtype):
    place = 2.0 ** -MANTISSA_BITS[dtype.name]
    for scale, divisor in itertools.product(2.0 ** np.arange(-14, 15), (3, 2_000_000_011, 2**31 - 1)):
        inputs = [np.array([scale * (1 + place)], dtype), np.array([-scale], dtype)]
        assert bits_of(exact_sum(inputs, divisor, dtype)) == expected_sums(inputs, divisor, dtype)


def test_the_long_accumulator_holds_the_sum_of_thousands_of_inputs():
    # The lowest bit of these is the highest of a limb, which leaves the least room above.
    values = np.array([2.0, -2.0]) * (2.0 - 2.0**-52)
    columns = np.tile(values, (2**13, 1))
    assert bits_of(rounded_long_sum(columns, None, columns.dtype)) == bits_of(values * 2**13)


@each_float
def test_a_sum_that_overflows_on_the_way_does_not(dtype):
    largest = value_of(infinity_pattern(dtype) - 1, dtype)
    for column in set(itertools.permutations([largest, largest, -largest, -largest, largest])):
        inputs = list(np.array(column, dtype).reshape(-1, 1))
        assert exact_sum(inputs, None, dtype) == largest
    inputs = [np.array([largest, -largest], dtype)] * 7
    assert bits_of(exact_sum(inputs, 7, dtype)) == bits_of(inputs[0])
    assert exact_sum(inputs, None, dtype).astype(float).tolist() == [math.inf, -math.inf]


@each_float
def test_half_a_place_above_the_largest_is_infinite_and_less_is_not(dtype):
    largest = value_of(infinity_pattern(dtype) - 1, dtype)
    half_a_place = (largest - value_of(infinity_pattern(dtype) - 2, dtype)) / 2
    inputs = [np.array([largest] * 2, dtype), np.array([half_a_place] * 2, dtype), np.zeros(2, dtype)]
    inputs[2][1] = -value_of(1, dtype)
    assert exact_sum(inputs, None, dtype).astype(float).tolist() == [math.inf, largest]


@each_float
def test_infinities_and_nan_propagate_as_one_nan_or_an_infinity(dtype):
    largest = value_of(infinity_pattern(dtype) - 1, dtype)
    columns = [
        ([math.inf, 1, -1], math.inf),
        ([largest, largest, -math.inf], -math.inf),
        ([math.inf, 0, -math.inf], math.nan),
        ([1, -math.nan, math.inf], math.nan),
    ]
    inputs = list(np.array([column for column, _ in columns]).T.astype(dtype))
    results = np.array([result for _, result in columns], dtype)
    for divisor in (None, 3):
        assert bits_of(exact_sum(inputs, divisor, dtype)) == bits_of(results)


@each_float
def test_a_zero_sum_is_negative_only_if_all_inputs_are_negative_zeros(dtype):
    columns = np.array([[-0.0, -0.0, -0.0], [-0.0, 0.0, -0.0], [1, -0.0, -1], [-1, -0.0, 1], [0.0, 0.0, 0.0]])
    inputs = list(columns.T.astype(dtype))
    for divisor in (None, 3, 2**31 - 1):
        signs = np.signbit(exact_sum(inputs, divisor, dtype)).tolist()
        assert signs == [True, False, False, False, False]
    alone = rounded_long_sum(columns.T, None, dtype)
    assert np.signbit(alone).tolist() == [True, False, False, False, False]


@each_float
def test_a_mean_that_underflows_to_zero_keeps_the_sign_of_the_sum(dtype):
    smallest = value_of(1, dtype)
    inputs = [np.array([smallest, -smallest, -2 * smallest], dtype), np.array([0, 0, smallest], dtype)]
    zero, negative_zero = 0, sign_pattern(dtype)
    assert bits_of(exact_sum(inputs, 2, dtype)) == [zero, negative_zero, negative_zero]


@each_float
def test_sums_leave_their_inputs_alone(dtype):
    array = np.array([1.5, -0.0, math.inf, 3], dtype)
    before = bits_of(array)
    result = exact_sum([array], None, dtype)
    assert not np.shares_memory(result, array)
    exact_sum([array, array, -array], 3, dtype)
    exact_product([array, array], dtype)
    assert bits_of(array) == before


@pytest.mark.parametrize("dtype", FLOATS + COMPLEXES, ids=lambda dtype: dtype.name)
def test_empty_arrays_stay_empty(dtype):
    empty = np.empty(0, dtype)
    assert exact_product([empty, empty], dtype).shape == (0,)
    if dtype.kind != "c":
        assert exact_sum([empty, empty], 2, dtype).shape == (0,)


@each_float
@examples(150)
@given(data=st.data())
def test_products_are_the_true_ones_rounded_once(dtype, data):
    inputs = data.draw(arrays(dtype))
    columns = zip(*(array.astype(np.float64).tolist() for array in inputs), strict=True)
    assert bits_of(exact_product(inputs, dtype)) == [expected_product(column, dtype) for column in columns]


def test_products_of_two_agree_with_python_fractions_at_ties_and_next_to_them():
    left, right = np.random.default_rng(3).standard_normal((2, 20000))
    products = [float(Fraction(a) * Fraction(b)) for a, b in zip(left.tolist(), right.tolist(), strict=True)]
    assert exact_product([left, right], left.dtype).tolist() == products


def expanded_product(column):
    """All real and all imaginary terms of a product of complex numbers, as (sign, magnitude)."""
    terms = ([], [])
    for chosen in itertools.product((0, 1), repeat=len(column)):
        parts = [value.imag if pick else value.real for value, pick in zip(column, chosen, strict=True)]
        turns = sum(chosen)
        sign = math.prod(math.copysign(1, part) for part in parts) * (-1 if turns % 4 in (2, 3) else 1)
        terms[turns % 2].append((int(sign), abs(math.prod(map(Fraction, parts)))))
    return terms


@each_complex
@examples(80)
@given(data=st.data())
def test_both_parts_of_complex_products_are_rounded_once(dtype, data):
    part = np.empty(0, dtype).real.dtype
    flat = data.draw(arrays(part, allow_special=False))[:5]
    inputs = [array.view(dtype) for array in flat]
    expected = []
    for column in zip(*(array.tolist() for array in inputs), strict=True):
        for terms in expanded_product(column):
            total = sum(sign * magnitude for sign, magnitude in terms)
            # A zero is negative if all its terms are.
            is_negative = total < 0 or (total == 0 and all(sign < 0 for sign, _ in terms))
            expected.append(rounded_pattern(abs(total), part) | is_negative * sign_pattern(part))
    shuffled = data.draw(st.permutations(inputs))
    assert bits_of(exact_product(inputs, dtype)) == expected
    assert bits_of(exact_product(shuffled, dtype)) == expected


@each_complex
def test_complex_products_that_are_not_finite_are_native_ones_with_one_nan(dtype):
    inputs = [np.array([complex(math.inf, 1), complex(-math.nan, 0), 1 + 2j], dtype)]
    inputs.append(np.array([2 + 1j, 1 + 1j, 3 - 1j], dtype))
    result = exact_product(inputs, dtype)
    part = result.real.dtype
    inf, nan = infinity_pattern(part), nan_pattern(part)
    assert bits_of(result)[:4] == [inf, inf, nan, nan]
    assert result[2] == 5 + 5j

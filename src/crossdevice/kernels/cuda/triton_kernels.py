"""The fused pass in Triton: each program reads a block of every input once and writes it to every output.

Addresses come as whole numbers, as arguments or from a table in the GPU's memory, so that one compiled
kernel serves arrays of any alignment: a program looks at them and takes the wide accesses if it can.
"""

# ruff: noqa: N803, RUF005, SIM108 - Triton: what is compiled in is in capitals, tuples are not unpacked
# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from crossdevice.kernels.cuda.families import ROW_NUMBERS
from crossdevice.kernels.cuda.triton_arithmetic import (
    combined,
    compensated,
    error_of,
    error_of_product,
    finished,
    number_of,
    stepped,
    weighted_mean,
    widened,
)

_ROW_NUMBERS = tl.constexpr(ROW_NUMBERS)


@triton.jit(do_not_specialize=["inputs", "outputs", "num_elements"])
def pass_by_arguments(inputs, outputs, num_elements, SPEC: tl.constexpr, BLOCK: tl.constexpr):
    """Combines one array of every replica; `inputs` and `outputs` are tuples of addresses.

    In a weighted sum the addresses of inputs are followed by the bits of their weights, of the divisor and of
    what that lacks.
    """
    _do_block(inputs, outputs, tl.program_id(0).to(tl.int64) * BLOCK, num_elements, SPEC, BLOCK)


@triton.jit(do_not_specialize=["addresses", "rows"])
def pass_by_table(
    addresses,
    rows,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    SPEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Combines many arrays in one launch: `rows` has the task and the block of each program.

    A row is (task, number of the block, elements of the task). `addresses` has a line for each task: the
    addresses of its inputs, then those of its outputs.
    """
    row = rows.to(tl.pointer_type(tl.int64)) + tl.program_id(0).to(tl.int64) * _ROW_NUMBERS
    task, block, num_elements = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    line = addresses.to(tl.pointer_type(tl.int64)) + task * (NUM_INPUTS + NUM_OUTPUTS)
    inputs, outputs = _numbers_at(line, NUM_INPUTS), _numbers_at(line + NUM_INPUTS, NUM_OUTPUTS)
    _do_block(inputs, outputs, block * BLOCK, num_elements, SPEC, BLOCK)


@triton.jit
def _numbers_at(place, COUNT: tl.constexpr):
    found = (tl.load(place),)
    for number in tl.static_range(1, COUNT):
        found = found + (tl.load(place + number),)
    return found


@triton.jit
def _do_block(inputs, outputs, start, num_elements, SPEC: tl.constexpr, BLOCK: tl.constexpr):
    mixed = inputs[0]
    for number in tl.static_range(1, (len(inputs) + 1 - SPEC.numbers_per_input) // SPEC.numbers_per_input):
        mixed = mixed | inputs[number]
    for number in tl.static_range(len(outputs)):
        mixed = mixed | outputs[number]
    left = num_elements - start
    # Written out twice: only whole blocks at multiples of 16 bytes can be read 16 bytes at a time.
    if (mixed % 16 == 0) & (left >= BLOCK):
        value = finished(_combination(inputs, start, left, SPEC, BLOCK, True), SPEC)
        for number in tl.static_range(len(outputs)):
            tl.store(_targets(outputs[number], start, SPEC, BLOCK, True), value)
    else:
        value = finished(_combination(inputs, start, left, SPEC, BLOCK, False), SPEC)
        for number in tl.static_range(len(outputs)):
            place = _targets(outputs[number], start, SPEC, BLOCK, False)
            tl.store(place, value, mask=tl.arange(0, BLOCK) < left)


@triton.jit
def _combination(inputs, start, left, SPEC: tl.constexpr, BLOCK: tl.constexpr, IS_WHOLE: tl.constexpr):
    total = _element(inputs[0], start, left, SPEC, BLOCK, IS_WHOLE)
    if len(SPEC.program) > 0:
        levels = (total,)
        for _ in tl.static_range(1, len(SPEC.levels)):
            levels = levels + (total,)
        for step in tl.static_range(len(SPEC.program)):
            element = _element(inputs[SPEC.program[step] >> 16], start, left, SPEC, BLOCK, IS_WHOLE)
            levels = stepped(levels, element, step, SPEC)
        total = levels[0]
    elif SPEC.numbers_per_input == 2:
        total = _weighted(inputs, total, start, left, SPEC, BLOCK, IS_WHOLE)
    elif SPEC.family == "compensated":
        errors = tl.zeros_like(total)
        for number in tl.static_range(1, len(inputs)):
            element = _element(inputs[number], start, left, SPEC, BLOCK, IS_WHOLE)
            grown = total + element
            errors += error_of(total, element, grown)
            total = grown
        total = compensated(total, errors, SPEC)
    else:
        for number in tl.static_range(1, len(inputs)):
            total = combined(total, _element(inputs[number], start, left, SPEC, BLOCK, IS_WHOLE), SPEC)
    return total


@triton.jit
def _weighted(inputs, element, start, left, SPEC: tl.constexpr, BLOCK: tl.constexpr, IS_WHOLE: tl.constexpr):
    count: tl.constexpr = (len(inputs) - 1) // 2
    weight, divisor = number_of(inputs[count]), number_of(inputs[count + count])
    total = element * weight
    errors = tl.zeros_like(total)
    if SPEC.family == "weighted_compensated":
        errors += error_of_product(element, weight, total)
    for number in tl.static_range(1, count):
        element = _element(inputs[number], start, left, SPEC, BLOCK, IS_WHOLE)
        weight = number_of(inputs[count + number])
        product = element * weight
        grown = total + product
        if SPEC.family == "weighted_compensated":
            errors += error_of(total, product, grown)
            errors += error_of_product(element, weight, product)
        total = grown
    if SPEC.family == "weighted_compensated":
        total = weighted_mean(total, errors, divisor, number_of(inputs[count + count + 1]))
    else:
        total = total / divisor
    return total


@triton.jit
def _element(address, start, left, SPEC: tl.constexpr, BLOCK: tl.constexpr, IS_WHOLE: tl.constexpr):
    place = block_at(address.to(tl.pointer_type(SPEC.read_as)) + start, BLOCK, IS_WHOLE)
    if IS_WHOLE:
        stored = tl.load(place)
    else:
        stored = tl.load(place, mask=tl.arange(0, BLOCK) < left, other=0)
    return widened(stored, SPEC)


@triton.jit
def _targets(address, start, SPEC: tl.constexpr, BLOCK: tl.constexpr, IS_WHOLE: tl.constexpr):
    return block_at(address.to(tl.pointer_type(SPEC.written_as)) + start, BLOCK, IS_WHOLE)


@triton.jit
def block_at(place, BLOCK: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Returns the addresses of a block's elements; whole blocks are known to begin at multiples of 16."""
    places = place + tl.arange(0, BLOCK)
    if IS_WHOLE:
        places = tl.max_contiguous(tl.multiple_of(places, 16), BLOCK)
    return places

"""Running exact sums in Triton: weighted arrays added to parts, which have the bits of the host's."""

# ruff: noqa: N803, RUF005 - Triton: what is compiled in is in capitals, tuples are not unpacked
# mypy: disable-error-code="no-untyped-def, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from crossdevice.kernels.cuda.triton_arithmetic import error_of, error_of_product
from crossdevice.kernels.host.reference.long_accumulator import FORMATS
from crossdevice.kernels.host.reference.rounding import LARGEST_PRODUCT, SMALLEST_PRODUCT

TYPES = {"bfloat16": tl.uint16, **{name: getattr(tl, name) for name in ("float16", "float32", "float64")}}

_SMALLEST_PRODUCT = tl.constexpr(SMALLEST_PRODUCT)
_LARGEST_PRODUCT = tl.constexpr(LARGEST_PRODUCT)
_SIGN = tl.constexpr(-(1 << 63))
_LARGEST_WITHOUT_REST = tl.constexpr(float(1 << (53 - FORMATS["float32"].precision)))


@triton.jit(
    do_not_specialize=["table", "parts", "leftovers", "num_arrays", "num_blocks", "capacity", "weight"]
)
def add_arrays(
    table,
    parts,
    leftovers,
    num_arrays,
    num_blocks,
    capacity,
    weight,
    ELEMENT: tl.constexpr,
    IS_BFLOAT16: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds a block of one array, times a whole number, to its parts; `gpu_sums.py` lays out the memory.

    Elements that the parts cannot hold stay unchanged and are listed. A block with elements that find no room
    in the list stays as it was and is marked.
    """
    infinity: tl.constexpr = float("inf")
    block = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    addresses = parts.to(tl.pointer_type(tl.float64)) + block * BLOCK + columns
    addresses = tl.max_contiguous(tl.multiple_of(addresses, 16), BLOCK)
    part_elements = num_blocks.to(tl.int64) * BLOCK
    # Before anything is known of the array: most of the bytes are then on their way while the table is read.
    held = (tl.load(addresses),)
    for number in tl.static_range(1, NUM_PARTS):
        held = held + (tl.load(addresses + number * part_elements),)
    words = table.to(tl.pointer_type(tl.int64))
    owner = tl.load(words + 3 * num_arrays + block)
    address = tl.load(words + owner)
    if address != 0:
        places = (block - tl.load(words + num_arrays + owner)) * BLOCK + columns
        inside = places < tl.load(words + 2 * num_arrays + owner)
        stored = tl.load(address.to(tl.pointer_type(ELEMENT)) + places, mask=inside, other=0)
        if IS_BFLOAT16:
            element = (stored.to(tl.uint32) << 16).to(tl.float32, bitcast=True).to(tl.float64)
        else:
            element = stored.to(tl.float64)

        factor = weight.to(tl.int64).to(tl.float64)
        product = element * factor
        grown, left = _grown(held, product)
        lost = left != 0
        # A narrow float times a whole number of up to 29 bits is a float64 without a rest.
        if (tl.float64 == ELEMENT) | (factor > _LARGEST_WITHOUT_REST):
            size = tl.abs(product)
            is_known = (size >= _SMALLEST_PRODUCT) & (size <= _LARGEST_PRODUCT)
            is_known = is_known & (tl.abs(element) <= _LARGEST_PRODUCT)
            rest = error_of_product(element, factor, product)
            bits = rest.to(tl.int64, bitcast=True)  # Triton makes a literal -0.0 positive
            bits = tl.where(rest == 0, bits | _SIGN, bits)  # so that a sum of -0.0 stays that
            grown, left = _grown(grown, bits.to(tl.float64, bitcast=True))
            lost = lost | (~is_known & (element != 0)) | (left != 0)

        # Infinities and NaNs stay in the first part, whatever comes.
        is_special = ~(tl.abs(element) < infinity)
        was_special = ~(tl.abs(held[0]) < infinity)
        lost = lost & ~is_special & ~was_special & inside
        num_lost = tl.sum(lost.to(tl.int32), axis=0)
        position = num_lost * 0
        counter = leftovers.to(tl.pointer_type(tl.int32))
        if num_lost > 0:
            position = tl.atomic_add(counter, num_lost)
        fits = position + num_lost <= capacity
        if num_lost > 0:
            if fits:
                listed = (
                    leftovers.to(tl.pointer_type(tl.int64))
                    + 1
                    + position
                    + tl.cumsum(lost.to(tl.int32), 0)
                    - 1
                )
                tl.store(listed, block * BLOCK + columns, mask=lost)
                tl.store(listed + capacity, element.to(tl.int64, bitcast=True), mask=lost)
                tl.store(listed + 2 * capacity, weight.to(tl.int64), mask=lost)
            else:
                tl.store(leftovers.to(tl.pointer_type(tl.int64)) + 1 + 3 * capacity + block, 1)

        written = inside & ~lost & fits
        first = tl.where(is_special, held[0] + product, tl.where(was_special, held[0], grown[0]))
        # Without a mask 16 bytes are written at a time, and parts have whole blocks.
        tl.store(addresses, tl.where(written, first, held[0]))
        for number in tl.static_range(1, NUM_PARTS):
            more = tl.where(is_special | was_special, 0.0, grown[number])
            tl.store(addresses + number * part_elements, tl.where(written, more, held[number]))


@triton.jit
def _grown(parts, left):
    """Adds to all parts in turn; returns the parts, and the remainder that they cannot hold."""
    total = parts[0] + left
    left = error_of(parts[0], left, total)
    grown = (total,)
    for number in tl.static_range(1, len(parts)):
        total = parts[number] + left
        left = error_of(parts[number], left, total)
        grown = grown + (total,)
    return grown, left

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdevice.errors import OptionError
from crossdevice.plans.packing import Item, Packing, Segment

F32 = [Item(size, 4, "f32") for size in (5, 3, 8, 1)]


def ranges(packs):
    return [[tuple(segment) for segment in pack] for pack in packs]


def test_num_packs_cuts_all_values_end_to_end_and_the_last_takes_the_rest():
    assert ranges(Packing(num_packs=3).packs(F32)) == [
        [(0, 0, 5)],
        [(1, 0, 3), (2, 0, 2)],
        [(2, 2, 8), (3, 0, 1)],
    ]


def test_no_packing_reduces_value_by_value():
    assert ranges(Packing().packs(F32)) == [[(0, 0, 5)], [(1, 0, 3)], [(2, 0, 8)], [(3, 0, 1)]]


def test_small_values_that_follow_each_other_share_a_pack():
    packing = Packing(small_max_bytes=24, small_max_group=10)
    assert ranges(packing.packs(F32)) == [[(0, 0, 5), (1, 0, 3)], [(2, 0, 8)], [(3, 0, 1)]]


def test_small_groups_hold_at_most_so_many_values_smaller_than_the_limit():
    packing = Packing(small_max_bytes=8, small_max_group=2)
    items = [Item(1, 4, "f")] * 5 + [Item(2, 4, "f")]
    assert ranges(packing.packs(items)) == [
        [(0, 0, 1), (1, 0, 1)],
        [(2, 0, 1), (3, 0, 1)],
        [(4, 0, 1)],
        [(5, 0, 2)],
    ]


def test_num_packs_comes_before_small_groups_and_bytes_per_pack_before_both():
    packing = Packing(num_packs=1, small_max_bytes=100)
    assert len(packing.packs(F32)) == 1
    assert ranges(packing.packs(F32, bytes_per_pack=16)) == [[(3, 0, 1), (2, 0, 8)], [(1, 0, 3), (0, 0, 5)]]


def test_values_of_different_keys_never_share_a_pack():
    items = [Item(2, 4, "f32"), Item(2, 8, "f64"), Item(2, 4, "f32")]
    assert ranges(Packing(num_packs=1).packs(items)) == [[(0, 0, 2), (2, 0, 2)], [(1, 0, 2)]]


@given(
    sizes=st.lists(st.integers(0, 20), max_size=12),
    keys=st.lists(st.sampled_from("ab"), min_size=12, max_size=12),
    num_packs=st.integers(0, 7),
    small=st.integers(0, 50),
    bytes_per_pack=st.integers(0, 60),
)
def test_every_element_is_in_exactly_one_pack(sizes, keys, num_packs, small, bytes_per_pack):
    items = [Item(size, 4, key) for size, key in zip(sizes, keys, strict=False)]
    packs = Packing(num_packs, small, 3).packs(items, bytes_per_pack)
    for pack in packs:
        assert pack
        assert len({items[segment.item].key for segment in pack}) == 1
    segments = sorted(segment for pack in packs for segment in pack)
    for number, item in enumerate(items):
        own = [segment for segment in segments if segment.item == number]
        assert own, "even an empty value has a place"
        assert own[0].start == 0
        assert own[-1].stop == item.num_elements
        assert all(left.stop == right.start for left, right in itertools.pairwise(own))


@pytest.mark.parametrize("wrong", [-1, 1.5, "a", True])
def test_num_packs_is_a_whole_number_from_zero(wrong):
    with pytest.raises(OptionError, match="num_packs"):
        Packing(wrong)


@pytest.mark.parametrize("field", ["small_max_bytes", "small_max_group"])
@pytest.mark.parametrize("wrong", [-1, 1.5, "64", None, True])
def test_limits_of_small_values_are_whole_numbers_from_zero(field, wrong):
    with pytest.raises(OptionError, match=f"agg_{field.replace('small', 'small_grads')} must be"):
        Packing(**{field: wrong})


def test_numbers_may_be_those_of_numpy():
    assert Packing(np.int64(2), np.uint8(64), np.int32(3)) == Packing(2, 64, 3)


def test_no_items_no_packs():
    assert Packing(3).packs([]) == []
    assert Segment(0, 0, 1) == (0, 0, 1)

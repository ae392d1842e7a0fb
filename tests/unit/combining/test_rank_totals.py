"""Accumulators of several ranks: the same bits whoever has added what."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.combining import between_ranks
from crossdevice.combining.between_ranks import shards_of
from crossdevice.errors import ContextError, MismatchError, OptionError
from crossdevice.testing import run_ranks

SEED = 3
NUM_TREES = 7


def tree_of(number):
    """Values of every kind, among them some that two float64 cannot hold, infinities and NaNs."""
    random = np.random.default_rng((SEED, number))
    wide = (random.standard_normal(40) * 2.0 ** random.integers(-120, 100, 40)).astype(np.float32)
    wide[3] = [np.inf, -np.inf, np.nan][number % 3] if number > 4 else 1.0
    wide[4] = np.inf if number == 1 else -1.0
    wide[5] = -0.0
    return {
        "wide": wide,
        "half": random.standard_normal(700).astype(np.float16),
        "double": random.standard_normal((3, 5)) * 10.0 ** random.integers(-200, 200, (3, 5)),
        "complex": (random.standard_normal(9) + 1j * random.standard_normal(9)).astype(np.complex64),
        "steps": np.array([number, 2 * number]),
        "empty": np.empty(0, np.float32),
    }


def weight_of(number):
    return 1 + 3 * number


def combined(group, assignment, **settings):
    total = cd.Accumulator("exact", **settings)
    for number in range(NUM_TREES):
        if assignment[number] == group.rank:
            total.add(tree_of(number), weight_of(number))
    return {name: leaf.tobytes() for name, leaf in total.mean(group).items()}


def expected(**settings):
    total = cd.Accumulator("exact", **settings)
    for number in range(NUM_TREES):
        total.add(tree_of(number), weight_of(number))
    return {name: leaf.tobytes() for name, leaf in total.mean().items()}


ASSIGNMENTS = {
    1: [0] * 7,
    2: [0, 1, 0, 1, 0, 1, 0],
    3: [2, 2, 2, 1, 1, 1, 1],  # rank 0 has nothing
    4: [3, 0, 2, 1, 1, 0, 3],
    6: [5, 4, 3, 2, 1, 0, 0],
}


@pytest.mark.parametrize("bucket_bytes", [100, 1 << 24])
@pytest.mark.parametrize("size", list(ASSIGNMENTS))
def test_means_have_the_same_bits_on_any_number_of_ranks(monkeypatch, size, bucket_bytes):
    monkeypatch.setattr(between_ranks, "BUCKET_BYTES", bucket_bytes)
    found = run_ranks(size, lambda group: combined(group, ASSIGNMENTS[size]))
    assert all(each == expected() for each in found)


@pytest.mark.parametrize("integers", ["first", "max"])
def test_integers_are_those_of_the_lowest_rank_or_the_largest(integers):
    def run(group):
        total = cd.Accumulator("exact", integers=integers)
        if group.rank:
            total.add(np.array([group.rank, -group.rank]))
        return total.mean(group).tolist()

    assert run_ranks(4, run) == [[1, -1] if integers == "first" else [3, -1]] * 4


def test_leaves_that_some_ranks_lack_are_divided_by_the_weights_of_those_that_have_them():
    def run(group):
        total = cd.Accumulator("exact", partial=True)
        total.add({"all": np.float64([group.rank]), **({"some": np.ones(1)} if group.rank else {})}, 2)
        return total.sum(group)["all"].tolist(), total.mean(group)["some"].tolist()

    assert run_ranks(3, run) == [([6.0], [1.0])] * 3


def test_accumulators_go_on_after_they_were_combined():
    def run(group):
        total = cd.Accumulator("exact")
        total.add(np.float32([group.rank + 1]))
        first = float(total.sum(group)[0])
        total.add(np.float32([10]))
        return first, float(total.sum()[0]), float(total.sum(group)[0])

    assert run_ranks(2, run) == [(3.0, 11.0, 23.0), (3.0, 12.0, 23.0)]


def test_what_ranks_cannot_combine_is_refused_on_all_of_them_and_the_group_stays_usable():
    def run(group):
        total = cd.Accumulator("exact")
        with pytest.raises(ContextError, match="no rank has added anything"):
            total.mean(group)
        total.add({"w": np.zeros(2 + (group.rank == 2))})
        with pytest.raises(MismatchError, match=r"rank 2 .*has shape \(3,\).* have \(2,\)"):
            total.mean(group)
        with pytest.raises(OptionError, match="precision='exact'"):
            cd.Accumulator().mean(group)
        other = cd.Accumulator("exact", integers="max" if group.rank else "first")
        with pytest.raises(MismatchError, match=r"rank 1 .*combines accumulators with.*integers='max'"):
            other.sum(group)
        return float(combined_sum(group))

    def combined_sum(group):
        total = cd.Accumulator("exact")
        total.add(np.ones(1))
        return total.sum(group)[0]

    assert run_ranks(3, run) == [3.0] * 3


def test_every_element_is_in_one_shard_whatever_the_buckets():
    sizes = [5, 0, 1, 33]
    for ranks, bucket_bytes, widths in itertools.product(
        [1, 2, 3, 7], [1, 40, 100, 10_000], [[16] * 4, [16, 24, 16, 48]]
    ):
        seen = [[0] * size for size in sizes]
        for shards in shards_of(sizes, widths, ranks, bucket_bytes):
            assert len(shards) == ranks
            for number, start, stop in itertools.chain(*shards):
                for element in range(start, stop):
                    seen[number][element] += 1
        assert all(count == 1 for counts in seen for count in counts)

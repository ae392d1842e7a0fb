"""What `make soak` would notice, and a moment of it."""

from __future__ import annotations

import random
import sys

import pytest

from soak.loops import work_here
from soak.samples import Sample, drifts, sampled

STEADY = [Sample(number, 100 << 20, 20, 10, 500.0, 700.0) for number in range(60)]


def test_what_stays_as_it_is_is_well():
    assert drifts(STEADY) == []


@pytest.mark.parametrize(
    ("grown", "told"),
    [
        (lambda n: {"memory_bytes": (100 + 3 * n) << 20}, "memory grew from 118.0 to 226.0 MiB"),
        (lambda n: {"descriptors": 20 + n // 4}, "descriptors grew from 21 to 30"),
        (lambda n: {"threads": 10 + n // 5}, "threads grew from 11 to 18"),
        (lambda n: {"calls_per_second": 500.0 - 6 * n}, "calls per second fell from 413.0 to 197.0"),
        (
            lambda n: {"calls_per_processor_second": 500.0 - 5 * n},
            "calls per processor second fell from 427.5 to 247.5",
        ),
    ],
)
def test_what_grows_or_slows_down_is_told(grown, told):
    samples = [each._replace(**grown(number)) for number, each in enumerate(STEADY)]
    assert drifts(samples) == [told]


def test_what_swings_is_well_and_a_leak_below_it_is_told():
    """Groups that were closed may live on until they are collected, more of them late in a run than early."""
    choose = random.Random(1)
    early = [choose.choice((0, 0, 3)) for _ in range(30)]
    late = [1 if number % 6 == 0 else choose.choice((6, 7, 9)) for number in range(30, 60)]
    swings = zip(STEADY, early + late, strict=True)
    swinging = [each._replace(descriptors=30 + swing) for each, swing in swings]
    assert drifts(swinging) == []
    leaking = [
        each._replace(descriptors=each.descriptors + number // 8) for number, each in enumerate(swinging)
    ]
    assert drifts(leaking) == ["descriptors grew from 30 to 36"]


def test_what_grows_only_while_caches_fill_is_well():
    assert drifts([Sample(0, 1 << 20, 1, 1, 1.0, 1.0)] * 6 + STEADY[6:]) == []


@pytest.mark.skipif(sys.platform != "linux", reason="samples are read from /proc")
def test_the_loop_runs_and_is_sampled():
    samples = list(sampled(work_here(1), 1.0, count=2))
    assert len(samples) == 2
    assert all(each.memory_bytes > 1 << 20 and each.calls_per_second > 0 for each in samples)

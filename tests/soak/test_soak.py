"""What `make soak` would notice, and a moment of it."""

from __future__ import annotations

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
        (lambda n: {"memory_bytes": (100 + 3 * n) << 20}, "memory grew from 143.5 to 251.5 MiB"),
        (lambda n: {"descriptors": 20 + n // 4}, "descriptors grew from 23 to 32"),
        (lambda n: {"threads": 10 + n // 5}, "threads grew from 12.5 to 20"),
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


def test_what_grows_only_while_caches_fill_is_well():
    assert drifts([Sample(0, 1 << 20, 1, 1, 1.0, 1.0)] * 6 + STEADY[6:]) == []


@pytest.mark.skipif(sys.platform != "linux", reason="samples are read from /proc")
def test_the_loop_runs_and_is_sampled():
    samples = list(sampled(work_here(1), 1.0, count=2))
    assert len(samples) == 2
    assert all(each.memory_bytes > 1 << 20 and each.calls_per_second > 0 for each in samples)

"""Each kind of machine gets the algorithm that suits it, with the reason."""

from __future__ import annotations

import pytest

import crossdevice as cd
from crossdevice.choosing import choose_algorithm
from crossdevice.errors import OptionError

ROWS = [
    (["cpu:0"], cd.ReductionToOneDevice, "one replica"),
    (["cuda:0"], cd.ReductionToOneDevice, "one replica"),
    (["cpu:0", "cpu:1"], cd.DirectAllReduce, "fused pass"),
    (["cpu:0", "cpu:0"], cd.DirectAllReduce, "fused pass"),
    (["cuda:0", "cuda:1"], cd.NcclAllReduce, "NCCL"),
    (["cuda:0", "cuda:0"], cd.ReductionToOneDevice, "all replicas are on cuda:0"),
    (["cuda:0", "cuda:0", "cuda:1", "cuda:1"], cd.DirectAllReduce, "NCCL refuses"),
    (["cpu:0", "cuda:0"], cd.ReductionToOneDevice, "no collective engine: cpu, cuda"),
    (["tpu:0", "tpu:1"], cd.ReductionToOneDevice, "no collective engine: tpu"),
]


@pytest.mark.parametrize(("names", "kind", "reason"), ROWS, ids=lambda row: str(row))
def test_the_choice_and_its_reason(names, kind, reason, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    choice = choose_algorithm(names)
    assert type(choice.cross_device_ops) is kind
    assert reason in choice.reason


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_where_nccl_does_not_exist_it_is_not_chosen(platform, monkeypatch):
    monkeypatch.setattr("sys.platform", platform)
    choice = choose_algorithm([cd.Device("cuda", 0), cd.Device("cuda", 1)])
    assert type(choice.cross_device_ops) is cd.DirectAllReduce
    assert platform in choice.reason


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"devices": 8}, "expected a list of one device or more; got 8"),
        ({"devices": []}, r"expected a list of one device or more; got \[\]"),
        ({"devices": ["cpu:0"], "num_bytes": 4}, "a choice by cost, which needs a topology too"),
        ({"devices": ["cpu:0"], "measured": "m.json"}, "a choice by cost, which needs a topology too"),
        ({"devices": 2, "topology": "pcie"}, "num_bytes must be a number, 1 or more; got None"),
    ],
)
def test_a_question_that_lacks_something_is_refused(given, said):
    with pytest.raises(OptionError, match=said):
        choose_algorithm(**given)

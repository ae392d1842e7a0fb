"""The backend "crossdevice" of torch.distributed: every collective, and what goes wrong in one."""

from __future__ import annotations

import signal
import sys

import numpy as np
import pytest

from multiprocess import launching

LAUNCH_SECONDS = 240.0

torch = pytest.importorskip("torch")
is_older = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
repeats = pytest.mark.more("a repetition")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="launches are watched through /proc")


def launched(tmp_path, tmp_path_factory, size, script, *words):
    with launching.in_turn(tmp_path_factory.getbasetemp().parent):
        found = launching.launch(
            launching.ranks(script, *words, size=size), tmp_path / "launch", LAUNCH_SECONDS
        )
    assert found.codes == [0] * size, found.output
    assert found.left == []
    return found.reports


def mean_of(size, first, step):
    """The mean of the integers of all ranks, cut off towards zero."""
    total = sum(first + step * rank for rank in range(size))
    return total // size if total >= 0 else -(-total // size)


@pytest.mark.parametrize("size", [pytest.param(2, marks=repeats), 3])
def test_collectives_do_what_those_of_gloo_do(tmp_path, tmp_path_factory, size):
    for facts in launched(tmp_path, tmp_path_factory, size, "backend_rank.py", "calls").values():
        assert facts["backend"] == "crossdevice"
        assert facts["differences"] == []
        if not is_older:
            assert facts["refused by gloo"] == []
        for name, found in facts["own"].pop("large integer means").items():
            limits = torch.iinfo(getattr(torch, name.removeprefix("torch.")))
            expected = [mean_of(size, limits.max, -1), mean_of(size, limits.min, 1)]
            assert found == [expected] * 3, name
        assert facts["own"] == {
            "strided": [0.0 * size, 1.0, 2.0 * size, 3.0, 4.0 * size, 5.0, 6.0 * size, 7.0],
            "uneven": [[float(rank)] * (2 + rank) for rank in range(size)],
            "short": [float(size), {2: 4.0, 3: 6.0}[size]],
            "premultiplied": sum(0.5 * (rank + 1) for rank in range(size)),
            "integer mean": {2: [7, -6], 3: [8, -6]}[size],
            "several": [11.0 * sum(range(1, size + 1))] * 2,
            "inferred": [float(size)] * 2,
            "coalesced": [True] * 3,
        }
        groups = facts["groups"]
        assert groups["mesh"] == "crossdevice"
        assert groups["split"] == size
        assert groups["exact"] == {2: float(np.float32(1e20)), 3: 1.0}[size]
        assert groups["store"]
        assert groups["sequence"] == 1
        assert facts["asynchronous"] == [True, float(size), True, True]
        bounds = {"all_gather_into_tensor": 50, "all_to_all_single": 84, "broadcast": 35, "barrier": 20}
        assert all(facts["entered"][name] < bound for name, bound in bounds.items()), facts["entered"]


def test_errors_are_ours_and_of_the_types_that_pytorch_has(tmp_path, tmp_path_factory):
    reports = launched(tmp_path, tmp_path_factory, 2, "backend_rank.py", "errors")
    for rank, facts in reports.items():
        found = facts["errors"]
        for name, text in (
            ("root", "invalid root rank: 99"),
            ("empty", "non-empty"),
            ("types", "invalid tensor type"),
        ):
            assert "ValueError" in found[name][0]
            assert text in found[name][1]
        assert "ReduceOpError" in found["operation"][0]
        assert {"DtypeError", "RuntimeError"} <= set(found["dtype"][0])
        assert "the tensor has dtype float8_e4m3fnuz, which cannot be reduced by SUM" in found["dtype"][1]
        assert "RuntimeError" in found["sizes"][0]
        assert "ShapeMismatchError" in found["sizes"][0]
        assert "rank 0" in found["sizes"][1]
        assert "rank 1" in found["sizes"][1]
        if rank == 1:
            assert "ValueError" in found["parts"][0]
            assert (
                "this rank keeps 2 elements of the input, and the output has room for 3" in found["parts"][1]
            )
            assert {"ShapeMismatchError", "RuntimeError"} <= set(found["splits"][0])
            assert "rank 0 sends 8 bytes to rank 1, which expects 12" in found["splits"][1]
        if rank == 0:
            assert {"DeadlineError", "TimeoutError", "DistBackendError"} <= set(found["late"][0])
            assert " timeout " in found["late"][1]
            assert "rank 1" in found["late"][1]
        assert "RuntimeError" in found["late, started"][0]
        assert facts["again"] == 2.0


@pytest.mark.parametrize(
    "what", ["killed", *(pytest.param(what, marks=repeats) for what in ("interrupted", "started"))]
)
def test_a_rank_that_breaks_off_is_named_in_time_and_a_new_group_works(what, tmp_path, tmp_path_factory):
    with launching.in_turn(tmp_path_factory.getbasetemp().parent):
        commands = launching.ranks("backend_rank.py", what, size=3)
        outcome = launching.launch(commands, tmp_path / "launch", LAUNCH_SECONDS)
    assert outcome.left == []
    is_killed = what == "killed"
    assert outcome.codes == [0, 0, -signal.SIGKILL if is_killed else 0], outcome.output
    assert len(outcome.reports) == 3 - is_killed
    for rank, facts in outcome.reports.items():
        kinds, text = facts["error"]
        if rank == 2:
            assert kinds[0] == "KeyboardInterrupt"
        else:
            assert {"ProcessGroupError", "RuntimeError"} <= set(kinds), text
            assert "rank 2" in text
        assert facts["seconds"] < launching.LOST_SECONDS
        assert facts["ended"] < launching.LOST_SECONDS
        assert facts["again"] == len(outcome.reports)


@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=repeats) for size in (3, 4))])
def test_programs_train_as_they_do_alone(tmp_path, tmp_path_factory, size):
    for facts in launched(tmp_path, tmp_path_factory, size, "training_rank.py").values():
        assert facts.pop("backend") == "crossdevice"
        assert facts.pop("accelerate") in (True, None)
        for name, kinds in facts.items():
            assert all(kinds.values()), (name, kinds)


@pytest.mark.more("transformers")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_trainer_of_transformers_uses_the_group_there_is(tmp_path, size):
    pytest.importorskip("transformers")
    found = launching.launch(
        launching.torchrun("trainer_rank.py", size=size), tmp_path / "launch", LAUNCH_SECONDS
    )
    assert found.codes == [0], found.output
    reports = list(found.reports.values())
    assert len(reports) == size
    for facts in reports:
        assert facts["backend"] == "crossdevice"
        assert facts["parallel"] == "DistributedDataParallel"
        assert facts["losses"][-1] < 0.5 * facts["losses"][0]
    assert len({facts["digest"] for facts in reports}) == 1

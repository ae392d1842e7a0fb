"""`crossdevice doctor --verify` sees that results are right, and sees a wrong kernel."""

from __future__ import annotations

import contextlib
import json
import threading

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.backends.registry import backend_named
from crossdevice.cli.doctor import command, verification
from crossdevice.cli.doctor.diagnosis import Finding, Gpus
from crossdevice.cli.doctor.verification import first_wrong, random_replicas, right_ranges
from crossdevice.cli.main import main
from crossdevice.kernels.host import fused_pass as entry
from crossdevice.testing import run_ranks
from crossdevice.values.device import host_device
from crossdevice.values.dtypes import COMPLEXES, FLOATS, INTEGERS
from crossdevice.values.reduce_op import ReduceOp

NO_GPUS = Gpus("none", {})
DTYPES = (*FLOATS, *COMPLEXES, *INTEGERS, "bool")


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    """Fewer replica counts and elements, and of the large ones only as many as threads share."""
    monkeypatch.setattr(verification, "REPLICA_COUNTS", (3,))
    monkeypatch.setattr(verification, "NUM_ELEMENTS", 20)
    monkeypatch.setattr(verification, "LARGE_ELEMENTS", 1 << 19)


@pytest.fixture
def two_dtypes(monkeypatch):
    places = verification._places
    monkeypatch.setattr(
        verification,
        "_places",
        lambda gpus: (place._replace(dtypes=("float32", "int16")) for place in places(gpus)),
    )


@pytest.mark.parametrize(
    "dtypes",
    [
        pytest.param(("bfloat16", "float64", "complex64", "int16", "bool"), id="a sample"),
        pytest.param(DTYPES, marks=pytest.mark.more("a repetition"), id="all"),
    ],
)
def test_every_dtype_is_right_on_this_machine(dtypes, monkeypatch):
    """Each compiles kernels of its own, which takes most of the time."""
    (host,) = verification._places(NO_GPUS)
    assert set(host.dtypes) == set(DTYPES)
    monkeypatch.setattr(verification, "_places", lambda gpus: [host._replace(dtypes=dtypes)])
    found = list(verification.verification(NO_GPUS, seconds=300.0))
    assert [each for each in found if not each.is_well] == []
    names = {each.what for each in found}
    assert {f"{dtype} on the host" for dtype in dtypes} < names
    assert "processes" in names
    assert all(each.found.endswith("reductions are right") for each in found[:-2])
    count = len(dtypes)
    assert found[-1] == Finding("summary", f"{count} of {count} dtypes verified on the host")


def test_tensors_go_the_way_of_those_on_gpus():
    pytest.importorskip("torch")
    place = verification.Place("tensors", backend_named("torch"), (host_device(0),), ("bfloat16",))
    assert verification._of_dtype(place, "bfloat16", float("inf")) == Finding(
        "bfloat16 on tensors", "36 reductions are right"
    )
    assert verification._of_large_arrays(place).is_well


@pytest.mark.usefixtures("two_dtypes")
def test_a_wrong_kernel_is_seen_and_named(monkeypatch, capsys):
    right = entry.numpy_pass

    def wrong(inputs, outputs, recipe):
        right(inputs, outputs, recipe)
        if recipe.op is ReduceOp.MAX and len(inputs) == 3 and outputs[0].dtype == np.int16:
            outputs[0][7] += 1

    monkeypatch.setattr(entry, "numpy_pass", wrong)
    entry.select_kernels("numpy")
    try:
        assert main(["doctor", "--verify", "--json"]) == 1
    finally:
        entry.select_kernels(None)
    section = json.loads(capsys.readouterr().out)["sections"][command.SELF_TEST]
    bad = {each["what"]: each["found"] for each in section if not each["is_well"]}
    assert list(bad) == ["int16 on the host"]
    assert "reductions are WRONG: MAX under fast of 3 replicas by " in bad["int16 on the host"]
    assert "in one pass: element 7 is " in bad["int16 on the host"]


@pytest.mark.usefixtures("two_dtypes")
def test_a_reduction_that_raises_is_wrong_too(monkeypatch):
    def broken(*arguments):
        raise RuntimeError("illegal instruction")

    monkeypatch.setattr(cd.TreeAllReduce, "reduce", broken)
    found = list(verification.verification(NO_GPUS))
    assert "RuntimeError: illegal instruction" in next(each for each in found if not each.is_well).found


@pytest.mark.usefixtures("two_dtypes")
def test_what_is_not_reached_in_time_is_not_said_to_be_right():
    found = list(verification.verification(NO_GPUS, seconds=0.0))
    assert found[0].found == "not reached"
    assert found[0].is_well
    assert found[-1].found == "0 of 2 dtypes verified on the host"
    assert [each.what for each in found if each.advice] == ["summary"]


@pytest.mark.usefixtures("two_dtypes")
def test_the_exit_status_tells_whether_all_was_reached(capsys):
    assert main(["doctor", "--verify", "--seconds", "1e-6"]) == command.INCOMPLETE
    said = capsys.readouterr().out
    assert "0 of 2 dtypes verified on the host" in said
    assert said.count("run it again") == 1
    assert main(["doctor", "--verify", "--seconds", "300"]) == 0
    assert "2 of 2 dtypes verified on the host" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["doctor", "--verify", "--seconds", "0"])
    assert "expected more than 0 seconds" in capsys.readouterr().err


def test_one_is_not_spoken_of_as_several():
    assert verification._finding("x", "y", 1, []).found == "1 reduction is right"
    assert verification._finding("x", "y", 1, ["z"]).found == "1 of 1 reduction is WRONG: z"
    assert (
        verification._finding("x", "y", 3, ["z", "w"]).found == "2 of 3 reductions are WRONG: z (and 1 more)"
    )


def test_ranks_verify_together():
    for tried, wrong in run_ranks(2, verification._reduced_together):
        assert tried > 150
        assert wrong == []


def test_all_processes_tell_of_one_that_is_wrong(monkeypatch):
    class Group:
        """A launch of two whose ranks are threads."""

        size = 2

        def __init__(self, group):
            self._group = group

        @contextlib.contextmanager
        def form_group(self, timeout_seconds):
            yield self._group

    def program(group):
        local.group = group
        return verification._of_processes()

    local = threading.local()
    wrong_rank = {0: [], 1: ["MEAN of float16 under exact: element 3 is 1.0, expected 2.0"]}
    monkeypatch.setattr(verification, "cluster_from_env", lambda: Group(local.group))
    monkeypatch.setattr(verification, "_reduced_together", lambda group: (200, list(wrong_rank[group.rank])))
    for other, own in [run_ranks(2, program)]:
        assert not other.is_well
        assert "a result of another process" in other.found
        assert "1 of 200 reductions is WRONG: MEAN of float16" in own.found
    monkeypatch.setattr(verification, "cluster_from_env", lambda: cd.Cluster(0, 2, address="127.0.0.1"))
    monkeypatch.setattr(cd.Cluster, "form_group", lambda *_, **__: 1 / 0)
    assert verification._of_processes() == Finding("processes", "ZeroDivisionError: division by zero", False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_single_wrong_bit_is_seen(dtype):
    op = ReduceOp.MAX if dtype in ("bool", *INTEGERS, *FLOATS) else ReduceOp.SUM
    replicas = random_replicas(np.random.default_rng(1), dtype, op, "exact", 3, 20)
    found = np.array(cd.reduce([array.copy() for array in replicas], op.name))
    right = right_ranges(op, replicas, "exact")
    assert first_wrong(right, found, dtype) is None
    found.view(np.uint8)[17 * found.itemsize] ^= 1
    assert first_wrong(right, found, dtype).startswith("element ")
    assert first_wrong(right, found, "float8") == f"the dtype is {dtype}, expected float8"

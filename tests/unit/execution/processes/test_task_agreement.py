"""A rank that would use another transport, or has other tasks, is refused by all before anything travels."""

import threading

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.errors import MismatchError
from crossdevice.execution.processes import agreement, choice, copied_rows, reduced_batch
from crossdevice.execution.processes.host_reduction import HostReduction
from crossdevice.process_groups.engines.thread_engine import run_ranks

ODD = 1


@pytest.fixture
def refused(monkeypatch):
    """The errors of a reduction on all ranks, none of whom has sent anything of it, and who go on."""

    def run(size):
        ran = []
        usual = HostReduction.run
        monkeypatch.setattr(HostReduction, "run", lambda *args: ran.append(args) or usual(*args))

        def program(group):
            ops = cd.CollectiveAllReduce(group=group)
            texts = []
            for _ in range(2):
                with pytest.raises(MismatchError) as refusal:
                    ops.reduce("sum", np.ones(500), "cpu:0")
                texts.append(str(refusal.value))
            return texts, ops.gather(np.array([group.rank]), "cpu:0", axis=0).tolist()

        errors = []
        for texts, gathered in run_ranks(size, program):
            assert gathered == list(range(size))
            errors.append(texts)
        assert not ran
        assert len({texts[0] for texts in errors}) == 1
        assert [text.partition(":")[2] for text in errors[0]] == [errors[0][0].partition(":")[2]] * 2
        return errors[0][0]

    return run


@pytest.mark.parametrize("size", [2, 3])
def test_another_transport(monkeypatch, refused, size):
    transport_of = choice.transport_of

    def chosen(wanted):
        return choice.Choice("pigeons", {}) if wanted.group.rank == ODD else transport_of(wanted)

    monkeypatch.setattr(choice, "TRANSPORTS", {**choice.TRANSPORTS, "pigeons": choice.TRANSPORTS["messages"]})
    monkeypatch.setattr(choice, "transport_of", chosen)
    text = refused(size)
    assert "would not be the same work on all ranks: rank 1" in text
    assert " has transports pigeons for leaves 0; " in text
    assert text.endswith("have messages for leaves 0" if size > 2 else "has messages for leaves 0")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_other_tasks(monkeypatch, refused, size):
    all_reduce = reduced_batch.all_reduce

    def laid_out(leaves, workers=None, *, seen_by=None, **_):
        workers = (0,) if seen_by == ODD else workers
        return all_reduce(leaves, workers, seen_by=seen_by)

    monkeypatch.setattr(reduced_batch, "all_reduce", laid_out)
    text = refused(size)
    assert "would not be the same work on all ranks: rank 1" in text
    theirs, ours = text.split("; rank 0")
    assert " has task rank 0 makes result 1.0.0[0:500] (float64, of 500) of input 1.0.0[0:500] " in theirs
    assert " has rank 0 makes result 1.0.0[0:" in ours
    assert "[0:500]" not in ours


def gather(ops, group):
    return ops.gather(np.ones(3 + group.rank), "cpu:0", axis=0)


def broadcast(ops, _):
    return ops.broadcast(np.ones(3), ["cpu:0"], from_rank=0)


def all_to_all(ops, _):
    return ops.all_to_all(cd.PerReplica([np.ones(6)]))


def sparse_rows(ops, group):
    rows = cd.IndexedSlices(np.ones((1 + group.rank, 2)), np.arange(1 + group.rank), (4, 2))
    return ops.reduce("sum", cd.PerReplica([rows]), "cpu:0")


COPYING_CALLS = {gather: "gather", broadcast: "broadcast", all_to_all: "all_to_all", sparse_rows: "gather"}
"""Each with the name of its layout."""


def refused_copies(call):
    """The error that a call raises on all ranks, who go on."""

    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        with pytest.raises(MismatchError) as refusal:
            call(ops, group)
        return str(refusal.value), float(ops.reduce("sum", np.ones(()), "cpu:0"))

    answers = run_ranks(2, program)
    assert {total for _, total in answers} == {2}
    (text,) = {text for text, _ in answers}
    assert "would not be the same work on all ranks: rank 1" in text
    return text


@pytest.mark.parametrize("call", COPYING_CALLS)
def test_copies_by_another_transport(monkeypatch, call):
    transport_of = copied_rows.transport_of_copies

    def chosen(wanted):
        return choice.Choice("pigeons", {}) if wanted.group.rank == ODD else transport_of(wanted)

    monkeypatch.setattr(choice, "TRANSPORTS", {**choice.TRANSPORTS, "pigeons": choice.TRANSPORTS["messages"]})
    monkeypatch.setattr(copied_rows, "transport_of_copies", chosen)
    assert "has transports pigeons for leaves 0" in refused_copies(call)


@pytest.mark.parametrize("call", COPYING_CALLS)
def test_copies_of_other_ranges(monkeypatch, call):
    """The odd rank takes the last array to be a byte shorter, in its tasks and in what they mean."""
    name = COPYING_CALLS[call]
    layout, meaning = getattr(copied_rows, name), getattr(copied_rows, f"meaning_of_{name}")

    def shorter(lengths):
        *before, last = lengths
        return (*before, shorter(last) if isinstance(last, tuple) else last - 1)

    def of_own(function):
        def made(num_bytes, *args, **named):
            is_odd = threading.current_thread().name.endswith(f" {ODD}")
            return function(shorter(num_bytes) if is_odd else num_bytes, *args, **named)

        return made

    monkeypatch.setattr(copied_rows, name, of_own(layout))
    monkeypatch.setattr(copied_rows, f"meaning_of_{name}", of_own(meaning))
    assert " has task rank " in refused_copies(call)


@pytest.mark.parametrize("more", [0, 1])
def test_tasks_are_compared_once(monkeypatch, more):
    """Also between ranks with unlike numbers of replicas, which compare every call."""
    compared = []
    usual = agreement.compare_courses

    def noted(call, courses):
        compared.append(call.group.rank)
        usual(call, courses)

    monkeypatch.setattr(agreement, "compare_courses", noted)

    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        value = cd.PerReplica([np.ones(6)] * (1 + more * group.rank))
        for _ in range(4):
            ops.reduce("sum", value, "cpu:0")
            ops.reduce_scatter("sum", value)
            ops.gather(value, "cpu:0", axis=0)

    run_ranks(2, program)
    assert sorted(compared) == [0, 0, 0, 1, 1, 1]

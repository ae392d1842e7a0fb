"""A rank that would use another transport, or has other tasks, is refused by all before anything travels."""

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.errors import MismatchError
from crossdevice.execution.processes import agreement, choice, reduced_batch
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

    def laid_out(leaves, workers=None, *, is_small=False, seen_by=None):
        workers = (0,) if seen_by == ODD else workers
        return all_reduce(leaves, workers, is_small=False, seen_by=seen_by)

    monkeypatch.setattr(reduced_batch, "all_reduce", laid_out)
    text = refused(size)
    assert "would not be the same work on all ranks: rank 1" in text
    theirs, ours = text.split("; rank 0")
    assert " has task rank 0 makes result 1.0.0[0:500] (float64, of 500) of input 1.0.0[0:500] " in theirs
    assert " has rank 0 makes result 1.0.0[0:" in ours
    assert "[0:500]" not in ours


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

    run_ranks(2, program)
    assert sorted(compared) == [0, 0, 1, 1]

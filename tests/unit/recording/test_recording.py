"""Records of bits: what calls get and give, and where two runs part."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.cli.main import main
from crossdevice.errors import FileError
from crossdevice.execution.bound import BoundCall
from crossdevice.recording.bits_file import read_bits
from crossdevice.recording.comparison import compare, read_run
from crossdevice.testing import run_ranks


def arrays(*numbers):
    return cd.PerReplica([{"w": np.full(3, number), "b": np.zeros(1)} for number in numbers])


def recorded(path, program):
    with cd.record_bits(path):
        program()
    return str(path)


def parting(first, second):
    return compare(read_run(str(first)), read_run(str(second))).parting


def test_nothing_is_in_the_way_of_calls_outside_of_a_record(tmp_path):
    before = CrossDeviceOps.reduce, cd.CollectiveAllReduce.reduce, BoundCall.__call__
    with cd.record_bits(tmp_path / "run.bits"):
        assert CrossDeviceOps.reduce is not before[0]
    assert (CrossDeviceOps.reduce, cd.CollectiveAllReduce.reduce, BoundCall.__call__) == before
    cd.mark_bits("nobody records this", object())


def test_a_call_is_one_event_with_each_leaf_before_and_after(tmp_path):
    value = arrays(1.0, 2.0)
    path = recorded(tmp_path / "run.bits", lambda: cd.RingAllReduce().reduce("sum", value, value, out=value))
    (event,) = read_bits(path).events
    assert (event.kind.name, event.kind.rank, event.kind.is_call) == ("reduce SUM", 0, True)
    assert event.kind.inputs == event.kind.results == (("value['b']", 2), ("value['w']", 2))
    digests = [cd.fingerprint({"w": np.full(3, number)}).leaves["value['w']"] for number in (1.0, 2.0, 3.0)]
    found = [digest.hex() for digest in event.digests]
    assert found[2:4] == [digest[:16] for digest in digests[:2]]
    assert found[6:8] == [digests[2][:16]] * 2


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("batch_reduce MEAN", lambda ops, value: ops.batch_reduce("mean", iter([(value, value)]))),
        ("gather", lambda ops, value: ops.gather(value, "cpu:0", 0)),
        ("broadcast", lambda ops, value: ops.broadcast(value.values[0], value)),
        ("reduce_scatter SUM", lambda ops, value: ops.reduce_scatter("sum", value, axis=0)),
        ("all_gather", lambda ops, value: ops.all_gather(value, axis=0)),
        ("all_to_all", lambda ops, value: ops.all_to_all(value, axis=0)),
        ("bound reduce SUM", lambda ops, value: ops.bind("sum", value, value)()),
        ("bound reduce SUM", lambda ops, value: ops.bind("sum", value, value).start().wait()),
        ("start_reduce SUM", lambda ops, value: ops.start_reduce("sum", value, value).wait()),
        ("reduce SUM", lambda _, value: cd.all_reduce(list(value.values))),
    ],
)
def test_every_kind_of_call_is_recorded_once(tmp_path, name, call):
    value = arrays(1.0, 2.0)
    path = recorded(tmp_path / "run.bits", lambda: call(cd.DirectAllReduce(), value))
    (event,) = read_bits(path).events
    assert event.kind.name == name
    assert event.kind.inputs
    assert event.kind.results


def test_a_bound_reduction_reads_its_arrays_in_each_call(tmp_path):
    value = arrays(1.0, 2.0)
    ops = cd.DirectAllReduce()

    def program():
        bound = ops.bind("sum", value, "cpu:0")
        bound()
        value.values[0]["w"][:] = 5
        bound()

    first, second = read_bits(recorded(tmp_path / "run.bits", program)).events
    assert first.kind is second.kind or first.kind == second.kind
    same = [a == b for a, b in zip(first.digests, second.digests, strict=True)]
    assert same == [True, True, False, True, True, False]


class Drifting(cd.CrossDeviceOps):
    """Its results depend on how often it was asked."""

    calls = 0

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        type(self).calls += 1
        return cd.Mirrored([np.float32(self.calls > 3)])


def test_runs_that_are_the_same_are_said_to_be(tmp_path, capsys):
    def program():
        for step in (0.0, 1.0, 2.0):
            cd.DirectAllReduce().reduce("sum", arrays(step, 1.0), "cpu:0")
        cd.mark_bits("the end", {"x": np.ones(2)})

    first, second = (recorded(tmp_path / name, program) for name in ("a.bits", "b.bits"))
    assert main(["bits", first, second]) == 0
    assert capsys.readouterr().out == f"{first} and {second} are the same in all 4 events\n"


def test_it_is_said_whether_the_inputs_or_only_the_result_differ(tmp_path, capsys):
    def program(last):
        for step in (1.0, 2.0, last):
            cd.DirectAllReduce().reduce("sum", arrays(step, 1.0), "cpu:0")

    first, second = (
        recorded(tmp_path / f"{last}.bits", lambda last=last: program(last)) for last in (3.0, 4.0)
    )
    assert main(["bits", first, second]) == 1
    said = capsys.readouterr().out
    assert "part at the 3rd call 'reduce SUM'\n1 of 2 leaves differ: w\nits inputs already differ" in said
    assert "2 events before it are the same" in said

    def drift():
        for _ in range(3):
            Drifting().reduce("sum", cd.PerReplica([1.0, 2.0]), "cpu:0")

    found = parting(*(recorded(tmp_path / name, drift) for name in ("c.bits", "d.bits")))
    assert (found.cause, found.occurrence, found.leaves) == ("result", 1, ["value"])


def test_marks_with_inputs_tell_where_a_difference_is_made(tmp_path):
    def program(noise):
        cd.mark_bits("layer", np.ones(3) + noise, inputs=np.ones(3))
        cd.mark_bits("loss", np.ones(1) + noise)

    first, second = (
        recorded(tmp_path / f"{noise}.bits", lambda noise=noise: program(noise)) for noise in (0, 1)
    )
    assert parting(first, second)[:2] == ("layer", 1)
    assert parting(first, second).cause == "result"


def test_an_event_that_only_one_run_has_is_said_to_be_missing(tmp_path, capsys):
    first = recorded(tmp_path / "a.bits", lambda: [cd.mark_bits("step", 1), cd.mark_bits("step", 2)])
    second = recorded(tmp_path / "b.bits", lambda: cd.mark_bits("step", 1))
    for pair, lacks_it in (((first, second), "second"), ((second, first), "first")):
        assert main(["bits", *pair, "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        assert found["first_difference"]["cause"] == f"missing in the {lacks_it}"
        assert found["first_difference"]["occurrence"] == 2
        assert found["first_difference"]["after"] == ["step", 1]
    assert main(["bits", first, second]) == 1
    assert f"only {first} has it: {second} ended before it" in capsys.readouterr().out


def test_marks_that_only_one_run_has_are_left_out(tmp_path, capsys):
    def program(with_marks):
        for step in (1.0, 2.0):
            if with_marks:
                cd.mark_bits("layer", np.ones(3))
            cd.DirectAllReduce().reduce("sum", arrays(step, 1.0), "cpu:0")

    first, second = (
        recorded(tmp_path / name, lambda has=has: program(has))
        for name, has in (("a.bits", False), ("b.bits", True))
    )
    assert main(["bits", first, second]) == 0
    said = capsys.readouterr().out
    assert "are the same in all 2 events" in said
    assert f"note: only {second} has marks of 1 name, which were left out: 'layer'" in said


def test_replicas_mark_under_their_numbers(tmp_path):
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    path = recorded(tmp_path / "a", lambda: strategy.run(lambda: cd.mark_bits("x", np.ones(1))))
    assert {event.kind.name for event in read_bits(path).events} == {"x in replica 0", "x in replica 1"}


def program_of(bias):
    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        for step in range(3):
            gradient = {
                "w": np.full(4, 1.0 * group.rank + step) + (bias if group.rank == 1 and step == 2 else 0)
            }
            ops.reduce("sum", gradient, "cpu:0")

    return program


def test_the_rank_whose_inputs_differ_is_named(tmp_path, capsys):
    for name, bias in (("a.bits", 0), ("b.bits", 0.5)):
        with cd.record_bits(tmp_path / name):
            run_ranks(3, program_of(bias))
    assert main(["bits", str(tmp_path / "a.bits"), str(tmp_path / "b.bits")]) == 1
    said = capsys.readouterr().out
    assert "part at the 3rd call 'reduce SUM' on rank 1\n1 of 1 leaf differs: w\nits inputs already" in said


def test_a_call_that_one_run_lacks_does_not_hide_what_differs_on_one_rank(tmp_path, capsys):
    def program(bias, is_whole):
        def of_rank(group):
            ops = cd.CollectiveAllReduce(group=group)
            ops.reduce("max", np.float32([3 - group.rank + bias * group.rank]), "cpu:0")
            if is_whole:
                ops.reduce("mean", np.ones(2), "cpu:0")

        return of_rank

    words = [str(tmp_path / name) for name in ("a.bits", "b.bits")]
    for path, bias in zip(words, (0, 0.5), strict=True):
        with cd.record_bits(path):
            run_ranks(2, program(bias, is_whole=not bias))
    assert main(["bits", *words]) == 1
    assert "part at the 1st call 'reduce MAX' on rank 1\n" in capsys.readouterr().out


@pytest.mark.parametrize("last", [12.0, 24.0])
def test_runs_with_other_numbers_of_ranks_are_compared_by_name(tmp_path, last):
    """Each rank brings its share, so that only sums are alike."""

    def program(total):
        def of_rank(group):
            ops = cd.CollectiveAllReduce(group=group)
            for step in (12.0, 6.0, total):
                share = 2 * (group.rank + 1) / (group.size * (group.size + 1))
                ops.reduce("sum", {"w": np.full(4, step * share)}, "cpu:0")

        return of_rank

    for name, size, total in (("a.bits", 2, 12.0), ("b.bits", 3, last)):
        with cd.record_bits(tmp_path / name):
            run_ranks(size, program(total))
    found = compare(read_run(str(tmp_path / "a.bits")), read_run(str(tmp_path / "b.bits")))
    assert found.by_name
    if last == 12.0:
        assert (found.parting, found.num_same) == (None, 3)
    else:
        assert found.parting[:3] == ("reduce SUM", 3, True)
        assert (found.parting.leaves, found.parting.cause) == (["value['w']"], "value")


def test_marks_of_replicas_count_by_name_where_all_replicas_hold_the_same(tmp_path):
    """Shares of two replicas and of three have nothing in common."""

    def train(path, num_replicas, noise=0.0):
        strategy = cd.MirroredStrategy([f"cpu:{k}" for k in range(num_replicas)])

        def step(weights):
            replica = cd.get_replica_context().replica_id_in_sync_group
            share = weights * 2 * (replica + 1) / (num_replicas * (num_replicas + 1))
            cd.mark_bits("share", share)
            cd.mark_bits("weights", {"w": weights})
            return share

        weights = np.full(4, 12.0)
        with cd.record_bits(path):
            for number in range(3):
                shares = strategy.run(step, args=(weights,))
                weights = np.asarray(strategy.reduce("sum", shares, axis=None)) + noise * (number == 1)
        return read_run(str(path))

    two = train(tmp_path / "a", 2)
    same = compare(two, train(tmp_path / "b", 3))
    assert same.by_name
    assert (same.parting, same.left_out) == (None, ([], []))
    found = compare(two, train(tmp_path / "c", 3, noise=1.0)).parting
    assert found[:3] == ("weights", 3, False)
    assert found.leaves == ["value['w']"]


def test_events_that_no_two_ranks_hold_alike_do_not_count_as_the_same(tmp_path, capsys):
    def program(with_sum):
        def of_rank(group):
            ops = cd.CollectiveAllReduce(group=group)
            data = np.arange(6.0) + 10 * group.rank
            for _ in range(2):
                ops.all_to_all(data)
            if with_sum:
                ops.reduce("sum", {"w": data}, "cpu:0")

        return of_rank

    words = ["bits", str(tmp_path / "a.bits"), str(tmp_path / "b.bits")]
    for with_sum, status in ((True, 1), (False, 2)):
        for path, size in zip(words[1:], (2, 3), strict=True):
            with cd.record_bits(path):
                run_ranks(size, program(with_sum))
        assert main(words) == status
        shown = capsys.readouterr()
        if with_sum:
            assert "part at the 1st call 'reduce SUM'" in shown.out
            assert "no event comes before it" in shown.out
        else:
            assert "nothing can be compared: one run has 2 ranks, the other 3 ranks" in shown.err


@pytest.mark.parametrize("sizes", [(1, 2), (2, 3)])
def test_a_result_is_not_blamed_where_ranks_bring_different_inputs(tmp_path, capsys, sizes):
    """What one rank brings, or some leaves are alike, says nothing of what all bring."""

    def program(group):
        ops = cd.CollectiveAllReduce(group=group)
        ops.reduce("mean", {"w": np.full(4, 1.0 + group.rank), "b": np.zeros(4)}, "cpu:0")

    for name, size in zip(("a.bits", "b.bits"), sizes, strict=True):
        with cd.record_bits(tmp_path / name):
            run_ranks(size, program)
    assert main(["bits", str(tmp_path / "a.bits"), str(tmp_path / "b.bits")]) == 1
    said = capsys.readouterr().out
    assert "part at the 1st call 'reduce MEAN'\n1 of 2 leaves differ: w\n" in said
    assert "what it was made from is not recorded, or not the same on all ranks" in said


def test_every_rank_of_a_launch_writes_a_file_of_its_own(tmp_path, monkeypatch):
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        recorded(tmp_path / "run.bits", lambda rank=rank: cd.mark_bits("step", rank))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.rank0.bits", "run.rank1.bits"]
    assert sorted(read_run(str(tmp_path / "run.bits")).ranks) == [0, 1]
    assert sorted(read_run(str(tmp_path)).ranks) == [0, 1]
    assert sorted(read_run(str(tmp_path / "*1.bits")).ranks) == [1]


def test_files_that_are_not_of_one_run_are_refused(tmp_path, monkeypatch):
    recorded(tmp_path / "run.bits", lambda: cd.mark_bits("step", 1))
    for rank, size in ((0, 2), (1, 2), (2, 3)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(size))
        recorded(tmp_path / "run.bits", lambda: cd.mark_bits("step", 1))
    with pytest.raises(FileError, match=r"run\.bits and .*run\.rank0\.bits are of two runs"):
        read_run(str(tmp_path / "run.bits"))
    (tmp_path / "run.bits").unlink()
    with pytest.raises(FileError, match=r"rank2\.bits is of a run of 3 processes, .* of one of 2"):
        read_run(str(tmp_path / "run.bits"))


def test_a_rank_whose_file_is_missing_is_named_and_what_it_brought_is_not_guessed(
    tmp_path, monkeypatch, capsys
):
    for run, ranks, last in (("a.bits", (0, 1), 2.0), ("b.bits", (0,), 3.0)):
        for rank in ranks:
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", "2")
            recorded(
                tmp_path / run, lambda last=last: cd.mark_bits("sum", np.ones(1) * last, inputs=np.ones(1))
            )
    assert main(["bits", str(tmp_path / "a.bits"), str(tmp_path / "b.bits")]) == 1
    said = capsys.readouterr().out
    assert "its inputs are the same on the ranks that were compared; another may have brought others" in said
    assert "b.bits has no file of rank 1 of its 2" in said


def test_a_record_without_events_is_an_error_and_not_a_run_that_is_the_same(tmp_path, capsys):
    path = recorded(tmp_path / "a.bits", lambda: None)
    assert main(["bits", path, path]) == 2
    assert "a.bits has no events" in capsys.readouterr().err


def test_a_file_is_written_by_one_record_at_a_time(tmp_path):
    path = tmp_path / "run.bits"
    with cd.record_bits(path):
        cd.mark_bits("step", 1)
        with pytest.raises(FileError, match="is being written by another process"), cd.record_bits(path):
            pass
    assert len(read_bits(path).events) == 1


def test_what_was_forked_leaves_the_file_to_its_parent(tmp_path):
    # A program of its own: beside threads of other libraries, forks are warned of.
    program = (
        "import os, signal, sys, crossdevice as cd\n"
        "with cd.record_bits(sys.argv[1]):\n"
        "    cd.mark_bits('step', 1)\n"
        "    reader, writer = os.pipe()\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        os.write(writer, b'.')\n"
        "        signal.pause()\n"
        "os.read(reader, 1)\n"
        "try:\n"
        "    with cd.record_bits(sys.argv[1]): cd.mark_bits('step', 2)\n"
        "finally:\n"
        "    os.kill(child, signal.SIGKILL)\n"
    )
    path = tmp_path / "run.bits"
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)
    assert len(read_bits(path).events) == 1


def test_a_record_that_cannot_go_on_does_not_stop_the_program(tmp_path, caplog, monkeypatch):
    with cd.record_bits(tmp_path / "run.bits"):
        cd.mark_bits("step", 1)

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            cd.mark_bits("step", 2)
        cd.mark_bits("step", 3)
    assert len(read_bits(tmp_path / "run.bits").events) == 1
    assert "ends here, it cannot be written: No space left" in caplog.text


def test_what_is_whole_of_a_file_that_was_cut_is_read(tmp_path, capsys):
    path = recorded(tmp_path / "a.bits", lambda: [cd.mark_bits("step", number) for number in range(5)])
    whole = (tmp_path / "a.bits").read_bytes()
    numbers = set()
    for length in range(20, len(whole) + 1):
        (tmp_path / "b.bits").write_bytes(whole[:length])
        found = read_bits(tmp_path / "b.bits")
        numbers.add(len(found.events))
    assert numbers == set(range(6))
    assert not found.is_cut
    (tmp_path / "b.bits").write_bytes(whole[:-3])
    assert main(["bits", path, str(tmp_path / "b.bits")]) == 1
    assert "the end of" in capsys.readouterr().out
    (tmp_path / "b.bits").write_bytes(whole + bytes(100))
    assert read_bits(tmp_path / "b.bits").is_cut
    (tmp_path / "b.bits").write_bytes(whole[:-30] + b"xxx" + whole[-27:])
    assert main(["bits", path, str(tmp_path / "b.bits")]) == 2
    assert "is damaged after" in capsys.readouterr().err


def test_what_is_no_record_is_refused(tmp_path, capsys):
    (tmp_path / "text").write_text("some text")
    with pytest.raises(FileError, match=r"is not a file of crossdevice\.record_bits"):
        read_run(str(tmp_path / "text"))
    assert main(["bits", str(tmp_path / "none.bits"), str(tmp_path / "text")]) == 2
    assert "is neither a file nor a folder of a recorded run" in capsys.readouterr().err
    with pytest.raises(FileError, match="cannot be written"), cd.record_bits(tmp_path / "no" / "run.bits"):
        pass


def test_a_record_is_not_written_to_a_device_or_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # whose reader would be waited for
    for path in ("/dev/null", tmp_path / "pipe"):
        with pytest.raises(FileError, match="cannot be"), cd.record_bits(path):
            pass


def test_a_variable_records_a_whole_process_also_one_that_is_killed(tmp_path):
    program = (
        "import os, signal, numpy as np, crossdevice as cd\n"
        "for step in range(3): cd.all_reduce([np.ones(3), np.full(3, step / 2)])\n"
        "if os.fork() == 0: cd.mark_bits('of a fork', 1); os._exit(0)\n"
        "os.wait()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    variables = {**os.environ, "CROSSDEVICE_RECORD_BITS": str(tmp_path / "run.bits")}
    subprocess.run([sys.executable, "-c", program], env=variables, check=False)
    events = read_bits(tmp_path / "run.bits").events
    assert [event.kind.name for event in events] == ["reduce SUM"] * 3


def test_a_launcher_that_calls_nothing_writes_no_file(tmp_path):
    variables = {**os.environ, "CROSSDEVICE_RECORD_BITS": str(tmp_path / "run.bits")}
    subprocess.run([sys.executable, "-c", "import crossdevice"], env=variables, check=True)
    assert list(tmp_path.iterdir()) == []
    variables["CROSSDEVICE_RECORD_BITS"] = str(tmp_path / "none" / "run.bits")
    program = [sys.executable, "-c", "import crossdevice"]
    ended = subprocess.run(program, env=variables, capture_output=True, text=True, check=False)
    assert "expected a file in a folder that can be written to" in ended.stderr


def test_values_that_cannot_be_digested_do_not_stop_the_program(tmp_path, caplog):
    value = cd.PerReplica([np.array(["a"], object), np.array(["b"], object)])
    recorded(tmp_path / "run.bits", lambda: cd.DirectAllReduce().gather(value, "cpu:0", 0))
    (event,) = read_bits(tmp_path / "run.bits").events
    assert event.kind.inputs == ()
    assert "a value was not recorded" in caplog.text

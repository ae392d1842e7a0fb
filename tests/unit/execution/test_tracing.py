"""What is recorded always, and what a trace file holds."""

import json
import os
import time

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.execution import tracing

STEPWISE = cd.CommunicationOptions(lowering="off")


def value_on(count, size=64):
    return cd.PerReplica([np.full(size, float(i), np.float32) for i in range(count)])


def traced(tmp_path, call):
    path = tmp_path / "run.json"
    with cd.trace(path):
        call()
    return json.loads(path.read_text())["traceEvents"]


def rows_of(events):
    """The name of each row's device."""
    return {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}


@pytest.mark.parametrize("options", [STEPWISE, cd.CommunicationOptions()], ids=["stepwise", "fused"])
def test_there_is_one_row_per_device_with_complete_events(tmp_path, options):
    value = value_on(4)
    events = traced(tmp_path, lambda: cd.RingAllReduce().reduce("sum", value, value, options))
    assert sorted(rows_of(events).values()) == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in spans} == set(rows_of(events))
    for event in spans:
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert event["pid"] == os.getpid()
        assert event["cat"] in ("queue", "pack", "reduce", "copy", "unpack")
        assert set(event["args"]) == {"bytes", "plan"}


def test_steps_have_all_phases_and_each_copy_an_arrow_between_two_rows(tmp_path):
    value = value_on(4)
    events = traced(tmp_path, lambda: cd.RingAllReduce().reduce("sum", value, value, STEPWISE))
    assert {event["cat"] for event in events if event["ph"] == "X"} == {
        "queue",
        "pack",
        "reduce",
        "copy",
        "unpack",
    }
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 2 * 4 * 3, "2 (N - 1) copies on each of N devices"
    for number, start in starts.items():
        assert start["tid"] != ends[number]["tid"]
        enclosing = [e for e in events if e["ph"] == "X" and e["tid"] == start["tid"] and e["cat"] == "copy"]
        assert any(e["ts"] <= start["ts"] <= e["ts"] + e["dur"] for e in enclosing)


def test_a_batch_of_fused_passes_shows_its_phases(tmp_path):
    pairs = [(value_on(2), "cpu:0"), (value_on(2, 10), "cpu:1")]
    events = traced(tmp_path, lambda: cd.DirectAllReduce().batch_reduce("mean", pairs))
    assert {event["cat"] for event in events if event["ph"] == "X"} == {"queue", "pack", "reduce", "unpack"}


def test_slices_of_a_row_nest(tmp_path):
    value = value_on(3)
    events = traced(tmp_path, lambda: cd.TreeAllReduce().reduce("sum", value, value, STEPWISE))
    for row in rows_of(events):
        spans = sorted(
            ((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == row),
            key=lambda span: (span[0], -span[1]),
        )
        open_ends = []
        for start, stop in spans:
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or stop <= open_ends[-1] + 1e-6
            open_ends.append(stop)


def test_the_recorder_is_always_on_and_bounded():
    value = value_on(2)
    ops = cd.RingAllReduce()
    for _ in range(tracing.MAX_RECORDED + 10):
        ops.reduce("sum", value, value)
    record = cd.flight_record()
    assert len(record) == tracing.MAX_RECORDED
    last = record[-1]
    assert (last.phase, last.what, last.num_bytes) == ("reduce", "RingAllReduce SUM", 256)
    assert last.devices == value.devices
    assert last.seconds > 0
    assert last.plan == "accurate, 1 fused, 0 step by step"


def test_broadcasts_and_gathers_are_recorded_too():
    cd.RingAllReduce().broadcast(np.ones(3), value_on(2))
    cd.RingAllReduce().gather(value_on(2), "cpu:5")
    assert [(record.phase, record.what) for record in cd.flight_record()[-2:]] == [
        ("copy", "broadcast"),
        ("copy", "gather"),
    ]


def test_traces_nest_and_end_in_the_record(tmp_path):
    value = value_on(2)
    with cd.trace(tmp_path / "outer.json"):
        with cd.trace(tmp_path / "inner.json"):
            cd.RingAllReduce().reduce("sum", value, value)
        cd.TreeAllReduce().reduce("sum", value, value)
    inner, outer = ((tmp_path / name).read_text() for name in ("inner.json", "outer.json"))
    assert "RingAllReduce" in inner
    assert "TreeAllReduce" not in inner
    assert "RingAllReduce" in outer
    assert "TreeAllReduce" in outer
    assert cd.flight_record()[-1].what == "TreeAllReduce SUM"


class Broken(Exception):
    pass


def fail(*_):
    raise Broken("no more memory")


def test_an_error_that_escapes_leaves_a_file_and_a_note(tmp_path, monkeypatch):
    value = value_on(2)
    monkeypatch.setenv(tracing.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr("crossdevice.execution.stepped_packs.execute", fail)
    with pytest.raises(Broken) as caught:
        cd.RingAllReduce().reduce("sum", value, value, STEPWISE)
    (path,) = tmp_path.glob("crossdevice-*.json")
    assert "RingAllReduce SUM" in path.read_text()
    if hasattr(caught.value, "__notes__"):
        assert str(path) in caught.value.__notes__[0]


def test_a_deadline_that_passes_leaves_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv(tracing.FOLDER_VARIABLE, str(tmp_path / "new"))
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(TimeoutError):
        strategy.run(lambda: time.sleep(0.3), options=cd.CommunicationOptions(timeout_seconds=0.05))
    assert len(list((tmp_path / "new").glob("crossdevice-*.json"))) == 1


def test_a_folder_that_cannot_be_written_does_not_hide_the_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(tracing.FOLDER_VARIABLE, str(tmp_path / "file"))
    monkeypatch.setattr("crossdevice.execution.stepped_packs.execute", fail)
    with pytest.raises(Broken):
        cd.RingAllReduce().reduce("sum", value_on(2), "cpu:0", STEPWISE)


def test_without_a_folder_nothing_is_written_and_a_trace_is_written_all_the_same(tmp_path, monkeypatch):
    monkeypatch.delenv(tracing.FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr("crossdevice.execution.stepped_packs.execute", fail)
    value = value_on(2)
    with pytest.raises(Broken), cd.trace(tmp_path / "run.json"):
        cd.RingAllReduce().reduce("sum", value, value, STEPWISE)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_the_perfetto_trace_processor_reads_a_trace(tmp_path):
    processor = pytest.importorskip(
        "perfetto.trace_processor", reason="the perfetto package is not installed"
    )
    value = value_on(4)
    path = tmp_path / "run.json"
    with cd.trace(path):
        cd.RingAllReduce().reduce("sum", value, value, STEPWISE)
    try:
        reader = processor.TraceProcessor(trace=str(path))
    except Exception as error:  # its program is fetched over the network when first used
        pytest.skip(f"perfetto's trace processor does not start here: {error}")
    try:
        flows = next(iter(reader.query("select count(*) as n from flow"))).n
        rows = {row.name for row in reader.query("select name from thread where name like 'cpu:%'")}
    finally:
        reader.close()
    assert flows == 24
    assert rows == {"cpu:0", "cpu:1", "cpu:2", "cpu:3"}

"""What is recorded always, and what a trace file holds."""

import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import crossdevice as cd
from crossdevice import runtime
from crossdevice.errors import FileError
from crossdevice.execution import tracing
from crossdevice.execution.local.copied_ranges import MIN_PASS_BYTES

QUERY_TRACE = Path(__file__).parents[2] / "perfetto" / "query_trace.mjs"

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


def slices_on(count):
    return cd.PerReplica(
        [cd.IndexedSlices(np.ones((2, 3), np.float32), np.array([k, k + 1]), (9, 3)) for k in range(count)]
    )


def calls_of_each_kind():
    value, ops = value_on(4), cd.RingAllReduce()
    return {
        "stepwise": lambda: ops.reduce("sum", value, value, STEPWISE),
        "fused": lambda: ops.reduce("sum", value, value),
        "batch": lambda: ops.batch_reduce("mean", [(value, value), (value_on(4, 10), value)]),
        "sparse sum": lambda: ops.reduce("sum", slices_on(4), value),
        "sparse mean": lambda: ops.reduce("mean", slices_on(4), value),
        "gather": lambda: ops.gather(value, value),
        "broadcast": lambda: ops.broadcast(value.values[3], value),
        "broadcast into out": lambda: ops.broadcast(np.ones(64, np.float32), value, out=value_on(4)),
        "broadcast, shared": lambda: ops.broadcast(
            np.ones(64), value, options=cd.CommunicationOptions(share_results=True)
        ),
        "broadcast of slices": lambda: ops.broadcast(slices_on(1).values[0], value),
        "accumulation_fn": lambda: cd.ReductionToOneDevice("cpu:0", sum).reduce("sum", value, value),
    }


KINDS = tuple(calls_of_each_kind())

ALLOWED = {
    "M": {"ph", "pid", "tid", "name", "args"},
    "X": {"ph", "pid", "tid", "ts", "dur", "name", "cat", "args"},
    "s": {"ph", "pid", "tid", "ts", "name", "cat", "id"},
    "f": {"ph", "pid", "tid", "ts", "name", "cat", "id", "bp"},
}
"""Keys that the trace event format has for each phase, all of them needed but a process' thread."""


def check_is_chrome_trace(events):
    """All that the trace event format asks for, and what Perfetto drops if it is otherwise."""
    for event in events:
        assert event.keys() == ALLOWED[event["ph"]] - (set() if "tid" in event else {"tid"})
        assert event["pid"] == os.getpid()
        assert isinstance(event.get("tid", 1), int)
        assert isinstance(event["name"], str)
    kinds = [(e["name"], e.get("tid")) for e in events if e["ph"] == "M"]
    assert len(kinds) == len(set(kinds)), "one name for each row"
    assert {name for name, _ in kinds} == {"process_name", "thread_name", "thread_sort_index"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in spans} == set(rows_of(events))
    for event in spans:
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert event["cat"] in ("queue", "pack", "reduce", "copy", "unpack")
        assert event["args"].keys() == {"bytes", "plan"}
    for row in rows_of(events):
        check_nesting([event for event in spans if event["tid"] == row])
    check_arrows(events, spans)


def check_nesting(spans):
    """A slice that ends inside another one that began before it is dropped."""
    open_ends = []
    for start, stop in sorted(map(nanoseconds, spans), key=lambda span: (span[0], -span[1])):
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or stop <= open_ends[-1]
        open_ends.append(stop)


def nanoseconds(span):
    """Start and stop as Perfetto reads them: in whole nanoseconds, each."""
    start, length = span["ts"] * 1000, span["dur"] * 1000
    assert abs(start - round(start)) < 1e-3
    assert abs(length - round(length)) < 1e-3
    return round(start), round(start) + round(length)


def check_arrows(events, spans):
    """Each arrow has one start and one end, in slices of two rows."""
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(starts) + len(ends) == sum(event["ph"] in "sf" for event in events)
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        end = ends[number]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        assert end["bp"] == "e", "otherwise the arrow ends at the next slice, not at the one around it"
        assert start["ts"] <= end["ts"]
        assert start["tid"] != end["tid"]
        for event in (start, end):
            assert any(
                e["tid"] == event["tid"] and e["ts"] <= event["ts"] <= e["ts"] + e["dur"] for e in spans
            )


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_runs_there_is_one_row_per_device_of_well_formed_events(tmp_path, kind):
    events = traced(tmp_path, calls_of_each_kind()[kind])
    assert sorted(rows_of(events).values()) == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    check_is_chrome_trace(events)


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
    arrows = [event for event in events if event["ph"] == "s"]
    assert len(arrows) == 2 * 4 * 3, "2 (N - 1) copies on each of N devices"


def test_a_batch_of_fused_passes_shows_its_phases(tmp_path):
    pairs = [(value_on(2), "cpu:0"), (value_on(2, 10), "cpu:1")]
    events = traced(tmp_path, lambda: cd.DirectAllReduce().batch_reduce("mean", pairs))
    assert {event["cat"] for event in events if event["ph"] == "X"} == {"queue", "pack", "reduce", "unpack"}


def test_work_of_several_threads_at_once_gets_rows_of_its_own(tmp_path):
    work = tracing.Work("reduce", "x", (cd.Device.parse("cpu:0"),))
    tracing.write_trace(
        tmp_path / "run.json", [(work, 0.0, 2.0, 1), (work, 1.0, 3.0, 1), (work, 1.2, 1.5, 1)]
    )
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    check_is_chrome_trace(events)
    assert list(rows_of(events).values()) == ["cpu:0", "cpu:0"]
    assert sum(event["ph"] == "X" for event in events) == 3


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


def recorded_by(call):
    """What a call adds to the record."""
    tracing.flight_recorder.kept.clear()
    call()
    return cd.flight_record()


ONE = 64 * 4
"""Bytes of one replica's value."""

ROWS = 2 * 3 * 4 + 2 * 8
"""Bytes of one replica's slices: values and indices."""


@pytest.mark.parametrize(
    ("kind", "what", "num_bytes"),
    [
        ("sparse sum", "IndexedSlices SUM", 4 * ROWS),
        ("sparse mean", "IndexedSlices MEAN", 4 * ROWS),
        ("gather", "gather", 4 * ONE),
        ("broadcast", "broadcast", ONE),
        ("broadcast into out", "broadcast into out", ONE),
        ("broadcast, shared", "broadcast, shared", 2 * ONE),
        ("broadcast of slices", "broadcast", ROWS),
        ("accumulation_fn", "accumulation_fn SUM", ONE),
    ],
)
def test_not_only_dense_reductions_are_recorded(kind, what, num_bytes):
    record = recorded_by(calls_of_each_kind()[kind])
    assert (record[0].phase, record[0].what) == ("queue", "read and check")
    whole = record[-1]
    assert (whole.what, whole.num_bytes) == (what, num_bytes)
    assert set(whole.devices) == set(value_on(4).devices)
    for part in record[1:-1]:
        assert whole.started_seconds <= part.started_seconds
        assert part.started_seconds + part.seconds <= whole.started_seconds + whole.seconds


def test_a_sparse_reduction_has_all_phases():
    record = recorded_by(calls_of_each_kind()["sparse mean"])
    assert {entry.phase for entry in record} == {"queue", "pack", "reduce", "copy", "unpack"}


def transfers_of(events):
    """From which device to which, for each arrow."""
    rows = rows_of(events)
    ends = {event["id"]: rows[event["tid"]] for event in events if event["ph"] == "f"}
    return sorted((rows[event["tid"]], ends[event["id"]]) for event in events if event["ph"] == "s")


def test_a_broadcast_has_an_arrow_to_each_other_device_unless_memory_is_shared(tmp_path):
    kinds = calls_of_each_kind()
    arrows = [("cpu:0", f"cpu:{k}") for k in (1, 2, 3)]
    for kind, expected in (("broadcast into out", arrows), ("broadcast, shared", [])):
        assert transfers_of(traced(tmp_path, kinds[kind])) == expected
    large, ops = np.ones(MIN_PASS_BYTES, np.uint8), cd.RingAllReduce()
    assert transfers_of(traced(tmp_path, lambda: ops.broadcast(large, value_on(4)))) == arrows


@pytest.mark.parametrize("kind", ["gather", "sparse sum"])
def test_where_memories_are_apart_every_array_that_is_brought_has_an_arrow(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(
        "crossdevice.backends.numpy_backend.NumpyBackend.memory_of", lambda _, device: str(device)
    )
    calls = {
        "gather": lambda: cd.RingAllReduce().gather(value_on(4), "cpu:2"),
        "sparse sum": lambda: cd.RingAllReduce().reduce("sum", slices_on(4), "cpu:2"),
    }
    events = traced(tmp_path, calls[kind])
    check_is_chrome_trace(events)
    assert transfers_of(events) == [(f"cpu:{k}", "cpu:2") for k in (0, 1, 3)]


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


def test_a_trace_that_cannot_be_written_is_refused_before_the_work(tmp_path):
    reached = []
    with (
        pytest.raises(FileError, match=r"run\.json cannot be written"),
        cd.trace(tmp_path / "no" / "run.json"),
    ):
        reached.append(True)
    assert not reached


def test_a_trace_for_which_there_is_no_room_is_an_error_that_names_it():
    with pytest.raises(FileError, match="/dev/full cannot be written: No space left"), cd.trace("/dev/full"):
        cd.all_reduce([np.ones(2), np.ones(2)])


class Broken(Exception):
    pass


def fail(*_):
    raise Broken("no more memory")


def test_an_error_that_escapes_leaves_a_file_and_a_note(tmp_path, monkeypatch):
    value = value_on(2)
    monkeypatch.setenv(runtime.FLIGHT_RECORDER.variable, str(tmp_path))
    monkeypatch.setattr("crossdevice.execution.local.stepped_packs.execute", fail)
    with pytest.raises(Broken) as caught:
        cd.RingAllReduce().reduce("sum", value, value, STEPWISE)
    (path,) = tmp_path.glob("crossdevice-*.json")
    assert "RingAllReduce SUM" in path.read_text()
    if hasattr(caught.value, "__notes__"):
        assert str(path) in caught.value.__notes__[0]


def test_a_deadline_that_passes_leaves_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv(runtime.FLIGHT_RECORDER.variable, str(tmp_path / "new"))
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(TimeoutError):
        strategy.run(lambda: time.sleep(0.3), options=cd.CommunicationOptions(timeout_seconds=0.05))
    assert len(list((tmp_path / "new").glob("crossdevice-*.json"))) == 1


def test_a_folder_that_cannot_be_written_does_not_hide_the_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(runtime.FLIGHT_RECORDER.variable, str(tmp_path / "file"))
    monkeypatch.setattr("crossdevice.execution.local.stepped_packs.execute", fail)
    with pytest.raises(Broken):
        cd.RingAllReduce().reduce("sum", value_on(2), "cpu:0", STEPWISE)


def test_without_a_folder_nothing_is_written_and_a_trace_is_written_all_the_same(tmp_path, monkeypatch):
    monkeypatch.delenv(runtime.FLIGHT_RECORDER.variable, raising=False)
    monkeypatch.setattr("crossdevice.execution.local.stepped_packs.execute", fail)
    value = value_on(2)
    with pytest.raises(Broken), cd.trace(tmp_path / "run.json"):
        cd.RingAllReduce().reduce("sum", value, value, STEPWISE)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def asked_of_perfetto(path, *queries):
    """The rows of each query, from Perfetto's own trace processor."""
    processor, node = Path(sys.prefix) / "trace-processor", shutil.which("node")
    if not processor.is_dir() or node is None:
        pytest.skip("needs Node.js, and what python tests/perfetto/install_trace_processor.py installs")
    words = [node, str(QUERY_TRACE), str(processor), str(path), *queries]
    answer = subprocess.run(words, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def test_perfetto_reads_every_event_of_a_trace(tmp_path):
    events = traced(tmp_path, lambda: [call() for call in calls_of_each_kind().values()])
    slices, flows, rows, faults = asked_of_perfetto(
        tmp_path / "run.json",
        "select category, slice.name, thread.name, extract_arg(slice.arg_set_id, 'args.bytes') from slice"
        " join thread_track on slice.track_id = thread_track.id join thread using (utid)",
        "select a.name, b.name from flow join slice a on slice_out = a.id join slice b on slice_in = b.id",
        "select name from thread where name like 'cpu:%' order by name",
        "select name, value from stats where severity != 'info' and value > 0",
    )
    assert faults == []
    assert rows == [["cpu:0"], ["cpu:1"], ["cpu:2"], ["cpu:3"]]
    names = rows_of(events)
    written = [[e["cat"], e["name"], names[e["tid"]], e["args"]["bytes"]] for e in events if e["ph"] == "X"]
    assert sorted(slices) == sorted(written)
    assert len(flows) == sum(event["ph"] == "s" for event in events)
    assert all(source == target for source, target in flows), "an arrow joins the two slices of one copy"


def test_traces_that_overlap_each_get_what_runs_and_leave_the_record_bounded(tmp_path):
    first, second = cd.trace(tmp_path / "first.json"), cd.trace(tmp_path / "second.json")
    value = value_on(2)
    first.__enter__()
    cd.reduce(value)
    second.__enter__()
    cd.gather(value)
    first.__exit__(None, None, None)
    cd.broadcast(value.values[0], ["cpu:0", "cpu:1"])
    second.__exit__(None, None, None)
    names = []
    for name in ("first", "second"):
        events = json.loads((tmp_path / f"{name}.json").read_text())["traceEvents"]
        names.append({event["name"] for event in events if event["ph"] == "X"})
    assert "gather" in names[0] & names[1]
    assert ("broadcast" in names[0], "broadcast" in names[1]) == (False, True)
    assert ("DirectAllReduce SUM" in names[0], "DirectAllReduce SUM" in names[1]) == (True, False)
    assert tracing.flight_recorder.events.maxlen == tracing.MAX_RECORDED
    assert cd.flight_record()[-1].what == "broadcast"


def test_traces_of_several_threads_end_in_any_order(tmp_path):
    def work(number):
        for turn in range(20):
            path = tmp_path / f"{number}.json"
            with cd.trace(path):
                cd.reduce([np.ones(3), np.ones(3)])
            assert "DirectAllReduce SUM" in path.read_text(), turn

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert tracing.flight_recorder.events is tracing.flight_recorder.kept
    assert tracing.flight_recorder.events.maxlen == tracing.MAX_RECORDED

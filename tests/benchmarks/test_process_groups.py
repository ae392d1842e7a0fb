from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


def test_every_row_is_said_and_selected_by_its_text(benchmark):
    table = benchmark.pairs(quick=False)
    rows = [row for pair in table for row in pair.rows]
    assert len({row.text for row in rows}) == len(rows) == 10
    assert [row.floor for row in rows] == [None, 3, 3, None, 3, 3, None, 1.5, 1.5, 1.3]
    assert [row.work.size_bytes >> 20 for row in rows[:3]] == [1, 16, 64]
    assert [len(pair.rows) for pair in benchmark.selected(table, "16 MiB")] == [1, 1, 1]
    assert benchmark.selected(table, "no such row") == []


@pytest.mark.parametrize(
    ("is_ceiling", "ours", "against", "is_kept"),
    [(False, 1.0, 3.1, True), (False, 1.0, 2.9, False), (True, 1.2, 1.0, True), (True, 1.4, 1.0, False)],
)
def test_floors_and_ceilings_are_judged(is_ceiling, ours, against, is_kept, benchmark):
    row = benchmark.Row("work", benchmark.TRAINING, 1.3 if is_ceiling else 3.0, is_ceiling)
    line, found = benchmark.judged(row, ours, against, 0, quick=False)
    assert found is is_kept
    assert line.endswith("ok" if is_kept else "MISSED")
    assert not benchmark.judged(row, ours, against, 5, quick=False)[1], "wrong results keep no promise"


def test_a_missing_library_is_said_and_breaks_no_promise(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "peer_unavailable", lambda name: "no mpirun or mpiexec found")
    (pair,) = benchmark.selected(benchmark.pairs(quick=False), "16 MiB on MPI")
    assert list(benchmark.lines(pair, None, quick=False)) == [
        ("2 x 4 x 16 MiB on MPI against 8 ranks of MPI             skipped: no mpirun or mpiexec found", True)
    ]


def test_our_contender_has_the_replicas_of_its_process(benchmark):
    from crossdevice.cli.bench import data
    from crossdevice.cli.bench.workload import Workload
    from crossdevice.process_groups.engines.thread_engine import run_ranks

    work = Workload("all_reduce", "SUM", "float32", 8, ((1000,),))

    def rank(group):
        ours = benchmark.OurRank(group)
        inputs = [data.replica_arrays(work, replica) for replica in ours.replicas(work)]
        return len(inputs), ours.ready(work, inputs).inspect("fresh", counts_wrong=True)

    assert run_ranks(2, rank) == [(4, ("own", 0))] * 2


def test_training_brings_data_of_its_own(benchmark):
    assert list(benchmark.HookedTraining.replicas(None, benchmark.TRAINING)) == []


def test_the_page_lists_every_row_with_its_aim(benchmark):
    page = PAGE.read_text()
    for pair in benchmark.pairs(quick=False):
        for row in pair.rows:
            word = "at most" if row.is_ceiling else "at least"
            promise = "" if row.floor is None else f"{word} {row.floor:g} x "
            assert f"| {row.text} | {promise}|" in page

import math
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_resnet50_has_161_gradients_and_25_557_032_parameters():
    from resnet50 import gradient_shapes

    shapes = gradient_shapes()
    assert (len(shapes), sum(math.prod(shape) for shape in shapes)) == (161, 25_557_032)


def test_every_row_is_said_and_selected_by_its_text():
    from floors import groups, selected

    rows = [row.text for group in groups(quick=False) for row in group.rows]
    assert len(set(rows)) == len(rows) == 41
    assert [len(group.rows) for group in selected(groups(quick=False), "psum")] == [1, 1]
    assert selected(groups(quick=False), "no such row") == []


def test_a_quick_run_prints_rows_and_judges_nothing():
    words = [sys.executable, str(BENCHMARKS / "floors.py"), "--quick", "--rows", "8 x 16 MiB, out="]
    answer = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")
    lines = [line for line in answer.stdout.splitlines() if not line.startswith("#")]
    assert len(lines) == 3
    assert all(line.endswith("not judged") for line in lines)


def test_peers_that_make_one_pass_are_judged_as_strictly_as_loops():
    from floors import groups

    rows = [row for group in groups(quick=False) for row in group.rows]
    one_pass = {row.against.name for row in rows if row.against and row.floor == 0.91}
    assert one_pass == {"torch_compile", "torch_stack", "numpy_stack", "jax_jit"}
    for row in rows:
        if row.against and row.against.name in one_pass:
            assert row.ours.place == row.against.place


def test_the_page_lists_every_row_with_its_floor_and_aim():
    from floors import groups

    page = (BENCHMARKS.parent / "docs" / "performance.md").read_text()
    for group in groups(quick=False):
        for row in group.rows:
            assert f"| {row.text} | {row.floor:g} {row.unit} | {row.aim:g} {row.unit} | " in page

"""docs/choosing.md has the tables of the model, and the order of algorithms has the reasons it gives."""

import functools

import pytest

HALVING, TREE, RING, COPY = "halving_doubling", "tree", "ring", "hierarchical_copy"
ORDERS = {
    # Rounds count, but at 8 devices a root has few children.
    (8, "1 KiB"): [COPY, HALVING, TREE, RING],
    (64, "1 KiB"): [HALVING, TREE, COPY, RING],
    (1024, "1 KiB"): [HALVING, TREE, COPY, RING],
    (16384, "1 KiB"): [HALVING, TREE, COPY, RING],
    # Bytes begin to count: a root takes N / 2 arrays.
    (8, "1 MiB"): [HALVING, TREE, COPY, RING],
    (64, "1 MiB"): [HALVING, TREE, RING, COPY],
    (1024, "1 MiB"): [HALVING, TREE, RING, COPY],
    (16384, "1 MiB"): [HALVING, TREE, RING, COPY],
    # Bytes on the busiest link: least with halving and with a ring, log N arrays in a tree.
    (8, "1 GiB"): [HALVING, RING, TREE, COPY],
    (64, "1 GiB"): [HALVING, RING, TREE, COPY],
    (1024, "1 GiB"): [HALVING, RING, TREE, COPY],
    (16384, "1 GiB"): [HALVING, RING, TREE, COPY],
}


@pytest.fixture(params=[(8, 64, 1024), pytest.param((16384,), marks=pytest.mark.more("a repetition"))])
def counts(request):
    return request.param


@pytest.fixture
def rows(benchmark, counts):
    return _made_once(benchmark.tables, counts)


@functools.cache
def _made_once(tables, counts):
    return [line for line in tables(counts).splitlines() if line.startswith("| ")]


def test_the_page_has_the_tables_of_the_model(benchmark, rows):
    page = benchmark.PAGE.read_text(encoding="utf-8").splitlines()
    assert [row for row in rows if row not in page] == [], benchmark.__doc__
    begin, end = page.index(benchmark.BEGIN), page.index(benchmark.END)
    of_other_counts = [row for row in ORDERS if f"| {row[0]} | {row[1]} |" not in "".join(rows)]
    in_page = [line for line in page[begin:end] if line.startswith("| ")]
    assert len(in_page) == len(rows) + len(of_other_counts), benchmark.__doc__


def test_the_page_has_what_was_measured_beside_the_model(benchmark):
    assert benchmark.measurements() in benchmark.PAGE.read_text(encoding="utf-8"), benchmark.__doc__


def test_what_nccl_was_measured_to_take_stands_beside_our_prediction(benchmark):
    (row,) = [
        line for line in benchmark.measurements().splitlines() if line.startswith("| hgx_h100, 64 GPUs")
    ]
    assert row.split(" | ")[1] == "7.4 ms"


def test_the_order_of_algorithms_is_the_one_with_reasons(rows, counts):
    cells = [line.strip("| ").split(" | ") for line in rows]
    found = {
        (int(row[0]), row[1]): [cell.split("`")[1] for cell in row[2:]] for row in cells if row[0].isdigit()
    }
    assert found == {place: order for place, order in ORDERS.items() if place[0] in counts}

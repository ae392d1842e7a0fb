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


@pytest.fixture
def tables(benchmark):
    return _made_once(benchmark.tables)


@functools.cache
def _made_once(tables):
    return tables()


def test_the_page_has_the_tables_of_the_model(benchmark, tables):
    page = benchmark.PAGE.read_text(encoding="utf-8")
    assert tables in page, benchmark.__doc__
    assert benchmark.measurements() in page, benchmark.__doc__


def test_what_nccl_was_measured_to_take_stands_beside_our_prediction(benchmark):
    (row,) = [
        line for line in benchmark.measurements().splitlines() if line.startswith("| hgx_h100, 64 GPUs")
    ]
    assert row.split(" | ")[1] == "7.4 ms"


def test_the_order_of_algorithms_is_the_one_with_reasons(tables):
    rows = [line.strip("| ").split(" | ") for line in tables.splitlines() if line.startswith("| ")]
    found = {
        (int(row[0]), row[1]): [cell.split("`")[1] for cell in row[2:]] for row in rows if row[0].isdigit()
    }
    assert found == ORDERS

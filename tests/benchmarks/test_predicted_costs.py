"""docs/choosing.md has the tables of the model, and the order of algorithms has the reasons it gives."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
specification = importlib.util.spec_from_file_location(
    "predicted_costs", ROOT / "benchmarks" / "predicted_costs.py"
)
predicted_costs = importlib.util.module_from_spec(specification)
sys.modules["predicted_costs"] = predicted_costs
specification.loader.exec_module(predicted_costs)

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


@pytest.fixture(scope="module")
def tables():
    return predicted_costs.tables()


def test_the_page_has_the_tables_of_the_model(tables):
    assert tables in predicted_costs.PAGE.read_text(encoding="utf-8"), predicted_costs.__doc__


def test_the_order_of_algorithms_is_the_one_with_reasons(tables):
    rows = [line.strip("| ").split(" | ") for line in tables.splitlines() if line.startswith("| ")]
    found = {
        (int(row[0]), row[1]): [cell.split("`")[1] for cell in row[2:]] for row in rows if row[0].isdigit()
    }
    assert found == ORDERS

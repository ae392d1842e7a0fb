"""Claims in the documents, compared with the plans."""

import re
from pathlib import Path

import pytest

from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.values.device import host_device
from unit.algorithms.planning import planned

ROOT = Path(__file__).parents[2]
DEVICES = [host_device(i) for i in range(8)]


def table_rows(document):
    text = (ROOT / "docs" / document).read_text()
    return {
        row[0].strip("`"): row
        for row in (line.strip("| ").split(" | ") for line in re.findall(r"^\| .+", text, re.M))
    }


def test_every_algorithm_has_a_row_and_a_section():
    text = (ROOT / "docs" / "algorithms.md").read_text()
    rows = table_rows("algorithms.md")
    for name in ALGORITHMS:
        title = ALGORITHMS[name].partition(":")[2]
        assert rows[name][1] == f"`{title}`"
        assert f"## {title}\n" in text


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"nccl"}))
def test_the_figures_are_those_of_the_plans(name):
    row = table_rows("algorithms.md")[name]
    plan = planned(ALGORITHMS.load(name)(), DEVICES, DEVICES)
    arrays = [f"{traffic / 640:g} S" for traffic in (plan.busiest_device_traffic(), plan.total_traffic())]
    assert row[4:] == [str(plan.num_rounds), *arrays, f"{plan.total_traffic(unsummed=True) / 640:g} S"]
    decided = table_rows("decisions/0001-contributions-travel-unsummed.md")[name]
    assert [f"{cell} S" for cell in decided[1:]] == row[6:]


def test_decisions_are_numbered_without_gaps_and_listed_by_their_titles():
    folder = ROOT / "docs" / "decisions"
    records = sorted(folder.glob("0*.md"))
    titles = [re.match(r"# (\d+)\. (.+)\n", record.read_text()).groups() for record in records]
    assert [int(record.name[:4]) for record in records] == list(range(1, len(records) + 1))
    listed = re.findall(r"^\| \[(\d+)\]\((.+)\) \| (.+) \|$", (folder / "README.md").read_text(), re.M)
    assert listed == [
        (number, record.name, title) for (number, title), record in zip(titles, records, strict=True)
    ]

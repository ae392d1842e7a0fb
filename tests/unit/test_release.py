"""The version number has one home, and the files that repeat it agree."""

import re
import tomllib
from datetime import date
from pathlib import Path

from packaging.requirements import Requirement

import crossdevice

ROOT = Path(__file__).parents[2]


def test_the_changelog_begins_with_this_version():
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == crossdevice.__version__


def test_the_changelog_of_a_version_can_be_read_in_a_minute():
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1].splitlines()
    assert len(newest) <= 60
    assert max(map(len, newest)) <= 130


def test_the_citation_names_this_version():
    assert f"\nversion: {crossdevice.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_changelog_and_citation_agree_on_the_day_of_the_release():
    (said,) = re.findall(r"^## \S+ \((.+)\)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.findall(r"^date-released: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == ([] if said == "unreleased" else [said])
    assert said == "unreleased" or date.fromisoformat(said)


def test_the_project_file_does_not_repeat_the_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"]
    assert "version" not in project


def test_the_policy_names_the_oldest_python():
    (oldest,) = re.findall(r'requires-python = ">=(.*)"', (ROOT / "pyproject.toml").read_text())
    assert f"from {oldest} on" in (ROOT / "docs" / "releasing.md").read_text()


def test_all_that_the_makefile_installs_is_locked_to_versions_that_the_ranges_allow():
    rows = [row for row in (ROOT / "constraints.txt").read_text().splitlines() if not row.startswith("#")]
    locked = {}
    for row in rows:
        name, version = re.fullmatch(r"([a-z0-9-]+)==([0-9a-z.]+)(?: ; .+)?", row).groups()
        locked.setdefault(name, []).append(version)
    text = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = text["project"]["optional-dependencies"]
    asked = [row for name, rows in extras.items() if name != "flower" for row in rows]
    for row in [*asked, *text["project"]["dependencies"], *text["build-system"]["requires"]]:
        requirement = Requirement(row)
        versions = locked[requirement.name.replace("_", "-")]
        assert all(version in requirement.specifier for version in versions), (row, versions)

"""The documentation's table of names is that of the installed TensorFlow, and every gap has its reason."""

from __future__ import annotations

import fnmatch

import pytest

pytest.importorskip("tensorflow")

from parity import names

pytestmark = pytest.mark.more("TensorFlow")


def rows():
    return list(names.compared())


def test_every_name_that_is_missing_has_a_reason():
    assert [row.full for row in rows() if not row.is_here and row.remark(names.MISSING) is None] == []


def test_every_argument_that_is_missing_has_a_reason():
    assert [row for row in rows() if row.lacks and row.remark(names.ARGUMENTS) is None] == []


@pytest.mark.parametrize("remarks", [names.MISSING, names.ARGUMENTS, names.DIFFERENT])
def test_every_reason_is_that_of_a_name(remarks):
    found = [
        row.full
        for row in rows()
        if (
            not row.is_here
            if remarks is names.MISSING
            else bool(row.lacks)
            if remarks is names.ARGUMENTS
            else row.is_here
        )
    ]
    assert [pattern for pattern in remarks if not fnmatch.filter(found, pattern)] == []


def test_the_page_has_the_table_of_today():
    page = names.PAGE.read_text()
    assert page == names.page_with_table(page), "run tests/parity/names.py"

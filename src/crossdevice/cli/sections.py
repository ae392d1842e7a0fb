"""A report of titled tables: with rich on a terminal that has it, as plain text elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple


class Section(NamedTuple):
    """A title over a table; headings may all be empty."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def show(
    headline: Sequence[str], sections: Sequence[Section], last_title: str = "", lines: Sequence[str] = ()
) -> None:
    """Prints the headline, the tables and, if there are any, lines under a title of their own."""
    is_rich = sys.stdout.isatty() and importlib.util.find_spec("rich") is not None
    (_show_rich if is_rich else _show_plain)(headline, sections, last_title, lines)


def _show_plain(
    headline: Sequence[str], sections: Sequence[Section], last_title: str, lines: Sequence[str]
) -> None:
    print("\n".join(headline))
    for title, headings, rows in sections:
        widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
        print(f"\n{title}")
        for row in (headings, *rows) if any(headings) else rows:
            print(("  " + "  ".join(map(str.ljust, row, widths))).rstrip())
    if lines:
        print(f"\n{last_title}\n" + "\n".join(lines))


def _show_rich(
    headline: Sequence[str], sections: Sequence[Section], last_title: str, lines: Sequence[str]
) -> None:
    console: Any = importlib.import_module("rich.console").Console(highlight=False)
    table_class: Any = importlib.import_module("rich.table").Table
    escape: Any = importlib.import_module("rich.markup").escape
    console.print(f"[bold]{escape(headline[0])}[/bold]")
    for line in headline[1:]:
        console.print(escape(line))
    for title, headings, rows in sections:
        table = table_class(*headings, title=title, title_justify="left", box=None, show_header=any(headings))
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(table)
    if lines:
        console.print(last_title, style="italic")
    for line in lines:
        console.print(escape(line), style="dim")

"""Arguments, tables and the progress bar that commands share.

Files to write are refused before any work. Tables are drawn by rich on a terminal that has it,
plain elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from crossdevice.errors import FileError, OptionError


def size_in_bytes(text: str) -> int:
    """Parses a size such as 512, 4K, 1M or 1.5GiB, in powers of two.

    >>> size_in_bytes("4K"), size_in_bytes("1.5MiB")
    (4096, 1572864)
    """
    match = re.fullmatch(r"(\d+)B?|(\d+(?:\.\d+)?)([KMG])(?:iB)?", text.strip(), re.IGNORECASE)
    size = 0
    if match is not None:
        factor = 1 << {"": 0, "K": 10, "M": 20, "G": 30}[(match[3] or "").upper()]
        size = int(Fraction(match[1] or match[2]) * factor)
    if size == 0:
        raise OptionError(
            f"{text!r} is not a size; expected bytes such as 512, 4K, 100MiB or 1.5GiB "
            "(K, M and G, with or without iB, are powers of two)"
        )
    return size


def output_file(text: str) -> Path:
    """Returns the path, if its folder exists.

    >>> output_file("chart.svg").name
    'chart.svg'
    """
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: there is no folder '{path.parent}'")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; expected a file")
    return path


def write_file(path: Path, text: str) -> None:
    """Writes a file that a command was asked for; a full disk is an error that names it."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileError(f"{path} cannot be written: {error.strerror or error}") from error


def check_ending(path: Path, what: str, *endings: str) -> None:
    """Refuses file extensions that do not match the contents."""
    if path.suffix not in endings:
        raise OptionError(
            f"{str(path)!r} is not a valid {what} file; expected a name that ends in {' or '.join(endings)}"
        )


WIDEST_TABLE = 1000
"""Columns; no table of ours is as wide."""


class Section(NamedTuple):
    """A title over a table; headings may all be empty."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def show(
    headline: Sequence[str], sections: Sequence[Section], last_title: str = "", lines: Sequence[str] = ()
) -> None:
    """Prints the headline, the tables and, if any, lines under a title of their own."""
    if not _is_rich(sys.stdout):
        print("\n".join(headline))
        for title, headings, rows in sections:
            widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
            print(f"\n{title}")
            for row in (headings, *rows) if any(headings) else rows:
                print(("  " + "  ".join(map(str.ljust, row, widths))).rstrip())
        if lines:
            print(f"\n{last_title}\n" + "\n".join(lines))
        return
    console_class: Any = importlib.import_module("rich.console").Console
    console = console_class(highlight=False)
    table_class: Any = importlib.import_module("rich.table").Table
    escape: Any = importlib.import_module("rich.markup").escape
    console.print(f"[bold]{escape(headline[0])}[/bold]")
    for line in headline[1:]:
        console.print(escape(line))
    for title, headings, rows in sections:
        table = table_class(*headings, title=title, title_justify="left", box=None, show_header=any(headings))
        for row in rows:
            table.add_row(*map(escape, row))
        # A digest that has lost its end says nothing: a narrow terminal folds lines instead.
        wide = console.options.update(width=WIDEST_TABLE)
        wide_console = console_class(highlight=False, width=console.measure(table, options=wide).maximum)
        wide_console.print(table, crop=False)
    if lines:
        console.print(last_title, style="italic")
    for line in lines:
        console.print(escape(line), style="dim")


@contextlib.contextmanager
def progress(total: int, *, has_lines: bool = False) -> Iterator[Callable[[str], None]]:
    """Yields a function to be called `total` times, with a description of the current work.

    Where no bar can be shown, each description is a line of standard error if `has_lines` is True.
    """
    if not _is_rich(sys.stderr):
        yield functools.partial(print, file=sys.stderr, flush=True) if has_lines else lambda _: None
        return
    console = importlib.import_module("rich.console").Console(stderr=True)
    with importlib.import_module("rich.progress").Progress(console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda word: bar.update(task, advance=1, description=word)


def _is_rich(stream: TextIO) -> bool:
    is_live = stream.isatty() and os.environ.get("TERM") != "dumb"
    return is_live and importlib.util.find_spec("rich") is not None

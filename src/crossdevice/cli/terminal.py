"""Arguments, tables and progress bars of commands.

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
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, TextIO

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


SECONDS_BETWEEN = 0.1
BAR_CHARACTERS = 24


class ByteProgress:
    """A bar of bytes, for a terminal with or without rich: one line, removed in the end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_shown = stream.isatty()
        self._started = self._drawn = time.monotonic()

    def update(self, done: int, total: int) -> None:
        """Draws the progress, at limited intervals; may be called at any rate."""
        now = time.monotonic()
        if self._is_shown and now - self._drawn >= SECONDS_BETWEEN:
            self._drawn = now
            width = shutil.get_terminal_size().columns - 1
            print(
                f"\r{bar_text(done, total, now - self._started)[:width]}",
                end="",
                file=self._stream,
                flush=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_shown:
            print("\r\x1b[K", end="", file=self._stream, flush=True)


def bar_text(done: int, total: int, seconds: float) -> str:
    """Formats the share, the bytes and the speed.

    >>> bar_text(1_500_000_000, 2_000_000_000, 1.0)
    '[##################      ]  75 %  1.50 of 2.00 GB  1.50 GB/s'
    """
    filled = BAR_CHARACTERS * done // max(total, 1)
    bar = "#" * filled + " " * (BAR_CHARACTERS - filled)
    percent = 100 * done // max(total, 1)
    return f"[{bar}] {percent:3} %  {done / 1e9:.2f} of {total / 1e9:.2f} GB  {done / seconds / 1e9:.2f} GB/s"


def _is_rich(stream: TextIO) -> bool:
    is_live = stream.isatty() and os.environ.get("TERM") != "dumb"
    return is_live and importlib.util.find_spec("rich") is not None

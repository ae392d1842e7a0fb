"""`crossdevice average`: the mean of models in files."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from crossdevice.combining.average_files import KEYS, average_files
from crossdevice.combining.trees import INTEGERS
from crossdevice.values.dtypes import FLOATS
from crossdevice.values.quantities import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the files to average and the options."""
    add = parser.add_argument
    add(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="model.safetensors, model.safetensors.index.json or its folder, .npz, .npy, .pt, .pth or .bin",
    )
    add("-o", "--output", required=True, type=Path, metavar="FILE", help="the file to write")
    add("--weights", type=_weights, metavar="W,W,...", help="one number for each file, such as 3,1 (all 1)")
    add("--dtype", choices=FLOATS, help="dtype of the floats in the output (that of the files)")
    add(
        "--integers",
        choices=INTEGERS,
        default="mean",
        help="integers become their rounded mean, those of the first file, or the largest (mean)",
    )
    add(
        "--keys",
        choices=KEYS,
        default="strict",
        help="if files have different tensors: refuse them, average each over those that have it, or keep "
        "only what all have (strict)",
    )
    add("--verify", action="store_true", help="check each file against FILE.sha256 first")
    add(
        "--exact",
        action="store_true",
        help="round the true mean once, so that the order of files does not matter",
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the file, with a bar on a terminal, and names it."""
    with ByteProgress(sys.stderr) as progress:
        average_files(
            arguments.files,
            arguments.output,
            arguments.weights,
            precision="exact" if arguments.exact else "accurate",
            dtype=arguments.dtype,
            integers=arguments.integers,
            keys=arguments.keys,
            progress=progress.update,
            verify=arguments.verify,
        )
    files = counted(len(arguments.files), "file")
    print(f"wrote {arguments.output}, the mean of {files}", file=sys.stderr)
    return 0


def _weights(text: str) -> list[float]:
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 3,1") from None


SECONDS_BETWEEN = 0.1
BAR_CHARACTERS = 24


class ByteProgress:
    """Draws one line again and again, and removes it in the end."""

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

"""`crossdevice average`: the mean of models in files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from crossdevice.cli.terminal import ByteProgress
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

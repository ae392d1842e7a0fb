"""`crossdevice determinism`: share of elements that change with sizes, orders, algorithms and launches."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from crossdevice import runtime
from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.algorithms.reduction_to_one_device import ReductionToOneDevice
from crossdevice.algorithms.ring_all_reduce import RingAllReduce
from crossdevice.cli.bench.peers import launcher
from crossdevice.cli.bench.process import MPI_ENVIRONMENT
from crossdevice.cli.determinism.sums import (
    BASE,
    CHANGES,
    Array,
    PlannedSums,
    Sizes,
    changed_shares,
    share_of,
    sums_in_all_ways,
)
from crossdevice.cli.run import run_quietly
from crossdevice.cli.terminal import Section, output_file, progress, show, write_file
from crossdevice.errors import FileError, OptionError
from crossdevice.values.registry import installed_version

PLANNED: dict[str, Callable[[], CrossDeviceOps]] = {"ring": RingAllReduce, "fold": ReductionToOneDevice}
"""Algorithms whose plans are run in this process, by the names of their rows."""

LAUNCHED = ("gloo", "mpi", "nccl", "crossdevice")
LAUNCH = "launch"
NUM_LAUNCHES = 2
PACKAGES = ("crossdevice", "torch", "mpi4py", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument(
        "--backends",
        default="ring,fold,gloo,crossdevice",
        metavar="NAMES",
        help="some of ring (its plan, in float32), fold (float32, in the order of ranks), gloo, mpi, nccl "
        "(a GPU for each process) and crossdevice (on torch.distributed); default: %(default)s",
    )
    parser.add_argument("-n", "--processes", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--elements", type=int, default=1664 * 64, metavar="N", help="float32 values; default: %(default)s"
    )
    parser.add_argument("--save", type=output_file, metavar="FILE", help="write what was found, as JSON")
    parser.add_argument(
        "--compare",
        type=Path,
        metavar="FILE",
        help="say what differs from what was saved, before an upgrade for example; exit code 1 if anything",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the table, and whether it equals that of an earlier run."""
    names = list(dict.fromkeys(arguments.backends.split(",")))
    unknown = [name for name in names if name not in (*PLANNED, *LAUNCHED)]
    if unknown:
        raise OptionError(
            f"unknown backend {unknown[0]!r}; expected some of {', '.join((*PLANNED, *LAUNCHED))}"
        )
    if arguments.processes < 2 or arguments.elements < arguments.processes:
        raise OptionError(
            f"expected 2 or more processes, and as many elements; got {arguments.processes} and "
            f"{arguments.elements}"
        )
    sizes = Sizes(arguments.processes, arguments.elements)
    before = None if arguments.compare is None else _read(arguments.compare)
    num_sums = sum(1 if name in PLANNED else NUM_LAUNCHES for name in names)
    with progress(num_sums, has_lines=True) as say:
        rows = {row: facts for name in names for row, facts in _examined(name, sizes, say).items()}
    versions = {name: version for name in PACKAGES if (version := installed_version(name)) is not None}
    found = {"sizes": list(sizes), "versions": versions, "rows": rows}
    _show(found, sizes)
    if arguments.save is not None:
        write_file(arguments.save, json.dumps(found, indent=2) + "\n")
    if before is None:
        return 0
    differences = _differences(before, found)
    print(f"\ncompared to {arguments.compare}:", *(differences or ["nothing differs"]), sep="\n  ")
    return 1 if differences else 0


def _examined(name: str, sizes: Sizes, say: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Returns for each row of a library the changed shares, and a digest of the unchanged sum."""
    if name in PLANNED:
        say(f"{name}: its plan, in this process")
        sums = PlannedSums(PLANNED[name](), sizes.ranks)
        return {name: _facts(sums_in_all_ways(sums, sizes), None)}
    launches = []
    for number in range(1, NUM_LAUNCHES + 1):
        say(f"{name}: launch {number} of {NUM_LAUNCHES}, {sizes.ranks} processes")
        launches.append(_launched(name, sizes))
    first, second = launches
    return {row: _facts(found, second[row][BASE][0]) for row, found in first.items()}


def _facts(found: Mapping[str, list[Array]], again: Array | None) -> dict[str, Any]:
    (base,) = found[BASE]
    launch = None if again is None else share_of(base, [again])
    return {
        "shares": {**changed_shares(found), LAUNCH: launch},
        "digest": hashlib.blake2b(base.tobytes(), digest_size=16).hexdigest(),
    }


def _launched(name: str, sizes: Sizes) -> dict[str, dict[str, list[Array]]]:
    """Returns the results of one launch, by row and change."""
    if name == "nccl":
        _check_gpus(sizes.ranks)
    if name == "mpi":
        starter, program = launcher(), [sys.executable, "-m"]
        if starter is None:
            raise OptionError(
                "mpi needs an mpirun or mpiexec on the path; found none: leave mpi out of --backends"
            )
        command = [str(starter), "-n", str(sizes.ranks), *program]
    else:
        command = [sys.executable, "-m", "crossdevice", "run", "-n", str(sizes.ranks), "-m"]
    environment = runtime.environment_of_child(**MPI_ENVIRONMENT)
    with tempfile.TemporaryDirectory(prefix="crossdevice-determinism-") as folder:
        path = Path(folder) / "results.npz"
        command += ["crossdevice.cli.determinism.sums", name, *map(str, sizes), str(path)]
        run_quietly(name, command, path, environment)
        rows: dict[str, dict[str, list[Array]]] = {}
        with np.load(path) as results:
            for key in results.files:
                row, change, _ = key.split("/")
                rows.setdefault(row, {}).setdefault(change, []).append(results[key])
    for results_of in rows.values():
        for change in CHANGES:
            results_of.setdefault(change, [])
    return rows


def _check_gpus(num_processes: int) -> None:
    """Refuses NCCL where processes would have to share a GPU, which it does not do."""
    try:
        cuda: Any = importlib.import_module("torch.cuda")
        num_gpus = cuda.device_count()
    except ModuleNotFoundError:
        num_gpus = 0
    if num_gpus < num_processes:
        raise OptionError(
            f"nccl needs a GPU for each process: expected {num_processes}, found {num_gpus}; leave nccl out "
            "of --backends, or give a smaller -n"
        )


def _show(found: Mapping[str, Any], sizes: Sizes) -> None:
    changes = (*CHANGES, LAUNCH)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    headline = [
        f"share of elements whose bits change: sums of {sizes.elements} float32 values on {sizes.ranks} "
        "processes",
        versions,
    ]
    table = [
        [row, *(_percent(facts["shares"][change]) for change in changes)]
        for row, facts in found["rows"].items()
    ]
    show(headline, [Section("by what is changed", ("", *changes), table)])


def _percent(share: float | None) -> str:
    if share is None:
        return "-"
    return f"{100 * share:.2f} %" if share else "0"


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        if set(found) != {"sizes", "versions", "rows"}:
            raise ValueError("other keys")
    except (OSError, ValueError, TypeError) as error:
        raise FileError(f"{path} is not what `crossdevice determinism --save` writes: {error}") from error
    return found


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describes the differences of two results; differing versions are named too."""
    if before["sizes"] != now["sizes"]:
        raise OptionError(
            f"the file has {before['sizes'][1]} elements on {before['sizes'][0]} processes, and this run "
            f"{now['sizes'][1]} on {now['sizes'][0]}: give the same -n and --elements"
        )
    lines = []
    for row, facts in now["rows"].items():
        earlier = before["rows"].get(row)
        if earlier is None:
            continue
        if facts["digest"] != earlier["digest"]:
            lines.append(f"{row}: the sum itself has other bits")
        lines += [
            f"{row}: {change} changed {_percent(was)} of the elements, and now {_percent(share)}"
            for change, share in facts["shares"].items()
            if share != (was := earlier["shares"].get(change))
        ]
    if lines:
        lines += [
            f"{package} was {before['versions'].get(package)}, and is {version}"
            for package, version in now["versions"].items()
            if before["versions"].get(package) != version
        ]
    return lines

"""`crossdevice bench`: measures collectives as nccl-tests does, alone or beside other libraries."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import shlex
import sys
from collections.abc import Sequence

from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.backends.registry import BACKENDS
from crossdevice.cli.bench.calibration import calibrate
from crossdevice.cli.bench.compiled_peers import make_host_devices
from crossdevice.cli.bench.local_competitors import CrossDeviceCompetitor
from crossdevice.cli.bench.measure import Competitor, Schedule, measured_rows
from crossdevice.cli.bench.peers import PEERS, peer_class, peer_unavailable
from crossdevice.cli.bench.process import PeerProcessError, PeerProcesses
from crossdevice.cli.bench.report import Report
from crossdevice.cli.bench.workload import COLLECTIVES, Workload, dtype_of, op_of, sizes_between
from crossdevice.cli.terminal import check_ending, output_file, progress, size_in_bytes
from crossdevice.errors import OptionError
from crossdevice.functions import DEFAULT_ALGORITHM
from crossdevice.kernels.host.resources.threads import set_num_threads
from crossdevice.values.device import host_device
from crossdevice.values.options import LOWERINGS, PRECISIONS, CommunicationOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options, with the letters of nccl-tests."""
    add = parser.add_argument
    add("-b", "--minbytes", default="4K", metavar="SIZE", help="smallest size, such as 512, 4K, 1M (4K)")
    add("-e", "--maxbytes", default="64M", metavar="SIZE", help="largest size (64M)")
    add("-f", "--stepfactor", type=int, default=4, metavar="N", help="factor between sizes (4)")
    add("-n", "--iters", type=int, default=20, metavar="N", help="timed rounds; the median is reported (20)")
    add("-w", "--warmup-iters", type=int, default=5, metavar="N", help="rounds before the timed ones (5)")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="count wrong results (1)")
    add("-d", "--datatype", default="float", metavar="DTYPE", help="float, half, bfloat16, ... (float)")
    add("-o", "--op", default="sum", help="sum, avg, min, max or prod (sum)")
    add("-g", "--ngpus", type=int, default=8, metavar="N", help="number of devices (8)")
    add("-J", "--json", type=output_file, metavar="FILE", help="write the results as JSON")
    add("--collective", choices=COLLECTIVES, default="all_reduce", help="the call to measure (all_reduce)")
    names = f"{', '.join(ALGORITHMS)}, module:class, or all; may be repeated"
    add("--algorithm", action="append", metavar="NAME", help=f"{names} ({DEFAULT_ALGORITHM})")
    add("--backend", default="numpy", metavar="NAME", help=f"{' or '.join(BACKENDS)} (numpy)")
    add("--precision", choices=PRECISIONS, default="accurate", help="how crossdevice adds (accurate)")
    add("--lowering", choices=LOWERINGS, default="auto", help="off: run plans step by step (auto)")
    add("--share-results", action="store_true", help="let crossdevice give all devices the same result array")
    add("--fresh", action="store_true", help="allocate results in every call instead of passing out=")
    add("--threads", type=int, metavar="N", help="threads of crossdevice and PyTorch (number of cores)")
    peers = ", ".join(PEERS)
    add("--against", default="", metavar="LIST", help=f"peers, separated by commas: {peers}, or all")
    add("--calibrate", type=output_file, metavar="FILE", help="write this host's topology (TOML) and exit")
    add(
        "--chart",
        type=output_file,
        action="append",
        default=[],
        metavar="FILE",
        help="draw the bandwidths, as FILE.svg or FILE.html",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the table; 1 if a result of ours was wrong."""
    works = _works(arguments)
    if arguments.calibrate is not None:
        if arguments.calibrate.suffix != ".toml":
            raise OptionError(
                f"{str(arguments.calibrate)!r} is not a valid topology file; expected FILE.toml"
            )
        return calibrate(arguments.calibrate, arguments.ngpus)
    peers = _peers(arguments.against)
    for path in arguments.chart:
        check_ending(path, "chart", ".svg", ".html")
    schedule = Schedule(arguments.iters, arguments.warmup_iters, bool(arguments.check), arguments.fresh)
    set_num_threads(arguments.threads)
    try:
        with contextlib.ExitStack() as closing:
            ours = _ours(arguments)
            report = Report(arguments, _command(arguments), works[0], [one.name for one in ours])
            report.begin()
            others = _started(peers, arguments, report, closing)
            report.open_table(compares=len(ours) + len(others) > 1)
            with progress(2 * arguments.iters * len(works)) as advance:
                for work in works:
                    tick = functools.partial(advance, f"{work.size_bytes} B")
                    report.add(measured_rows(work, [*ours, *others], schedule, say=report.remark, tick=tick))
    finally:
        set_num_threads(None)
    return report.end()


def _works(arguments: argparse.Namespace) -> list[Workload]:
    bounds = (("-n", arguments.iters, 1), ("-w", arguments.warmup_iters, 0), ("-g", arguments.ngpus, 2))
    for name, given, least in bounds:
        if given < least:
            raise OptionError(f"{name} must be {least} or more; got {given}")
    sizes = sizes_between(
        size_in_bytes(arguments.minbytes), size_in_bytes(arguments.maxbytes), arguments.stepfactor
    )
    dtype, op = dtype_of(arguments.datatype), op_of(arguments.op)
    works = [Workload.of_size(arguments.collective, op, dtype, arguments.ngpus, size) for size in sizes]
    return list(dict.fromkeys(works))


def _ours(arguments: argparse.Namespace) -> list[Competitor]:
    options = CommunicationOptions(
        precision=arguments.precision, lowering=arguments.lowering, share_results=arguments.share_results
    )
    names = list(dict.fromkeys(arguments.algorithm or [DEFAULT_ALGORITHM]))
    devices = [host_device(index) for index in range(arguments.ngpus)]
    if "all" in names:
        # NCCL has nothing to do on the host; asked for by name, what it falls back to is measured.
        names = [name for name in ALGORITHMS if ALGORITHMS.load(name)().fallback_reason(devices) is None]
    make_host_devices(arguments.backend, arguments.ngpus)
    return [CrossDeviceCompetitor(name, arguments.backend, options) for name in names]


def _peers(text: str) -> list[str]:
    names = list(dict.fromkeys(filter(None, (name.strip() for name in text.split(",")))))
    if "all" in names:
        return list(PEERS)
    for name in names:
        if name not in PEERS:
            raise OptionError(f"{name!r} is not a peer; expected one of {', '.join(PEERS)}, or all")
    return names


def _started(
    peers: Sequence[str], arguments: argparse.Namespace, report: Report, closing: contextlib.ExitStack
) -> list[Competitor]:
    started: list[Competitor] = []
    for name in peers:
        missing = peer_unavailable(name)
        if missing is not None:
            report.remark(f"{name}: left out, {missing}")
            continue
        try:
            peer = peer_class(name)() if PEERS[name].runs == "here" else PeerProcesses(name, arguments.ngpus)
        except PeerProcessError as error:
            report.remark(f"{name}: left out, {error}")
            continue
        closing.callback(peer.close)
        started.append(peer)
        report.remark(f"{name}: {PEERS[name].what}")
    if arguments.threads is not None and "torch" in sys.modules:
        torch = importlib.import_module("torch")
        closing.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(arguments.threads)
    return started


def _command(arguments: argparse.Namespace) -> str:
    """Returns the equivalent command line, defaults omitted."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = ["crossdevice", "bench"]
    for name, default in vars(parser.parse_args([])).items():
        given = getattr(arguments, name)
        if given != default:
            flag = "--" + name.replace("_", "-")
            for value in given if isinstance(given, list) else [given]:
                words += [flag] if value is True else [flag, str(value)]
    return shlex.join(words)

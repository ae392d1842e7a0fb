"""The tables of docs/choosing.md: what algorithms cost by the model, on three machines and on clusters.

python benchmarks/predicted_costs.py           prints them
python benchmarks/predicted_costs.py --write   writes them into docs/choosing.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from published_curves import CLUSTER_TIMES, CURVES, published_times

from crossdevice.choosing import predicted_durations
from crossdevice.costs.timing import engine_duration
from crossdevice.costs.topology import read_topology
from crossdevice.values.quantities import time_text

PAGE = Path(__file__).parents[1] / "docs" / "choosing.md"
BEGIN, END = "<!-- begin: benchmarks/predicted_costs.py -->", "<!-- end -->"
BEGIN_MEASURED = "<!-- begin measured: benchmarks/predicted_costs.py -->"
END_MEASURED = "<!-- end measured -->"

SIZES = {"1 KiB": 1 << 10, "1 MiB": 1 << 20, "1 GiB": 1 << 30}
MACHINES = ("pcie", "dgx1v", "hgx_h100")
COUNTS = (8, 64, 1024, 16384)
ALGORITHMS = ("one_device", "hierarchical_copy", "ring", "halving_doubling", "tree", "direct")
ORDERED = ("ring", "tree", "halving_doubling", "hierarchical_copy")


def machine_table(precision: str) -> Iterator[str]:
    """8 devices of three machines."""
    yield "| machine | size | " + " | ".join(f"`{name}`" for name in ALGORITHMS) + " |"
    yield "| --- | --- | " + " | ".join("---" for _ in ALGORITHMS) + " |"
    for machine in MACHINES:
        for size, num_bytes in SIZES.items():
            durations = predicted_durations(read_topology(machine, 8), num_bytes, precision=precision)
            best = min(ALGORITHMS, key=lambda name: durations[name].seconds)
            cells = [time_text(durations[name].seconds) for name in ALGORITHMS]
            marked = [
                f"**{cell}**" if name == best else cell for name, cell in zip(ALGORITHMS, cells, strict=True)
            ]
            yield f"| {machine} | {size} | " + " | ".join(marked) + " |"


def order_table(counts: Sequence[int]) -> Iterator[str]:
    """Nodes of 8 H100, fastest first."""
    yield "| devices | size | fastest | then | then | slowest |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for count in counts:
        for size, num_bytes in SIZES.items():
            durations = predicted_durations(read_topology("hgx_h100", count), num_bytes, precision="fast")
            order = sorted(ORDERED, key=lambda name: durations[name].seconds)
            cells = [f"`{name}` {time_text(durations[name].seconds)}" for name in order]
            yield f"| {count} | {size} | " + " | ".join(cells) + " |"


def measured_table() -> Iterator[str]:
    """NCCL's published times beside what the model says of NCCL and of our fastest plan, for 1 GiB."""
    yield "| machine | NCCL, measured | NCCL, predicted | our fastest plan, predicted | against NCCL |"
    yield "| --- | --- | --- | --- | --- |"
    num_bytes = SIZES["1 GiB"]
    cases = [(curve.topology, 8, published_times(curve, 8)[num_bytes]) for curve in CURVES]
    cases += [(each.topology, each.num_devices, each.seconds) for each in CLUSTER_TIMES]
    for machine, count, measured in cases:
        topology = read_topology(machine, count)
        durations = predicted_durations(topology, num_bytes, precision="accurate")
        best = min(durations, key=lambda name: durations[name].seconds)
        nccl = engine_duration(topology, num_bytes).seconds
        ours = durations[best].seconds
        yield (
            f"| {machine}, {count} GPUs | {time_text(measured)} | {time_text(nccl)} "
            f"| `{best}` {time_text(ours)} | {ours / measured:.1f} x its time |"
        )


def tables(counts: Sequence[int] = COUNTS) -> str:
    """All of it, as the page has it, on clusters of these numbers of devices."""
    lines = [
        BEGIN,
        "",
        '8 devices, `precision="fast"` (partial sums travel):',
        "",
        *machine_table("fast"),
        "",
        '8 devices, `precision="accurate"` (contributions travel unsummed, so that bits never change):',
        "",
        *machine_table("accurate"),
        "",
        'Nodes of 8 H100 with 8 ports of 400 Gb/s each, `precision="fast"`:',
        "",
        *order_table(counts),
        "",
        END,
    ]
    return "\n".join(lines)


def measurements() -> str:
    """The part of the page that compares with NCCL."""
    lines = [
        BEGIN_MEASURED,
        "",
        '1 GiB on GPUs, `precision="accurate"`, beside what others measured of NCCL:',
        "",
        *measured_table(),
        "",
        END_MEASURED,
    ]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parts = {(BEGIN_MEASURED, END_MEASURED): measurements(), (BEGIN, END): tables()}
    if "--write" not in arguments:
        print("\n\n".join(parts.values()))
        return 0
    page = PAGE.read_text(encoding="utf-8")
    for (begin, end), made in parts.items():
        page = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _, made=made: made, page, flags=re.S)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

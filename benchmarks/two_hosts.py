"""Two levels against one on two hosts of two ranks: network namespaces with a cable between them.

    python benchmarks/two_hosts.py [--rounds N] [--gbits RATE] [--quick]

Needs Linux, root, iproute2 and unshare. Two levels: ranks of a host combine what they have in shared memory,
and the rest goes over gloo. One level is the same group without shared memory. gloo's own all_reduce is
beside them.
The contenders take turns; the slowest rank counts, and medians are compared. Ours are checked bit for bit.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from promised_rows import parser_of, schedule_of
from same_host import AS_RANK, MIB, in_turns

import crossdevice as cd
from crossdevice.cli.bench.report import machine

RANKS_PER_HOST = 2
SIZES = (4, 64 << 10, 16 * MIB, 100 * MIB)


def be_rank(sizes: list[int], rounds: int) -> None:
    """Measures everything of these sizes; rank 0 prints what was found."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    cluster = cd.cluster_from_env()
    groups = {
        "two levels": cluster.form_group("torch", name="two levels"),
        "one level": cluster.form_group("torch", name="one level", shared_memory=False),
    }
    flat = groups["one level"]
    if groups["two levels"].hosts is None:
        raise RuntimeError("ranks were to be on two hosts")
    dist.init_process_group("gloo")
    for num_bytes in sizes:
        inputs = [
            np.random.default_rng(rank).standard_normal(num_bytes // 4, np.float32)
            for rank in range(flat.size)
        ]
        expected = cd.ReductionToOneDevice().reduce("sum", cd.PerReplica(inputs), "cpu:0").tobytes()
        array, out = inputs[flat.rank], np.empty_like(inputs[0])
        tensor = torch.from_numpy(array.copy())
        del inputs
        contenders: dict[str, Callable[[], Any]] = {
            name: functools.partial(
                cd.CollectiveAllReduce(group=group).reduce, "sum", array, "cpu:0", out=out
            )
            for name, group in groups.items()
        }
        for name, call in contenders.items():
            if call().tobytes() != expected:
                raise AssertionError(f"{name} is wrong at {num_bytes} bytes")
        contenders["gloo"] = functools.partial(dist.all_reduce, tensor)
        times = in_turns(flat, contenders, rounds, repeats=max(1, min(20, MIB // num_bytes)))
        if flat.rank == 0:
            print(json.dumps([num_bytes, {name: statistics.median(found) for name, found in times.items()}]))


def on_two_hosts(words: list[str], gbits: float | None) -> str:
    """What rank 0 prints, of two ranks on each of two hosts that are made for it."""
    nets = [f"crossdevice-{os.getpid()}-{letter}" for letter in "ab"]
    try:
        for net in nets:
            _run("ip", "netns", "add", net)
        _run(
            "ip",
            "-n",
            nets[0],
            "link",
            "add",
            "eth0",
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            nets[1],
        )
        for number, net in enumerate(nets):
            _run("ip", "-n", net, "address", "add", f"10.78.0.{number + 1}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                _run("ip", "-n", net, "link", "set", link, "up")
            if gbits is not None:
                limits = ("rate", f"{gbits:g}gbit", "burst", "1mb", "latency", "50ms")
                _run("tc", "-n", net, "qdisc", "add", "dev", "eth0", "root", "tbf", *limits)
        hosts = [
            subprocess.Popen(
                [*_as_host(net, f"host-{number}"), "sh", "-c", _ranks(words, number)],
                env={
                    **os.environ,
                    "MASTER_ADDR": "10.78.0.1",
                    "MASTER_PORT": "29511",
                    "WORLD_SIZE": str(2 * RANKS_PER_HOST),
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "OMP_NUM_THREADS": "1",
                },
                stdout=subprocess.PIPE,
                text=True,
            )
            for number, net in enumerate(nets)
        ]
        printed = [host.communicate()[0] for host in hosts]
        if any(host.returncode for host in hosts):
            raise RuntimeError(f"ranks failed: {[host.returncode for host in hosts]}")
        return printed[0]
    finally:
        for net in nets:
            subprocess.run(["ip", "netns", "delete", net], capture_output=True)


def _run(*words: str) -> None:
    subprocess.run(words, check=True)


def _as_host(net: str, host: str) -> list[str]:
    """Runs what follows with a network, a host name and processes of its own, and so no memory of others."""
    own = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["ip", "netns", "exec", net, *own, "sh", "-c", f'hostname {host}; exec "$@"', "sh"]


def _ranks(words: list[str], host: int) -> str:
    """The ranks of a host, as a script that ends when all have, with an error if one has."""
    ranks = range(host * RANKS_PER_HOST, (host + 1) * RANKS_PER_HOST)
    started = "; ".join(f"RANK={rank} {shlex.join(words)} & P{rank}=$!" for rank in ranks)
    return f"{started}; " + " && ".join(f"wait $P{rank}" for rank in ranks)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--gbits", type=float, help="the speed of the cable (as fast as memory)")
    arguments = parser.parse_args()
    if sys.platform != "linux" or os.geteuid() != 0:
        print("networks are made by root, on Linux", file=sys.stderr)
        return 2
    schedule = schedule_of(arguments)
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    sizes = [size // (64 if arguments.quick and size > MIB else 1) for size in SIZES]
    words = [sys.executable, __file__, AS_RANK, ",".join(map(str, sizes)), str(schedule.iterations)]
    cable = "as fast as memory" if arguments.gbits is None else f"of {arguments.gbits:g} Gbit/s"
    print(f"# {machine()}, {schedule.iterations} rounds, 2 hosts of {RANKS_PER_HOST} ranks, a cable {cable}")
    print(f"# {'bytes per rank':<16} {'two levels, ms':>14} {'one level':>12} {'gloo':>10} {'gloo/two':>10}")
    for line in on_two_hosts(words, arguments.gbits).splitlines():
        num_bytes, times = json.loads(line)
        two, one, gloo = (times[name] * 1e3 for name in ("two levels", "one level", "gloo"))
        print(f"{num_bytes:<18} {two:>14.3f} {one:>12.3f} {gloo:>10.3f} {gloo / two:>8.2f} x")
    return 0


if __name__ == "__main__":
    if AS_RANK in sys.argv:
        sizes, rounds = sys.argv[sys.argv.index(AS_RANK) + 1 :]
        be_rank([int(size) for size in sizes.split(",")], int(rounds))
    else:
        sys.exit(main())

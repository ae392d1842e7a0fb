"""Three hosts on one machine: namespaces with a network and a host name each, and cables to pull."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time

import pytest

from multiprocess import launching

pytestmark = pytest.mark.more("three networks")

HOSTS = ("host-a", "host-b", "host-c")
DEADLINE_SECONDS = 4.0
LATE_SECONDS = 5.0
HARD_SECONDS = 120.0


def run(*words):
    subprocess.run(words, check=True, capture_output=True, text=True)


@pytest.fixture
def network():
    """A switch with three hosts; yields the names of the switch and of the hosts' networks."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("networks are made by root, on Linux")
    if not all(shutil.which(tool) for tool in ("ip", "unshare", "hostname")):
        pytest.skip("ip (iproute2), unshare and hostname are not all here")
    switch, *nets = (f"crossdevice-{os.getpid()}-{name}" for name in ("switch", *HOSTS))
    try:
        run("ip", "netns", "add", switch)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network can be made here: {error.stderr.strip()}")
    try:
        run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge", "up")
        for number, net in enumerate(nets):
            run("ip", "netns", "add", net)
            plug = f"port{number}"
            run("ip", "-n", switch, "link", "add", plug, "type", "veth", "peer", "name", "eth0", "netns", net)
            run("ip", "-n", switch, "link", "set", plug, "master", "bridge", "up")
            run("ip", "-n", net, "address", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            run("ip", "-n", net, "link", "set", "eth0", "up")
            run("ip", "-n", net, "link", "set", "lo", "up")
        yield switch, nets
    finally:
        for name in (switch, *nets):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def as_host(net, host):
    """Runs what follows with a network, a host name and processes of its own, and so no memory of others."""
    own = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["ip", "netns", "exec", net, *own, "sh", "-c", f'hostname {host}; exec "$@"', "sh"]


def as_hosts(nets, ranks, num_ranks):
    """The ranks on the hosts, as many of them in turn on each as `num_ranks` says."""
    left = iter(ranks)
    for net, host, number in zip(nets, HOSTS, num_ranks, strict=True):
        own = [next(left) for _ in range(number)]
        started = [
            f"RANK={variables['RANK']} {shlex.join(command)} & P{k}=$!"
            for k, (command, variables) in enumerate(own)
        ]
        waited = [f"wait $P{k}" for k in range(number)]
        script = "; ".join([*started, " && ".join(waited)])
        yield (
            [*as_host(net, host), "sh", "-c", script],
            {**own[0][1], "MASTER_ADDR": "10.77.0.1", "CROSSDEVICE_KERNELS": "numpy"},
        )


@pytest.fixture
def cut(network, tmp_path, tmp_path_factory):
    """Launches ranks on the hosts, and pulls a host's cable when all are busy; returns what they report."""
    switch, nets = network

    def run_and_cut(ranks, num_ranks, cut_off):
        cut_at = 0.0

        def pull_the_cable(folder):
            nonlocal cut_at
            end = time.monotonic() + HARD_SECONDS
            while len(list(folder.glob("busy *"))) < len(ranks) and time.monotonic() < end:
                time.sleep(0.1)
            cut_at = time.time()
            run("ip", "-n", switch, "link", "set", f"port{cut_off}", "down")

        commands = list(as_hosts(nets, ranks, num_ranks))
        with launching.in_turn(tmp_path_factory.getbasetemp().parent):
            outcome = launching.launch(commands, tmp_path / "launch", HARD_SECONDS, during=pull_the_cable)
        assert outcome.left == []
        assert set(outcome.reports) == set(range(len(ranks))), outcome.output
        assert outcome.codes == [0, 0, 0], outcome.output
        for facts in outcome.reports.values():
            assert facts["error"] in ("DeadlineError", "ProcessGroupError"), facts
            assert facts["at"] - cut_at < DEADLINE_SECONDS + LATE_SECONDS, facts
        return outcome.reports

    return run_and_cut


def test_a_host_that_is_cut_off_is_named_by_the_others_in_time(cut):
    ranks = launching.ranks("failing_rank.py", "cut", "torch", str(DEADLINE_SECONDS), size=3)
    reports = cut(ranks, (1, 1, 1), cut_off=0)  # the host that keeps the store
    for rank in (1, 2):
        assert "rank 0 (host-a, process " in reports[rank]["text"]


def test_ranks_of_three_hosts_share_memory_where_they_can_and_name_a_host_that_is_cut_off(cut):
    reports = cut(launching.ranks("hosts_rank.py", str(DEADLINE_SECONDS), size=4), (1, 1, 2), cut_off=2)
    for rank, facts in reports.items():
        assert facts["hosts"] == [[0], [1], [2, 3]]
        assert "within hosts (rank 0; rank 1; ranks 2, 3), over gloo between them" in facts["explained"]
        assert "rank 1 (host-b, process " in facts["explained"]
        assert "is in another container or on another host" in facts["explained"]
        assert facts["same"] == [True] * 6
        if rank < 2:
            assert "(host-c, process " in facts["text"]

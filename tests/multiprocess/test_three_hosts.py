"""Three hosts on one machine: namespaces with a network and a host name each, and cables to pull."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import pytest

from multiprocess import launching

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


@pytest.mark.parametrize("cut_off", [0, 2], ids=["the host that keeps the store", "another host"])
def test_a_host_that_is_cut_off_is_named_by_the_others_in_time(cut_off, network, tmp_path, tmp_path_factory):
    switch, nets = network
    ranks = launching.ranks("failing_rank.py", "cut", "torch", str(DEADLINE_SECONDS), size=len(HOSTS))
    commands = [
        ([*as_host(net, host), *command], {**variables, "MASTER_ADDR": "10.77.0.1"})
        for net, host, (command, variables) in zip(nets, HOSTS, ranks, strict=True)
    ]
    cut_at = 0.0

    def pull_the_cable(folder):
        nonlocal cut_at
        end = time.monotonic() + HARD_SECONDS
        while len(list(folder.glob("busy *"))) < len(HOSTS) and time.monotonic() < end:
            time.sleep(0.1)
        cut_at = time.time()
        run("ip", "-n", switch, "link", "set", f"port{cut_off}", "down")

    with launching.in_turn(tmp_path_factory.getbasetemp().parent):
        outcome = launching.launch(commands, tmp_path / "launch", HARD_SECONDS, during=pull_the_cable)
    assert outcome.left == []
    assert set(outcome.reports) == {0, 1, 2}, outcome.output
    for rank, facts in outcome.reports.items():
        assert facts["error"] in ("DeadlineError", "ProcessGroupError"), facts
        assert facts["at"] - cut_at < DEADLINE_SECONDS + LATE_SECONDS, facts
        if rank != cut_off:
            assert f"rank {cut_off} ({HOSTS[cut_off]}, process " in facts["text"]
    assert outcome.codes == [0, 0, 0], outcome.output

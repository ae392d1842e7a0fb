"""Processes on one GPU reduce over each other's memory or in chunks, with the bits of the host."""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from multiprocess import launching

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("PyTorch sees no GPU", allow_module_level=True)

RANK = Path(__file__).with_name("peer_rank.py")
LAWS_RANK = Path(__file__).with_name("laws_on_gpu_rank.py")
KILLED_RANK = Path(__file__).with_name("killed_peer_rank.py")


NUM_RANKS, NUM_LAUNCHES = 6, 4
"""Of those that are killed, one after the other until one is left."""

EXPLAINED = {
    "1": "1 value by peer memory: one process of each GPU sums its shard (of reduce_scatter the parts "
    "there) from the GPU memory of all (rank 0)",
    "each": "1 value by peer memory: each process sums its shard (of reduce_scatter its part) from the GPU "
    "memory of all",
    "0": "1 value by staged: through memory of the host that processes share, in chunks: one is combined "
    "while others are copied from and to the GPU",
}


@pytest.mark.parametrize(("size", "wish"), [(2, "1"), (3, "each"), (4, "1"), (4, "each"), (4, "0")])
def test_peer_memory_gives_the_bits_of_the_host(tmp_path, monkeypatch, size, wish):
    monkeypatch.setenv("CROSSDEVICE_PEER_MEMORY", wish)
    found = launching.launch(launching.torchrun(str(RANK), "laws", size=size), tmp_path, 250.0)
    assert found.codes == [0], found.output
    assert len(found.reports) == size
    for facts in found.reports.values():
        assert facts["explained"] == EXPLAINED[wish]
        assert facts["cases"] > 250
        assert facts["wrong"] == []
        assert facts["wrong parts"] == []
        assert facts["wrong moves"] == []
        assert facts["copies of GPU memory"] == (0 if wish == "0" else 4 * 2 * 3 + 6)
        # What has no kernel is staged: exact sums and means of float64, true means of integers.
        ways = {(name, device): number for name, device, number in facts["ways"]}
        number = 8 * 2 * 4 * (2 if wish == "0" else 3)  # dtypes, operations, shapes, precisions
        assert ways.pop(("HostReduceScatter", "cpu")) == number
        assert sum(ways.values()) == number
        assert (wish == "0") == (ways.get(("StagedReduction", "cuda")) == number)
        assert set(ways) <= {("PeerReduceScatter", "cuda"), ("StagedReduction", "cuda")}
        truths = (
            "two replicas",
            "out",
            "transposed",
            "in place",
            "tree",
            "repeated",
            "bound",
            "thread",
            "late",
        )
        truths += ("two parts", "tree of parts", "parts in out", "late parts")
        for name in truths:
            answers = facts[name] if isinstance(facts[name], list) else [facts[name]]
            assert all(answers), name


@pytest.mark.parametrize(("size", "wish"), [*itertools.product([2, 4], EXPLAINED)])
def test_the_laws_of_reductions_are_kept_on_gpus(tmp_path, monkeypatch, size, wish):
    monkeypatch.setenv("CROSSDEVICE_PEER_MEMORY", wish)
    found = launching.launch(launching.torchrun(str(LAWS_RANK), size=size), tmp_path, 250.0)
    assert found.codes == [0], found.output
    assert len(found.reports) == size
    for facts in found.reports.values():
        assert facts["explained"] == EXPLAINED[wish]
        assert len(facts["fates"]) > 20
        broken = [name + fate[-600:] for name, fate in facts["fates"].items() if fate != "kept"]
        assert not broken, "\n".join(broken)


def test_killed_ranks_are_named_and_harm_nobody_who_reads_their_memory(tmp_path):
    seed = random.randrange(1 << 30)
    with ThreadPoolExecutor(NUM_LAUNCHES) as pool:
        wishes = ["1", "each"] * (NUM_LAUNCHES // 2)
        launches = [
            pool.submit(killing, tmp_path / str(number), random.Random(seed + number), wish)
            for number, wish in enumerate(wishes)
        ]
    for launch in launches:
        found, killed = launch.result()
        assert found.left == []
        (last,) = set(range(NUM_RANKS)) - set(killed)
        assert found.codes[last] == 0, (seed, found.output)
        alive = list(range(NUM_RANKS))
        for odd, facts in zip(killed, found.reports[last], strict=True):
            assert facts["error"] == "ProcessGroupError", (seed, facts)
            assert f"rank {alive.index(odd)} (" in facts["text"], (seed, facts)
            assert facts["seconds"] < 30
            assert facts["is_input_whole"]
            assert facts["calls"] > 0
            alive.remove(odd)


def killing(folder, source, wish):
    """What became of a launch whose ranks were killed at random moments, and in which order they were."""
    killed = []

    def kill(folder):
        alive = list(range(NUM_RANKS))
        for number in range(NUM_RANKS - 1):
            end = time.monotonic() + 120
            while len(list(folder.glob(f"ready {number} *"))) < len(alive):
                assert time.monotonic() < end, f"ranks are not ready for kill {number}"
                time.sleep(0.01)
            time.sleep(source.random() * 0.1)
            odd = source.choice(alive)
            os.kill(int((folder / f"ready {number} {odd}").read_text()), signal.SIGKILL)
            (folder / "part").write_text(str(odd))
            (folder / "part").rename(folder / f"killed {number}")
            alive.remove(odd)
            killed.append(odd)

    ports = [str(launching.free_port()) for _ in range(NUM_RANKS - 1)]
    commands = launching.ranks(str(KILLED_RANK), *ports, size=NUM_RANKS)
    commands = [(command, {**more, "CROSSDEVICE_PEER_MEMORY": wish}) for command, more in commands]
    return launching.launch(commands, folder, 250.0, kill), killed

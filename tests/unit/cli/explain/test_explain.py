"""What `crossdevice explain` prints."""

import json

import pytest

from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.cli.main import main
from crossdevice.costs.topology import read_topology, topology_names


def said(capsys, *words):
    assert main(["explain", *words]) == 0
    return capsys.readouterr().out


def test_everything_is_described(capsys):
    words = ["--algorithm", "hierarchical", "--devices", "8", "--topology", "dgx1v", "--bytes", "100MiB"]
    text = said(capsys, *words, "--steps")
    first, second, third, fourth = text.splitlines()[:4]
    assert first == "HierarchicalCopyAllReduce: all-reduce of 100 MiB on 8 devices, precision accurate"
    assert second.startswith("dgx1v: DGX-1V")
    assert third.startswith("predicted: ")
    assert "latency" in third
    assert "bandwidth" in third
    assert "reduction" in third
    assert fourth.startswith("why: ")
    for title in ("bytes per link", "peak memory per device", "what other algorithms would cost", "steps"):
        assert f"\n{title}" in text
    assert "= copy b1[0:26214400] from cuda:1 to cuda:0 (100 MiB)" in text


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("topology", topology_names())
def test_every_algorithm_on_every_topology(capsys, name, topology):
    answer = json.loads(said(capsys, "--ops", name, "--topology", topology, "--bytes", "4K", "--json"))
    assert answer["seconds"] > 0
    split = sum(answer[f"{part}_seconds"] for part in ("latency", "bandwidth", "reduction"))
    assert split == pytest.approx(answer["seconds"])
    assert set(answer["others"]) >= set(ALGORITHMS) - {"nccl", name}
    assert answer["reason"]
    assert len(answer["peak_bytes"]) == answer["devices"]


def test_the_reason_agrees_with_the_table(capsys):
    for name in ALGORITHMS:
        answer = json.loads(said(capsys, "--ops", name, "--topology", "dgx1v", "--bytes", "100MiB", "--json"))
        seconds = {name: answer["seconds"], **{k: one["seconds"] for k, one in answer["others"].items()}}
        first, second, *_ = sorted(seconds, key=lambda each: seconds[each])
        assert (first, second) == ("nccl", "halving_doubling")
        begin = {
            "nccl": "the fastest here: the next, halving_doubling",
            "halving_doubling": "the fastest here (nccl aside, which adds in its own order): the next",
        }.get(
            name, "halving_doubling is the fastest here (nccl aside, which adds in its own order): this takes"
        )
        assert answer["reason"].startswith(begin)


@pytest.mark.parametrize("topology", topology_names())
def test_one_device_is_explained_too(capsys, topology):
    assert " on 1 device, precision" in said(capsys, "--devices", "1", "--topology", topology)


@pytest.mark.parametrize("topology", topology_names())
def test_without_steps_it_is_a_summary(capsys, topology):
    devices = 8 if read_topology(topology).network is None else 64
    text = said(capsys, "--ops", "ring", "--topology", topology, "--devices", str(devices))
    assert len(text.splitlines()) <= 25
    assert max(map(len, text.splitlines())) <= 160
    assert "= copy" not in text


def test_algorithms_that_take_the_same_time_are_not_said_to_be_slower(capsys):
    words = ["explain", "--topology", "pcie", "--devices", "2", "--algorithm"]
    for name, others in (
        ("ring", "halving_doubling, tree, direct"),
        ("tree", "ring, halving_doubling, direct"),
    ):
        assert main([*words, name]) == 0
        text = capsys.readouterr().out
        assert f"why: among the fastest here, with {others}" in text
        assert "1.00 times" not in text


def test_what_travels_depends_on_the_precision(capsys):
    words = ["--ops", "ring", "--topology", "hgx_h100", "--devices", "4", "--steps"]
    fast, accurate = (said(capsys, *words, "--precision", each) for each in ("fast", "accurate"))
    assert "travels: 6 MiB of partial sums in 6 rounds (under accurate 9 MiB of contributions)" in fast
    assert (
        "travels: 9 MiB of contributions, unsummed, in 6 rounds (under fast 6 MiB of partial sums)"
        in accurate
    )
    assert "4 results, 6 rounds, 6 MiB between devices" in fast
    assert "4 results, 6 rounds, 9 MiB between devices" in accurate
    assert "(3 contributions of 256 KiB)" in accurate
    assert "contributions of" not in fast.partition("\nsteps")[2]


def test_the_page_is_named(capsys, tmp_path):
    assert main(["explain", "--devices", "2", "--topology", "dgx1v", "--html", str(tmp_path / "a.html")]) == 0
    assert capsys.readouterr().err.startswith(f"wrote {tmp_path / 'a.html'} (")


def test_thousands_of_devices_are_timed_and_not_listed(capsys):
    text = said(capsys, "--ops", "tree", "--topology", "hgx_h100", "--devices", "2048", "--bytes", "1K")
    assert "on 2048 devices in 256 nodes" in text
    assert "too many devices to list the plan" in text
    assert "\nsteps" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ops", "rings"], "is not an all-reduce algorithm"),
        (["--topology", "dgx9"], "is not a topology"),
        (["--bytes", "many"], "is not a size"),
        (["--devices", "0"], "--devices must be 1 or more"),
        (["--topology", "hgx_h100", "--devices", "32", "--html", "page.html"], "up to 16 devices"),
    ],
)
def test_what_makes_no_sense_is_one_line(capsys, words, message):
    assert main(["explain", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.more("rich")
def test_a_terminal_with_rich_gets_tables(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("TERM", raising=False)
    words = ["--ops", "ring", "--topology", "dgx1v", "--devices", "2", "--bytes", "64", "--steps"]
    text = said(capsys, *words)
    assert "what other algorithms would cost" in text
    assert "cuda:1" in text

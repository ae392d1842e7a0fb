"""The order of algorithms by size and number of devices, with the reasons that docs/choosing.md gives."""

import json

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.choosing import choose_algorithm, is_engine, predicted_durations
from crossdevice.costs.topology import read_topology
from crossdevice.errors import OptionError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
OURS = [name for name in ALGORITHMS if not is_engine(name)]
FOUR = ("ring", "tree", "halving_doubling", "hierarchical_copy")


def order(count, size):
    """The four of them, fastest first, with partial sums that travel summed."""
    durations = predicted_durations(read_topology("hgx_h100", count), size, precision="fast")
    return sorted(FOUR, key=lambda name: durations[name].seconds)


def test_16384_devices_are_timed_from_few_transfers():
    # Some microseconds each; spelled out, a ring alone would have 537 million.
    topology = read_topology("hgx_h100", 16384)
    for name in OURS:
        rounds = ALGORITHMS.load(name)().plan_rounds(topology, GIB)
        assert (
            sum(len(one.transfers) for one in {id(one.transfers): one for one in rounds}.values()) < 140_000
        )


def test_precisions_that_keep_bits_prefer_algorithms_that_send_no_partial_sums():
    assert choose_algorithm(8, "hgx_h100", GIB).name == "direct"
    assert (
        choose_algorithm(8, "hgx_h100", GIB).seconds["ring"]
        > 2 * choose_algorithm(8, "hgx_h100", GIB, precision="fast").seconds["ring"]
    )


def test_every_choice_gives_the_same_bits():
    rng = np.random.default_rng(0)
    value = cd.PerReplica([rng.standard_normal(1000).astype(np.float32) for _ in range(8)])
    stepwise = cd.CommunicationOptions(lowering="off")
    names = {
        choose_algorithm(8, name, size).name
        for name in ("hgx_h100", "dgx1v", "pcie")
        for size in (KIB, MIB, GIB)
    }
    results = {
        ALGORITHMS.load(name)().reduce("sum", value, "cpu:0", stepwise).tobytes() for name in {*names, *OURS}
    }
    assert len(results) == 1
    assert names <= set(OURS), "an engine sums in its own way"


def test_the_answer_is_an_algorithm_with_a_reason_and_every_ones_time():
    answer = choose_algorithm(["cuda:0", "cuda:1"], read_topology("pcie"), MIB)
    assert isinstance(answer.cross_device_ops, cd.CrossDeviceOps)
    assert answer.reason.startswith(f"{answer.name} is fastest, predicted on pcie")
    assert list(answer.seconds.values()) == sorted(answer.seconds.values())
    assert set(answer.seconds) == set(OURS)


def test_measurements_decide_where_there_are_any_near(tmp_path):
    path = tmp_path / "measured.json"
    rows = [
        {"algorithm": name, "devices": 8, "bytes": MIB, "seconds": seconds}
        for name, seconds in (("tree", 1e-6), ("ring", 2e-6), ("nccl", 1e-9))
    ]
    path.write_text(json.dumps({"measured": rows}))
    near = choose_algorithm(8, "hgx_h100", 2 * MIB, measured=path)
    assert (near.name, dict(near.seconds)) == ("tree", {"tree": 1e-6, "ring": 2e-6})
    assert "measured in measured.json" in near.reason
    assert "predicted" in choose_algorithm(8, "hgx_h100", 3 * MIB, measured=path).reason
    assert "predicted" in choose_algorithm(4, "hgx_h100", MIB, measured=path).reason


def test_what_makes_no_sense_is_refused(tmp_path):
    for size in (0, "1M", None, float("nan")):
        with pytest.raises(OptionError, match="num_bytes must be a number, 1 or more; got"):
            choose_algorithm(8, "hgx_h100", size)
    with pytest.raises(OptionError, match="precision must be one of"):
        choose_algorithm(8, "hgx_h100", 1, precision="quick")
    path = tmp_path / "measured.json"
    path.write_text("[]")
    with pytest.raises(OptionError, match="cannot be read"):
        choose_algorithm(8, "hgx_h100", 1, measured=path)
    complete = {"algorithm": "tree", "devices": 4, "bytes": 1, "seconds": 1}
    path.write_text(json.dumps({"measured": [complete, {"algorithm": "ring", "devices": 4, "seconds": 1}]}))
    with pytest.raises(OptionError, match="entry 1 of 'measured' lacks bytes; got"):
        choose_algorithm(8, "hgx_h100", 1, measured=path)


def test_one_device_takes_no_time():
    assert set(choose_algorithm(1, "dgx1v", MIB).seconds.values()) == {0.0}


def test_algorithms_of_third_parties_that_fail_are_left_out_with_a_warning(tmp_path, monkeypatch):
    (tmp_path / "third_party.py").write_text(
        "import crossdevice as cd\n"
        "class Skips(cd.CrossDeviceOps):\n"
        "    def plan_sum(self, build, destinations):\n"
        "        total = build.add(build.inputs[1:], at=destinations[0])\n"
        "        return [build.copy(total, to=device) for device in destinations]\n"
        "class Engine(cd.DirectAllReduce):\n"
        "    uses_engine = True\n"
    )
    info = tmp_path / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[crossdevice.algorithms]\n"
        "absent = no_such_module:Any\nunnamed = third_party:Nope\nskips = third_party:Skips\n"
        "engine = third_party:Engine\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match="left out") as warned:
        choice = choose_algorithm(8, "hgx_h100", MIB)
    assert choice.name == "direct"
    assert "engine" not in choice.seconds, "it would change bits"
    assert [str(warning.message) for warning in warned] == [
        "the algorithm 'absent' is left out: 'absent', an all-reduce algorithm, needs no_such_module, "
        "which is not installed",
        "the algorithm 'unnamed' is left out: 'third_party:Nope' names nothing: "
        "module third_party has no Nope",
        "the algorithm 'skips' is left out: Skips.plan_sum gives a wrong plan: "
        "replica 0 (cuda:0) missing from output 0",
    ]

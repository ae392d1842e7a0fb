"""Facts about the built-in topologies, and about files of one's own."""

import pytest

from crossdevice.costs.topology import DirectLinks, read_topology, topology_names
from crossdevice.errors import TopologyError

GIGA = 1e9


@pytest.mark.parametrize("name", topology_names())
def test_every_built_in_joins_all_pairs_and_names_its_sources(name):
    topology = read_topology(name)
    assert topology.name == name
    assert topology.sources
    for source in range(topology.num_devices):
        for target in range(topology.num_devices):
            if source != target:
                route = topology.route(source, target)
                assert route.links
                assert 0 < route.bytes_per_second <= min(link.bytes_per_second for link in route.links)


def test_a_dgx1_has_six_wires_per_device_and_lacks_wires_between_some():
    fabric = read_topology("dgx1v").fabric
    assert isinstance(fabric, DirectLinks)
    assert [sum(row) for row in fabric.counts] == [6] * 8
    assert fabric.route("", 0, 1).bytes_per_second == 40 * GIGA
    assert fabric.route("", 0, 5).bytes_per_second < 12 * GIGA


def test_without_peer_access_copies_take_twice_as_long():
    with_peers, without = read_topology("pcie"), read_topology("pcie_without_peer_access")
    assert with_peers.route(0, 1).bytes_per_second == 2 * without.route(0, 1).bytes_per_second
    assert len(with_peers.route(0, 1).links) == 2
    assert any("socket" in link.name for link in with_peers.route(0, 7).links)


def test_devices_of_other_nodes_are_reached_over_the_rail_of_the_device():
    topology = read_topology("hgx_h100", 24)
    assert topology.num_nodes == 3
    assert [link.name for link in topology.route(3, 19).links] == ["node0 port3>", ">node2 port3"]
    oversubscribed = read_topology("hgx_h100_oversubscribed", 16)
    core = oversubscribed.route(0, 8).links[1]
    assert core.name == "node0>core"
    assert core.bytes_per_second == 8 * 48 * GIGA / 4


def test_a_host_has_as_many_devices_as_asked_for_and_a_box_has_not():
    assert read_topology("host", 100).num_nodes == 1
    with pytest.raises(TopologyError, match="has 8 devices and no network; got 9"):
        read_topology("pcie", 9)


def test_a_file_can_say_only_what_differs_from_a_built_in(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'like = "dgx1v"\nname = "mine"\n[memory]\ngigabytes_per_second = 1\nstep_microseconds = 1\n'
    )
    mine = read_topology(path)
    assert mine.memory_bytes_per_second == 1 * GIGA
    assert mine.fabric == read_topology("dgx1v").fabric


LINKS = (
    '[links]\nkind = "{}"\ngigabytes_per_second = {}\nlatency_microseconds = 1\nmessage_microseconds = 1\n'
)
COST = "gigabytes_per_second = 1\nlatency_microseconds = 1\nmessage_microseconds = 1\n"
HEAD = 'name = "x"\nsummary = "x"\ndevice_type = "cpu"\ndevices = 2\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "is not valid TOML"),
        ('name = "x"', "lacks 'devices'|lacks 'summary'"),
        ('like = "dgx9"', "expected one of"),
        (
            'like = "dgx1v"\nnodes = 2',
            "the file has 'nodes', which nothing reads; expected some of device_type",
        ),
        (
            'like = "hgx_h100"\n[network]\n' + COST + "ports_per_node = 1\noversubscripton = 4\n",
            r"\[network\] has 'oversubscripton', .* message_microseconds, oversubscription, ports_per_node",
        ),
        ('like = "host"\n' + LINKS.format("memory", 1) + "counts = []", r"\[links\] has 'counts', which"),
        (HEAD + LINKS.format("torus", 1), "expected memory, switch, host or pairs"),
        (HEAD + LINKS.format("switch", 0), "must be above 0"),
        (HEAD + LINKS.format("pairs", 1) + "counts = [[0, 1]]", "2 rows of 2 numbers"),
        (HEAD + LINKS.format("pairs", 1) + "counts = [[0, 1], [2, 0]]", "a wire has two ends"),
    ],
)
def test_files_that_make_no_sense_are_refused(tmp_path, text, message):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(TopologyError, match=message):
        read_topology(path)
    with pytest.raises(TopologyError, match="cannot be read"):
        read_topology(tmp_path / "absent.toml")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(TopologyError, match="is not valid TOML"):
        read_topology(path)

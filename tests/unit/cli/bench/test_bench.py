import html.parser
import io
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from crossdevice.backends.protocol import dtype_named
from crossdevice.cli.bench import calibration, data, local_competitors, measure, process
from crossdevice.cli.bench.peers import PEERS
from crossdevice.cli.bench.workload import COLLECTIVES, DTYPES, Workload
from crossdevice.cli.main import main
from crossdevice.cli.terminal import progress
from crossdevice.values.dtypes import FLOATS

TINY = ["bench", "-b", "1K", "-e", "4K", "-f", "4", "-n", "2", "-w", "1", "-g", "3"]
FIGURES = ["time", "algbw", "busbw", "#wrong"]
NCCL_COLUMNS = ["size", "count", "type", "redop", "root", *FIGURES, *FIGURES]


@pytest.fixture(autouse=True)
def _quickly(monkeypatch):
    monkeypatch.setattr(calibration, "LIMIT_BYTES", 1 << 20)
    monkeypatch.setattr(measure, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(measure, "PAUSE_SECONDS", 0.0)


def competitor_of(row):
    """The last cell, which like "own dtype" before it may have two words."""
    return " ".join(row[16 if row[14] == "own" else 15 :])


def table(text):
    """The rows as lists of cells, and the # lines without their #."""
    lines = text.splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    return rows, [line[1:].strip() for line in lines if line.startswith("#")]


# -------------------------------------------------------------------- the table


def test_columns_rows_and_footer_are_those_of_nccl_tests(capsys):
    assert main(TINY) == 0
    rows, remarks = table(capsys.readouterr().out)
    assert NCCL_COLUMNS in [remark.split() for remark in remarks]
    assert [row[:5] for row in rows] == [
        ["1024", "256", "float32", "sum", "-1"],
        ["4096", "1024", "float32", "sum", "-1"],
    ]
    for row in rows:
        assert len(row) == len(NCCL_COLUMNS)
        assert row[8] == row[12] == "0"
    footer = "\n".join(remarks[-2:])
    assert re.fullmatch(r"Out of bounds values : 0 OK\nAvg bus bandwidth    : [\d.e-]+", footer)


def test_the_header_tells_about_the_machine(capsys):
    main(TINY)
    header = "\n".join(table(capsys.readouterr().out)[1])
    for word in (f"NumPy {np.__version__}", "cores", "threads", "copy limit", "minBytes 1024 maxBytes 4096"):
        assert word in header


def test_without_a_terminal_nothing_but_the_table_is_written(capsys):
    main(TINY)
    assert capsys.readouterr().err == ""


def test_bandwidths_follow_from_sizes_and_times(tmp_path):
    main([*TINY, "-J", str(tmp_path / "results.json")])
    written = json.loads((tmp_path / "results.json").read_text())
    for result in written["results"]:
        for place in ("out_of_place", "in_place"):
            cells = result[place]
            assert cells["alg_bw"] == pytest.approx(result["size"] / cells["time"] / 1e3)
            assert cells["bus_bw"] == pytest.approx(cells["alg_bw"] * 4 / 3)
    assert written["out_of_bounds"] == {"count": 0, "okay": True}
    assert written["config"]["command"].startswith("crossdevice bench --minbytes 1K")


def test_unchecked_results_are_not_called_right(tmp_path, capsys):
    main([*TINY, "-c", "0"])
    rows, remarks = table(capsys.readouterr().out)
    assert rows[0][8] == "N/A"
    assert "Out of bounds values : unchecked" in remarks


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_collective_is_measured_and_right(collective, backend, capsys):
    pytest.importorskip(backend)
    assert main([*TINY, "--collective", collective, "--backend", backend]) == 0
    rows, remarks = table(capsys.readouterr().out)
    assert [row[8] for row in rows] == ["0", "0"]
    assert [row[12] for row in rows] == (["N/A"] * 2 if collective == "gather" else ["0", "0"])
    assert "Out of bounds values : 0 OK" in remarks


def in_a_fresh_interpreter(program):
    """What a program prints, its last complaint, and its exit code; a library can be started only once."""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return ended.stdout, "".join(ended.stderr.splitlines()[-1:]), ended.returncode


@pytest.mark.more("JAX or TensorFlow")
@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_libraries_that_fix_their_devices_when_they_start_get_as_many_as_asked_for(backend):
    pytest.importorskip(backend)
    words = [*TINY, "-e", "1K", "-n", "1", "-d", "double", "--backend", backend]
    out, complaint, code = in_a_fresh_interpreter(
        f"from crossdevice.cli.main import main; raise SystemExit(main({words}))"
    )
    assert code == 0, complaint
    assert "# Out of bounds values : 0 OK" in out


@pytest.mark.more("JAX")
def test_a_library_that_has_started_with_too_few_devices_is_refused_in_one_line():
    pytest.importorskip("jax")
    out, complaint, code = in_a_fresh_interpreter(
        "import jax; jax.config.update('jax_num_cpu_devices', 2); jax.devices('cpu')\n"
        "from crossdevice.cli.main import main\n"
        f"raise SystemExit(main({[*TINY, '--backend', 'jax']}))"
    )
    assert (out, code) == ("", 2)
    assert complaint.startswith("crossdevice bench: cpu:2 does not exist for jax arrays; those that do are")


def test_names_of_nccl_tests_are_understood(capsys):
    assert main([*TINY, "-d", "half", "-o", "avg"]) == 0
    assert table(capsys.readouterr().out)[0][0][2:4] == ["float16", "mean"]


def test_all_algorithms_can_be_measured_beside_each_other(capsys):
    assert main([*TINY, "-e", "1K", "--algorithm", "all"]) == 0
    names = {competitor_of(row) for row in table(capsys.readouterr().out)[0]}
    assert {"crossdevice ring", "crossdevice tree", "crossdevice direct"} < names
    assert "crossdevice nccl" not in names


def test_options_reach_the_reduction(tmp_path):
    path = tmp_path / "results.json"
    main([*TINY, "--share-results", "-J", str(path)])
    cells = json.loads(path.read_text())["results"][0]
    assert cells["out_of_place"]["memory"] == "shared"
    assert cells["in_place"] is None
    main([*TINY, "--fresh", "--lowering", "off", "--precision", "fast", "--threads", "1", "-J", str(path)])
    cells = json.loads(path.read_text())["results"][0]["out_of_place"]
    assert (cells["memory"], cells["results"]) == ("own", "fresh")


def test_pytorch_has_the_threads_it_had_before(capsys):
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    main([*TINY, "--threads", str(before + 1)])
    assert torch.get_num_threads() == before


# -------------------------------------------------------------------- wrong results


BROKEN = """
import numpy as np
import crossdevice as cd

class OneUnitOff(cd.DirectAllReduce):
    def reduce(self, *arguments, **named):
        result = super().reduce(*arguments, **named)
        for array in result.values[1:2]:
            array[3:4] = np.nextafter(array[3], np.float32(9))
        return result

class NotANumber(cd.DirectAllReduce):
    def reduce(self, *arguments, **named):
        result = super().reduce(*arguments, **named)
        result.values[2][7] = np.nan
        return result

class ForgetsAReplica(cd.DirectAllReduce):
    def reduce(self, op, value, destinations, options=None, *, out=None):
        arrays = [value.values[0], value.values[1], np.zeros_like(value.values[2])]
        return super().reduce(op, cd.PerReplica(arrays), destinations, options, out=list(out))

class DoesNothing(cd.DirectAllReduce):
    def reduce(self, op, value, destinations, options=None, *, out=None):
        return cd.Mirrored(out.values if hasattr(out, "values") else out)

class NoAlgorithm:
    pass
"""


@pytest.fixture
def broken(tmp_path, monkeypatch):
    (tmp_path / "broken_ops.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("broken_ops", None)


@pytest.mark.parametrize(
    ("name", "least"),
    [("OneUnitOff", 1), ("NotANumber", 1), ("ForgetsAReplica", 3 * 256 - 20), ("DoesNothing", 3 * 256 - 20)],
)
@pytest.mark.usefixtures("broken")
def test_wrong_results_are_counted_and_fail(name, least, capsys):
    assert main([*TINY, "-e", "1K", "--algorithm", f"broken_ops:{name}"]) == 1
    (row,), remarks = table(capsys.readouterr().out)
    assert int(row[8]) >= least
    assert int(row[12]) >= least
    assert f"Out of bounds values : {int(row[8]) + int(row[12])} FAILED" in remarks


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (dtype, op)
        for dtype in DTYPES
        for op in ("SUM", "MEAN", "MIN", "MAX", "PROD")
        if op != "MEAN" or dtype in FLOATS
    ],
)
def test_the_oracle_accepts_a_plain_loop_and_refuses_a_changed_element(dtype, op):
    work = Workload("all_reduce", op, dtype, 3, ((70000,), (5, 2)))
    ready = local_competitors.NumpyLoop().ready(work, data.all_arrays(work))
    for place in ready.places:
        assert ready.inspect(place, counts_wrong=True) == ("own", 0)
    arrays = [array.copy() for array in data.replica_arrays(work, 0)]
    function = {"MIN": np.minimum, "MAX": np.maximum, "PROD": np.multiply}.get(op, np.add)
    for replica in (1, 2):
        arrays = [function(a, b) for a, b in zip(arrays, data.replica_arrays(work, replica), strict=True)]
    if op == "MEAN":
        arrays = [(array / dtype_named(dtype).type(3)).astype(dtype_named(dtype)) for array in arrays]
    arrays[0][69999] += 1
    arrays[1][4] += 1
    assert data.num_wrong(work, [arrays], rounds_once=False) == 2


# -------------------------------------------------------------------- peers


@pytest.mark.parametrize("collective", ["all_reduce", "reduce"])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("name", ["NumpyStack", "TorchStack", "TorchOneShot", "TorchForeach"])
def test_sums_in_one_call_are_right_wherever_results_go(name, op, collective):
    work = Workload(collective, op, "float32", 3, ((7000,), (5, 2)))
    inputs = data.all_arrays(work)
    ready = getattr(local_competitors, name)().ready(work, inputs)
    assert ready.places == ("fresh", "given")
    for place in ready.places:
        assert ready.inspect(place, counts_wrong=True) == ("own", 0)


@pytest.mark.more("one more launch")
def test_compiled_sums_are_right():
    work = Workload("all_reduce", "MEAN", "float32", 3, ((7000,), (5, 2)))
    ready = local_competitors.TorchCompiled().ready(work, data.all_arrays(work))
    assert ready.inspect("given", counts_wrong=True) == ("own", 0)


@pytest.mark.more("JAX")
def test_jitted_sums_are_right(capsys):
    pytest.importorskip("jax")
    assert main([*TINY, "--collective", "reduce", "--against", "jax_jit"]) == 0
    assert "jax_jit" in capsys.readouterr().out.splitlines()[-1]


def test_peers_are_measured_beside_crossdevice(capsys):
    pytest.importorskip("torch")
    assert main([*TINY, "-o", "avg", "--against", "numpy,torch,torch_flatten"]) == 0
    rows, remarks = table(capsys.readouterr().out)
    names = ["crossdevice direct", "numpy", "torch", "torch_flatten"]
    assert [competitor_of(row) for row in rows] == names * 2
    assert {row[13] for row in rows} == {"own"}
    assert {row[8] for row in rows} == {"0"}
    assert any(remark.startswith("Time / time of crossdevice direct (own)") for remark in remarks)
    assert any(
        re.match(r"torch_flatten \(own, new results\) +[\d.]+x +[\d.]+x", remark) for remark in remarks
    )


def test_a_peer_that_is_not_installed_is_said_to_be(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main([*TINY, "--against", "jax"]) == 0
    assert "# jax: left out, jax not installed" in capsys.readouterr().out


def test_work_that_a_peer_cannot_do_is_said(capsys):
    assert main([*TINY, "-d", "int32", "-o", "avg", "--against", "numpy"]) == 0
    rows, remarks = table(capsys.readouterr().out)
    assert len(rows) == 2
    assert remarks.count("numpy: left out, no mean of integers as crossdevice defines it") == 1


def test_a_peer_in_processes_of_its_own_takes_part(capsys):
    pytest.importorskip("torch")
    assert main([*TINY, "-e", "1K", "-g", "2", "--against", "gloo"]) == 0
    _, row = table(capsys.readouterr().out)[0]
    assert row[5:9] == ["N/A"] * 4  # gloo only works in place
    assert row[12:] == ["0", "own", "own", "dtype", "gloo"]


def test_a_peer_that_does_not_start_is_said_with_its_last_words(monkeypatch, tmp_path, capsys):
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'it is broken' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr(process.sys, "executable", str(fake))
    monkeypatch.setattr("crossdevice.cli.bench.command.peer_unavailable", lambda name: None)
    assert main([*TINY, "--against", "jax"]) == 0
    assert "# jax: left out, jax did not start: it is broken" in capsys.readouterr().out


def test_every_peer_says_what_it_is_and_what_it_needs():
    for name, peer in PEERS.items():
        assert peer.what, name
        assert peer.needs, name


# -------------------------------------------------------------------- files


class Cells(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags = []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)


def test_the_chart_has_a_line_per_competitor_and_the_limit(tmp_path):
    svg, page = tmp_path / "chart.svg", tmp_path / "chart.html"
    main([*TINY, "--against", "numpy", "--chart", str(svg), "--chart", str(page)])
    root = ElementTree.fromstring(svg.read_text())
    space = {"s": "http://www.w3.org/2000/svg"}
    assert len(root.findall(".//s:polyline", space)) == 2
    assert len(root.findall(".//s:line[@class='sample']", space)) == 2
    assert len(root.findall(".//s:circle", space)) == 2 * 2
    assert len(root.findall(".//s:line[@class='limit']", space)) == 1
    texts = [text.text for text in root.findall(".//s:text", space)]
    assert "numpy (own)" in texts
    assert any(text.startswith("copy limit of this machine") for text in texts)
    cells = Cells()
    cells.feed(page.read_text())
    assert cells.tags.count("svg") == 1
    assert cells.tags.count("tr") == 1 + 2 * 2
    assert "http" not in page.read_text().replace("http://www.w3.org/2000/svg", "")


@pytest.mark.more("rich")
def test_on_a_terminal_there_is_a_progress_bar(monkeypatch):
    pytest.importorskip("rich")

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.delenv("TERM", raising=False)
    with progress(2) as advance:
        advance("1024 B")
    assert "1024 B" in terminal.getvalue()


# -------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-b", "0"], "'0' is not a size"),
        (["-b", "1X"], "'1X' is not a size"),
        (["-b", "2MB"], "'2MB' is not a size; expected bytes such as 512, 4K, 100MiB or 1.5GiB"),
        (["-b", "1.5"], "'1.5' is not a size"),
        (["-b", "8K"], "the largest size, 4096 bytes, is below the smallest, 8192"),
        (["-f", "1"], "a factor of 2 or more"),
        (["-n", "0"], "-n must be 1 or more"),
        (["-g", "1"], "-g must be 2 or more"),
        (["-d", "quaternion"], "'quaternion' is not a dtype"),
        (["-o", "xor"], "'xor' is not a reduce operation"),
        (["--algorithm", "bubble"], "'bubble' is not an all-reduce algorithm"),
        (["--algorithm", "broken_ops:Missing"], "module broken_ops has no Missing"),
        (["--algorithm", "broken_ops:NoAlgorithm"], "expected a subclass of CrossDeviceOps"),
        (["--algorithm", "json:dumps"], "expected a subclass of CrossDeviceOps"),
        (["--backend", "abacus"], "'abacus' is not an array library"),
        (["--against", "numpy,nobody"], "'nobody' is not a peer"),
        (["--chart", "chart.png"], "expected a name that ends in .svg or .html"),
        (["--threads", "0"], "the number of threads must be a whole number, 1 or more"),
    ],
)
@pytest.mark.usefixtures("broken")
def test_what_makes_no_sense_is_refused_in_one_line(words, said, capsys):
    assert main([*TINY, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


def test_traffic_counts_every_byte_that_must_move():
    def moved(collective):
        return Workload.of_size(collective, "SUM", "float32", 4, 1 << 20).moved_bytes / (1 << 20)

    assert [moved(name) for name in COLLECTIVES] == [8, 5, 5, 2]


@pytest.mark.parametrize("repeats", [1, 3])
def test_the_first_call_of_a_turn_which_wakes_threads_is_not_timed(repeats):
    done = []
    work = Workload.of_size("all_reduce", "SUM", "float32", 2, 4)
    calls = measure.Calls(
        work, {"given": lambda: done.append("call")}, read=list, meet=lambda: done.append("clock")
    )
    calls.turn("given", repeats)
    assert done == ["call", "clock", *["call"] * repeats]

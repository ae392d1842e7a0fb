"""`crossdevice run`, with programs that need no library: what is shown, what is ended, and which status."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

from crossdevice.cli import run
from crossdevice.cli.main import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ends of processes are watched as on Linux")

LATE_SECONDS = 60.0


@pytest.fixture
def start(tmp_path, monkeypatch, capfdbinary):
    """Runs a program of these lines as several processes; returns the status, and what was shown."""
    monkeypatch.chdir(tmp_path)

    def start(*lines, size=2, args=(), options=()):
        (tmp_path / "program.py").write_text("\n".join(["import os, signal, sys, time", *lines]))
        status = main(["run", "-n", str(size), *options, "program.py", *args])
        shown = capfdbinary.readouterr()
        return status, shown.out, shown.err

    return start


RANK = 'rank = int(os.environ["RANK"])'


def test_lines_of_each_rank_are_prefixed_and_arguments_are_the_programs_own(start):
    status, out, err = start("print(sys.argv[1:])", args=["-n", "5", "-m", "--", "-x"])
    assert status == 0
    assert sorted(out.splitlines()) == [b"[%d] ['-n', '5', '-m', '--', '-x']" % rank for rank in (0, 1)]
    assert err == b""


def test_lines_of_any_length_and_bytes_arrive_whole(start):
    wide = "b'wide ' * 100_000 + bytes(set(range(256)) - {10, 13}) + b'\\n'"
    status, out, _ = start(f"sys.stdout.buffer.write({wide})", "print('the end', end='')")
    assert status == 0
    line = b"wide " * 100_000 + bytes(set(range(256)) - {10, 13})
    assert sorted(out.splitlines()) == sorted(
        prefix + text for prefix in (b"[0] ", b"[1] ") for text in (line, b"the end")
    )


def test_a_newline_that_comes_after_its_carriage_return_has_no_prefix_of_its_own(start):
    late = "time.sleep(0.3)"
    write = "sys.stdout.buffer.write({}); sys.stdout.flush()"
    lines = [write.format(text) for text in (r"b'half\r'", r"b'\nwhole\n'")]
    status, out, _ = start(lines[0], late, lines[1], size=1)
    assert (status, out) == (0, b"[0] half\r\n[0] whole\n")


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("sys.exit(7)", 7, b"ended with exit code 7"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 128 + signal.SIGSEGV, b"was killed by SIGSEGV"),
    ],
)
def test_the_first_failure_is_named_and_gives_the_status_and_the_others_are_ended(
    end, status, said, start, monkeypatch
):
    monkeypatch.setattr(run, "OWN_END_SECONDS", 0.5)
    began = time.monotonic()
    found, _, err = start(RANK, f"if rank == 1: {end}", "time.sleep(600)")
    assert found == status
    assert err.startswith(b"crossdevice run: rank 1 (")
    assert said in err
    assert b"; the other one has 0.5 seconds to end by itself" in err
    assert time.monotonic() - began < LATE_SECONDS


def test_what_a_rank_has_started_ends_with_it_if_it_fails(start, tmp_path):
    child = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    began = time.monotonic()
    status, *_ = start(
        "import subprocess",
        f"child = {child}",
        'open(f"child {os.environ[\'RANK\']}", "w").write(str(child.pid))',
        "sys.exit(3)",
    )
    assert status == 3
    for rank in (0, 1):
        process = int((tmp_path / f"child {rank}").read_text())
        end = time.monotonic() + LATE_SECONDS
        while os.path.exists(f"/proc/{process}") and state_of(process) != "Z":
            assert time.monotonic() < end
            time.sleep(0.01)
    assert time.monotonic() - began < LATE_SECONDS


def state_of(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_handed_on_once_and_gives_the_status(number, start, tmp_path):
    def interrupt():
        end = time.monotonic() + LATE_SECONDS
        while len(list(tmp_path.glob("ready *"))) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt).start()
    status, out, _ = start(
        RANK,
        "def note(number, _):",
        "    print(number)",
        "    sys.exit(5)",
        f"signal.signal({int(number)}, note)",
        'open(f"ready {rank}", "w").close()',
        "time.sleep(600)",
    )
    assert status == 128 + number
    assert sorted(out.split()) == sorted([b"[0]", b"[1]", b"%d" % number, b"%d" % number])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", "program.py"], b"-n must be 1 or more; got 0"),
        (["-n", "2"], b"which program?"),
        (["-n", "2", "-"], b"which only rank 0 gets; name a file"),
        (["-n", "2", "absent.py"], b"there is no file 'absent.py' in "),
        (["-n", "2", "python", "program.py"], b"crossdevice run starts Python itself"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(
    arguments, message, tmp_path, monkeypatch, capfdbinary
):
    monkeypatch.chdir(tmp_path)
    assert main(["run", *arguments]) == 2
    shown = capfdbinary.readouterr()
    assert message in shown.err
    assert shown.err.count(b"\n") == 1

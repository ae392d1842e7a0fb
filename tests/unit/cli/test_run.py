"""`crossdevice run`, with programs that need no library: what is shown, what is ended, and which status."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

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
        named = ["program"] if "-m" in options else ["program.py"]
        status = main(["run", "-n", str(size), *options, *named, *args])
        shown = capfdbinary.readouterr()
        return status, shown.out, shown.err

    return start


RANK = 'rank = int(os.environ["RANK"])'


def test_lines_of_each_rank_are_prefixed_and_arguments_are_the_programs_own(start):
    line = "print(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv[1:])"
    for options in ((), ("-m",)):
        status, out, err = start(line, args=["-n", "5", "-m", "--", "-x"], options=options)
        assert status == 0
        assert sorted(out.splitlines()) == [
            b"[%d] %d of 2 ['-n', '5', '-m', '--', '-x']" % (rank, rank) for rank in (0, 1)
        ]
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
        ("raise ValueError", 1, b"ended with exit code 1"),
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
    (said_of_ranks,) = (line for line in err.splitlines() if line.startswith(b"crossdevice run:"))
    assert said_of_ranks.startswith(b"crossdevice run: rank 1 (")
    assert said in said_of_ranks
    assert b"; the other one has 0.5 seconds to end by itself" in err
    assert time.monotonic() - began < LATE_SECONDS


def test_who_ignores_sigterm_is_killed(start, monkeypatch):
    monkeypatch.setattr(run, "OWN_END_SECONDS", 0.2)
    monkeypatch.setattr(run, "ENDING_SECONDS", 0.2)
    ignores = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    ready = "open('ready', 'w').close()"
    waits = "while not os.path.exists('ready'): time.sleep(0.01)"
    status, *_ = start(
        RANK, ignores, f"if rank == 0: {ready}", waits, "if rank == 1: sys.exit(4)", "time.sleep(600)"
    )
    assert status == 4


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
def test_a_signal_is_handed_on_once_and_gives_the_status(number, start, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "OWN_END_SECONDS", LATE_SECONDS)

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
        'open("part", "w").write(str(os.getpid())) if rank else None',
        'os.rename("part", f"ready {rank}") if rank else open("ready 0", "w").close()',
        "time.sleep(600)",
    )
    assert status == 128 + number
    assert sorted(out.split()) == sorted([b"[0]", b"[1]", b"%d" % number, b"%d" % number])
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "ready 1").read_text()), 0)


def test_a_signal_while_processes_are_started_ends_those_and_starts_no_more(start, tmp_path, monkeypatch):
    started = []

    class Started(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self.pid)
            if len(started) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run.subprocess, "Popen", Started)
    status, out, _ = start("time.sleep(600)", size=100)
    assert (status, out) == (128 + signal.SIGTERM, b"")
    assert len(started) == 2
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.fixture
def folders(monkeypatch):
    """Makes a folder for temporary files whose name is short enough for those of launches."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_a_folder_is_removed_by_a_later_start_once_its_launcher_and_all_its_processes_have_ended(
    start, tmp_path, folders
):
    (tmp_path / "waits.py").write_text(
        "import os, time; open('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)"
    )
    command = [sys.executable, "-m", "crossdevice", "run", "-n", "1", "waits.py"]
    launcher = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "TMPDIR": str(folders)})
    end = time.monotonic() + LATE_SECONDS
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
        assert time.monotonic() < end
        time.sleep(0.01)
    (folder,) = folders.glob("crossdevice-run-*")
    assert start("print()")[0] == 0
    assert folder.exists()
    launcher.kill()
    launcher.wait()
    rank = int((tmp_path / "pid").read_text())
    while state_of(rank) != "Z":  # the system ends it with its launcher
        assert time.monotonic() < end
        time.sleep(0.01)
    assert start("print()")[0] == 0
    assert list(folders.glob("crossdevice-run-*")) == []


def test_a_folder_that_is_held_or_not_known_to_be_left_stays(start, folders):
    held, new, elsewhere = (folders / f"crossdevice-run-{name}" for name in ("held", "new", "link"))
    held.mkdir()
    new.mkdir()  # by a launcher that is about to hold it
    (folders / "own").mkdir()
    (folders / "own" / run.HELD).touch()
    elsewhere.symlink_to(folders / "own")
    with open(held / run.HELD, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert start("print()")[0] == 0
    assert set(folders.glob("crossdevice-run-*")) == {held, new, elsewhere}
    assert (folders / "own" / run.HELD).exists()
    assert start("print()")[0] == 0
    assert not held.exists()


def test_a_limit_of_the_system_is_one_line_and_ends_what_runs(start, monkeypatch, tmp_path):
    monkeypatch.setattr(run.tempfile, "tempdir", str(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A few more than are open: a rank takes two, and the start of one more a few that it gives back.
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 12, before[1]))
    try:
        status, out, err = start("time.sleep(600)", size=20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (status, out) == (2, b"")
    assert b" of 20 cannot be started: Too many open files. Start fewer" in err
    assert err.count(b"\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


def test_ranks_go_on_if_their_output_cannot_be_written(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "for _ in range(20_000): print('x' * 50)\nopen(f'done {__import__(\"os\").getpid()}', 'w')"
    )
    words = [sys.executable, "-m", "crossdevice", "run", "-n", "2", str(program)]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            words, stdout=full, stderr=subprocess.PIPE, cwd=tmp_path, timeout=LATE_SECONDS, check=False
        )
    assert ended.returncode == 2
    assert ended.stderr == (
        b"crossdevice run: the output cannot be written: [Errno 28] No space left on device\n"
    )
    assert len(list(tmp_path.glob("done *"))) == 2


def test_ranks_meet_in_a_short_folder_if_the_temporary_one_has_a_long_name(start, monkeypatch, tmp_path):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(run.tempfile, "tempdir", str(long))
    status, out, err = start(
        "import crossdevice", "with crossdevice.cluster_from_env().form_group() as group: print(group.size)"
    )
    assert (status, err) == (0, b"")
    assert sorted(out.split()) == [b"2", b"2", b"[0]", b"[1]"]


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

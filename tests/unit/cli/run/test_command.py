"""`crossdevice run`, with programs that need nothing of crossdevice: what is shown, who ends, and how."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from crossdevice.cli.main import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and sessions as on Linux")

SECONDS = 120.0
SAYS_RANK = "import os, sys; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], sys.argv[1:])"
WAITS = "import time; print('waiting'); time.sleep(100)"


def started(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "crossdevice", "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def ended(*arguments):
    process = started(*arguments)
    output, errors = process.communicate(timeout=SECONDS)
    return process.returncode, sorted(output.splitlines()), errors


@pytest.fixture
def program(tmp_path):
    def write(text):
        path = tmp_path / "program.py"
        path.write_text(text)
        return str(path)

    return write


def test_each_process_has_a_rank_its_arguments_and_its_output_a_prefix(program):
    status, lines, errors = ended("-n", "3", program(SAYS_RANK), "-n", "7", "--flag")
    assert (status, errors) == (0, "")
    assert lines == [f"[{rank}] rank {rank} of 3 ['-n', '7', '--flag']" for rank in range(3)]


def test_modules_lines_without_an_end_and_errors(tmp_path):
    package = tmp_path / "steps"
    package.mkdir()
    (package / "train.py").write_text("import sys; sys.stdout.write('no end'); sys.stderr.write('a\\rb\\n')")
    process = started(
        "-n", "1", "-m", "steps.train", cwd=tmp_path, env={**os.environ, "PYTHONPATH": path(tmp_path)}
    )
    output, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, output) == (0, "[0] no end\n")
    assert errors.replace("\r", "\n") == "[0] a\n[0] b\n"


def path(folder):
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.mark.parametrize(
    ("failure", "status", "how"),
    [
        ("raise SystemExit(3)", 3, "ended with exit code 3"),
        ("raise ValueError('no data')", 1, "ended with exit code 1"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9, "was killed by SIGKILL"),
    ],
)
def test_the_first_failure_is_named_and_the_others_end(failure, status, how, program):
    text = f"import os, signal, time\nif os.environ['RANK'] == '1': {failure}\ntime.sleep(100)"
    start = time.monotonic()
    found, _, errors = ended("-n", "3", program(text))
    assert found == status
    told = [line for line in errors.splitlines() if line.startswith("crossdevice run:")]
    assert len(told) == 1
    assert told[0].startswith("crossdevice run: rank 1 (")
    assert how in told[0]
    assert time.monotonic() - start < 90


def test_who_ignores_sigterm_is_killed(program):
    text = "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    assert (
        ended("-n", "2", program(text + "time.sleep(100) if os.environ['RANK'] == '1' else exit(4)"))[0] == 4
    )


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_handed_on_once_and_nobody_is_left(number, status, program):
    process = started("-n", "2", program(f"import os; print(os.getpid())\n{WAITS}"))
    lines = [process.stdout.readline() for _ in range(4)]
    process.send_signal(number)
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == status
    assert errors.count("KeyboardInterrupt") == (2 if number == signal.SIGINT else 0)
    assert "crossdevice run: rank" not in errors
    for pid in (int(line.split()[1]) for line in lines if "waiting" not in line):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_processes_end_with_a_launcher_that_is_killed(program):
    process = started("-n", "2", program(f"import os; print(os.getpid())\n{WAITS}"))
    pids = [
        int(line.split()[1])
        for line in (process.stdout.readline() for _ in range(4))
        if "waiting" not in line
    ]
    process.kill()
    process.communicate(timeout=SECONDS)
    end = time.monotonic() + SECONDS
    while any(map(is_running, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_what_cannot_be_started_is_refused(capsys):
    assert main(["run", "-n", "0", "train.py"]) == 2
    assert "-n must be 1 or more; got 0" in capsys.readouterr().err
    assert main(["run", "-n", "2"]) == 2
    assert "which program?" in capsys.readouterr().err

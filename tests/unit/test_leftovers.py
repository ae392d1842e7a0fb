"""A run of the tests leaves nothing in the temporary folder, and fails if files stay in shared memory."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = f"crossdevice-left-{os.getpid()}"

LEAVING = """
import os, pathlib, subprocess, sys, tempfile

def test_leaves():
    folder = tempfile.mkdtemp()
    pathlib.Path(folder, "file").touch()
    print("folder", folder)
    if {name!r}:
        pathlib.Path("/dev/shm", {name!r}).write_text("x")
    if {program!r}:
        environment = {{name: value for name, value in os.environ.items() if name != "TMPDIR"}}
        streams = {{"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}}
        other = subprocess.Popen([sys.executable, "-c", {program!r}], env=environment, **streams)
        assert other.stdout.readline() == "ready\\n"
        print("process", other.pid)
"""

USING = """
import mmap, time
with open("/dev/shm/{name}", "r+b") as file:
    used = {use}
    print("ready", flush=True)
    time.sleep(600)
"""

pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")


@pytest.fixture
def run(tmp_path):
    """Runs a test that leaves a folder, and perhaps a file and a program that has not to do with the run."""
    others = []

    def ended(name="", program=""):
        (tmp_path / "test_leaving.py").write_text(LEAVING.format(name=name, program=program))
        words = ["-q", "-s", "--nothing-left", "-p", "conftest", "-p", "no:cacheprovider", "test_leaving.py"]
        paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        found = subprocess.run(
            [sys.executable, "-m", "pytest", *words],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        printed = dict(line.split() for line in found.stdout.splitlines() if line.count(" ") == 1)
        others.extend([int(printed["process"])] if program else [])
        assert not Path(printed["folder"]).exists()
        return found

    yield ended
    Path("/dev/shm", NAME).unlink(missing_ok=True)
    for other in others:
        os.kill(other, signal.SIGKILL)


@pytest.mark.parametrize("name", ["", NAME], ids=["nothing", "a file"])
def test_what_a_run_leaves_is_removed_or_named(run, name):
    ended = run(name)
    assert (f"left behind: /dev/shm/{NAME}" in ended.stdout) is bool(name)
    assert ended.returncode == bool(name), ended.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says who uses a file")
@pytest.mark.parametrize("use", ["file", "mmap.mmap(file.fileno(), 0)"], ids=["open", "mapped"])
def test_what_another_program_uses_is_not_left_behind(run, use):
    ended = run(NAME, USING.format(name=NAME, use=use))
    assert ended.returncode == 0, ended.stdout
    assert "left behind" not in ended.stdout

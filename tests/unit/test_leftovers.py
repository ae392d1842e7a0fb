"""A run of the tests leaves nothing in the temporary folder, and fails if files stay in shared memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LEAVING = """
import pathlib, tempfile

def test_leaves():
    folder = tempfile.mkdtemp()
    pathlib.Path(folder, "file").touch()
    print(folder)
    if {name!r}:
        pathlib.Path("/dev/shm", {name!r}).touch()
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
@pytest.mark.parametrize("name", ["", f"crossdevice-left-{os.getpid()}"], ids=["nothing", "a file"])
def test_what_a_run_leaves_is_removed_or_named(tmp_path, name):
    (tmp_path / "test_leaving.py").write_text(LEAVING.format(name=name))
    words = ["-q", "-s", "--nothing-left", "-p", "conftest", "-p", "no:cacheprovider", "test_leaving.py"]
    paths = [str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    (folder,) = (line for line in ended.stdout.splitlines() if line.startswith("/"))
    assert not Path(folder).exists()
    if name:
        Path("/dev/shm", name).unlink()
        assert f"left behind: /dev/shm/{name}" in ended.stdout
        assert ended.returncode == 1

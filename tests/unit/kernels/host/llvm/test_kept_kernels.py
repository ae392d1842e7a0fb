"""Where compiled kernels are kept, and what is said where they cannot be."""

import ast
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import crossdevice
from crossdevice.kernels.host import fused_pass as entry
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp

pytest.importorskip("numba")
from crossdevice.kernels.host.llvm import numba_pass

PACKAGE = Path(crossdevice.__file__).parent
AS_NOBODY = (
    "--reuid=65534 --regid=65534 --clear-groups --inh-caps=+dac_read_search --ambient-caps=+dac_read_search"
)
"""Somebody else than root, who may write nowhere, but read where this Python is installed."""

PROGRAM = """
import logging
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
import numpy as np, crossdevice as cd
from crossdevice.kernels.host.fused_pass import selected_kernels
for dtype in ("f4", "f8"):
    assert cd.all_reduce([np.ones(3, dtype)] * 2)[1].tolist() == [2, 2, 2]
print(cd.__file__, selected_kernels())
"""


@pytest.fixture
def place():
    """A folder with a copy of the package that nobody can write to; in pytest's own, nobody could read it."""
    folder = Path(tempfile.mkdtemp(prefix="crossdevice-"))
    site = folder / "site"
    shutil.copytree(PACKAGE, site / "crossdevice", ignore=shutil.ignore_patterns("*.nbi", "*.nbc"))
    (folder / "home").mkdir()
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield folder
    for path in (folder, *folder.rglob("*")):
        path.chmod(path.stat().st_mode | stat.S_IRWXU)
    shutil.rmtree(folder)


def run_elsewhere(place, program=PROGRAM, **environment):
    """Runs a program as somebody who can write nowhere: root, who can write everywhere, becomes nobody."""
    site_packages = Path(np.__file__).parents[1]
    inherited = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    somebody = ["setpriv", *AS_NOBODY.split()] if os.geteuid() == 0 else []
    return subprocess.run(
        [*somebody, sys.executable, "-c", program],
        env={
            **inherited,
            "PYTHONPATH": os.pathsep.join((str(place / "site"), str(site_packages))),
            **environment,
        },
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def elsewhere(place):
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("without setpriv, root cannot become another user")
    ended = run_elsewhere(place, "import numba, optree, ml_dtypes, array_api_compat")
    if ended.returncode:
        pytest.skip(f"another user cannot use this environment: {ended.stderr.strip().splitlines()[-1]}")
    return place


@pytest.mark.skipif(os.name != "posix", reason="users and permissions are those of POSIX")
@pytest.mark.parametrize(
    "home", ["unwritable", pytest.param("unset", marks=pytest.mark.more("a repetition"))]
)
def test_nowhere_to_write_is_said_once_and_everything_works(elsewhere, home):
    homes = {"unwritable": {"HOME": str(elsewhere / "home")}, "unset": {}}
    ended = run_elsewhere(elsewhere, **homes[home])
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == [str(elsewhere / "site/crossdevice/__init__.py"), "numba"]
    (line,) = ended.stderr.splitlines()
    assert line.startswith("WARNING compiled kernels are not kept, and every process compiles them again")
    assert "NUMBA_CACHE_DIR" in line


@pytest.mark.skipif(os.name != "posix", reason="users and permissions are those of POSIX")
def test_a_folder_that_can_be_written_to_is_named_once(elsewhere):
    (elsewhere / "home").chmod(0o777)
    ended = run_elsewhere(elsewhere, HOME=str(elsewhere / "home"))
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"INFO compiled kernels are kept in {elsewhere / 'home'}")


@pytest.mark.skipif(os.name != "posix", reason="users and permissions are those of POSIX")
def test_the_doctor_says_that_kernels_are_not_kept(elsewhere):
    program = "from crossdevice.cli.main import main; main(['doctor'])"
    ended = run_elsewhere(elsewhere, program, HOME="/missing")
    assert ended.returncode == 0, ended.stderr
    assert "not cached, no folder for them is writable" in ended.stdout


def test_a_full_disk_is_said_once_and_kernels_are_compiled_without_it(monkeypatch, caplog):
    compiled = numba_pass.njit

    def njit(*signature, cache=False, **options):
        def refused(function):
            raise OSError(28, "No space left on device")

        return refused if signature and cache else compiled(*signature, cache=cache, **options)

    monkeypatch.setattr(numba_pass, "njit", njit)
    for function in (numba_pass.compiled_kernel, numba_pass._warn_once):
        function.cache_clear()
    entry.select_kernels("numba")
    try:
        for dtype in ("float32", "float64"):
            output = np.empty(3, dtype)
            entry.fused_pass([np.ones(3, dtype)] * 2, [output], Recipe(ReduceOp.SUM, "fast"))
            assert output.tolist() == [2, 2, 2]
    finally:
        numba_pass.compiled_kernel.cache_clear()
        entry.select_kernels(None)
    (said,) = caplog.messages
    assert said.endswith("No space left on device")


@pytest.mark.parametrize("variable", ["NUMBA_DISABLE_JIT", "CROSSDEVICE_KERNELS"])
def test_numpy_does_the_passes_where_numba_is_not_to_compile(variable):
    value = {"NUMBA_DISABLE_JIT": "1", "CROSSDEVICE_KERNELS": "numpy"}[variable]
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, variable: value},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.split()[1] == "numpy"


def test_all_that_a_kernel_is_compiled_from_is_part_of_its_name():
    sources = numba_pass.compiled_sources()
    for path in (PACKAGE / "kernels" / "host" / "llvm").glob("*.py"):
        assert path in sources
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("crossdevice."):
                assert PACKAGE.parent / f"{node.module.replace('.', '/')}.py" in sources

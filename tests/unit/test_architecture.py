"""Facts about the house itself."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "crossdevice"


def test_import_crossdevice_imports_no_framework_but_numpy():
    code = (
        "import sys, crossdevice;"
        "heavy = {'torch', 'jax', 'tensorflow', 'cupy', 'numba', 'mpi4py', 'rich', 'matplotlib'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert answer.stdout.strip() == "[]"


def test_the_architecture_page_lists_the_folders_and_files_on_disk():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    listed = set(re.findall(r"^\| `([\w/]+\.py|[\w/]+/)` \|", page, re.MULTILINE))
    folders = {f"{path.parent.relative_to(PACKAGE)}/" for path in PACKAGE.rglob("__init__.py")} - {"./"}
    files = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if path.name not in ("__init__.py",) or path.parent == PACKAGE
    }
    assert listed == folders | files


def test_algorithms_are_short():
    for path in (PACKAGE / "algorithms").glob("*.py"):
        if path.name != "base.py":
            assert len(path.read_text().splitlines()) < 200, path


def test_there_are_no_drawers():
    words = {"utils", "helpers", "common", "misc", "manager", "handler", "impl"}
    for path in PACKAGE.rglob("*.py"):
        assert not words & set(path.stem.split("_")), path

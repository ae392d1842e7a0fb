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


def test_the_architecture_page_names_every_folder():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    drawing = page[page.index("## Layers") :].split("```")[1]
    drawn = set(re.findall(r"(\w+)/", drawing))
    folders = {path.parent.name for path in PACKAGE.rglob("__init__.py")} - {"crossdevice"}
    assert drawn == folders


def test_files_that_the_pages_name_exist():
    for page in (ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"):
        for name in re.findall(r"`(?:src/crossdevice/)?([\w/]+/\w+\.py)`", page.read_text()):
            assert (PACKAGE / name).exists() or (ROOT / name).exists(), f"{page.name}: {name}"


def test_algorithms_are_short():
    for path in (PACKAGE / "algorithms").glob("*.py"):
        if path.name != "base.py":
            assert len(path.read_text().splitlines()) < 200, path


def test_there_are_no_drawers():
    words = {"utils", "helpers", "common", "misc", "manager", "handler", "impl"}
    for path in PACKAGE.rglob("*.py"):
        assert not words & set(path.stem.split("_")), path

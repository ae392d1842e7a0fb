"""Facts about the house itself."""

import ast
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
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "benchmarks/NOTES.md"):
        for name in re.findall(r"`(?:src/crossdevice/)?([\w/]+/\w+\.py)`", page.read_text()):
            assert (PACKAGE / name).exists() or (ROOT / name).exists(), f"{page.name}: {name}"


def test_names_that_the_architecture_page_looks_for_in_a_file_are_there():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    in_rows = re.findall(r"`(\w+)` of `([\w/]+\.py)`", page)
    in_walks = re.findall(r"^[ │├└]*(?:\w+\.)?(\w+) {2,}([\w/]+\.py)", page, re.MULTILINE)
    assert in_rows
    assert len(in_walks) > 15
    for name, path in in_rows + in_walks:
        assert re.search(rf"\b(def |class )?{name}\b", (PACKAGE / path).read_text()), f"{path}: {name}"


def _lines_besides_docstrings(path):
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = [
        node.body[0]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, documented) and ast.get_docstring(node)
    ]
    lines = len(path.read_text().splitlines())
    return lines - sum(each.end_lineno - each.lineno + 1 for each in docstrings)


def test_algorithms_are_short():
    for path in (PACKAGE / "algorithms").glob("*.py"):
        if path.name != "base.py":
            assert _lines_besides_docstrings(path) < 200, path


def test_no_assert_decides_anything():
    """`python -O` leaves them out: they may only tell the type checker what is not None, or of which type."""
    found = [
        (path, node)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assert)
    ]
    assert found
    for path, node in found:
        text = ast.unparse(node.test)
        assert re.fullmatch(r".* is not None|(not )?isinstance\(.*\)|sys.platform == '\w+'", text), (
            path,
            text,
        )


def test_kinds_and_numbers_in_messages_have_their_article_and_their_noun():
    """As `kind_text`, `with_article` and `counted` write them: "an int", "1 replica"."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"\ba \"?\s*f?\"?\{(type\([^}]*|kind)\.__name__\}", text), path
        assert not re.search(r"'' if [^}]* == 1 else 's'", text) or path.stem in (
            "quantities",
            "disagreement",
        ), path


def test_there_are_no_drawers():
    words = {"utils", "helpers", "common", "misc", "manager", "handler", "impl"}
    for path in PACKAGE.rglob("*.py"):
        assert not words & set(path.stem.split("_")), path

"""The examples of documents and docstrings, as programs for a type checker."""

from __future__ import annotations

import ast
import doctest
from pathlib import Path

from public_index import ROOT

PACKAGE = ROOT / "src" / "crossdevice"

PUBLIC = ("algorithms", "combining", "integrations", "strategies", "testing", "values")
"""Folders of the package whose docstrings users read."""

SETTINGS = """allow-untyped-defs, allow-untyped-calls, allow-subclassing-any, allow-redefinition
# mypy: disable-error-code="no-redef,var-annotated\""""
"""Examples are short: their functions say no types, and names stand for one thing after the other."""


def write_programs(folder: Path) -> None:
    """A program for each page and each module that has examples."""
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    modules = [path for part in PUBLIC for path in (PACKAGE / part).rglob("*.py")]
    for path in (*pages, PACKAGE / "functions.py", *modules):
        if ">>> " in path.read_text():
            name = "_".join(path.relative_to(ROOT).with_suffix("").parts).replace("-", "_")
            (folder / f"{name}.py").write_text(_program(path))


def _program(path: Path) -> str:
    """All examples but those that are to raise."""
    examples = doctest.DocTestParser().get_examples(path.read_text())
    tree = ast.parse("".join(example.source for example in examples if example.exc_msg is None))
    tree.body[:0] = _names_of(path) if path.suffix == ".py" else []
    tree = ast.fix_missing_locations(_OtherLibraries().visit(tree))
    return f"# mypy: {SETTINGS}\nfrom typing import Any\n{ast.unparse(tree)}\n"


def _names_of(path: Path) -> list[ast.stmt]:
    """Imports of what a module defines, and of what it imports itself."""
    module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    body = ast.parse(path.read_text()).body
    own = [ast.alias(node.name) for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return [*imports, ast.ImportFrom(module, own, 0)]


class _OtherLibraries(ast.NodeTransformer):
    """Makes all that comes from elsewhere untyped: how NumPy types its functions is not the question."""

    def visit_Import(self, node: ast.Import) -> list[ast.stmt]:
        """Whole modules."""
        return _untyped(node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.stmt]:
        """Names of modules."""
        return node if (node.module or "").startswith("crossdevice") else _untyped(node.names)


def _untyped(names: list[ast.alias]) -> list[ast.stmt]:
    lines = [
        f"import {name.name} as {name.asname}"
        if name.name == "crossdevice"
        else f"{name.asname or name.name.partition('.')[0]}: Any = None"
        for name in names
    ]
    return ast.parse("\n".join(lines)).body

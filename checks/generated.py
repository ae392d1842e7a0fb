"""Writes what follows from the registries: exports, contracts, a program and tables; a test compares.

`make generated` after a new row. In files that are otherwise written by hand these parts lie between a line
with `begin: checks/generated.py NAME` and one with `end`.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.algorithms.registry import ALGORITHMS, OWN_ALGORITHMS
from crossdevice.backends.registry import BACKENDS
from crossdevice.plans.builder import PlanBuilder
from crossdevice.plans.plan import Plan
from crossdevice.values.device import host_device

ROOT = Path(__file__).parents[1]

NUM_DEVICES, LENGTH = 8, 640
"""For the figures of the table: divisible by all numbers of shards."""


def own_algorithms() -> dict[str, type[CrossDeviceOps]]:
    """Classes of this package by their names in the registry, which installed packages may add to."""
    return {name: ALGORITHMS.load(name) for name in OWN_ALGORITHMS}


def optional_backends() -> dict[str, str]:
    """Backends of this package by their libraries, without NumPy, which is always there."""
    own = {name: target for name, target in BACKENDS.items() if target.startswith("crossdevice.")}
    return {name: target for name, target in own.items() if name != "numpy"}


def main() -> None:
    """Writes every file that is not as it should be, and names it."""
    for path, text in generated().items():
        if path.read_text() != text:
            path.write_text(text)
            sys.stdout.write(f"{path.relative_to(ROOT)}\n")


def generated() -> dict[Path, str]:
    """Files with generated parts, as they should be."""
    texts = {ROOT / name: (ROOT / name).read_text() for name in (EXPORTS, *(file for file, _ in PARTS))}
    texts[ROOT / EXPORTS] = with_exports(texts[ROOT / EXPORTS])
    for (file, part), lines in PARTS.items():
        texts[ROOT / file] = with_part(texts[ROOT / file], part, lines())
    return texts


def with_part(text: str, part: str, lines: Iterator[str]) -> str:
    """The text with these lines between the two that enclose this part, indented as those are."""
    enclosing = rf"^( *)(\S.*begin: checks/generated\.py {part}\b.*)\n(?:.*\n)*?( *(?:<!--|#|\.\.) end\b.*)$"
    (found,) = re.finditer(enclosing, text, re.M)
    body = "".join(f"{found[1]}{line}".rstrip() + "\n" for line in lines)
    return f"{text[: found.start()]}{found[1]}{found[2]}\n{body}{found[3]}{text[found.end() :]}"


def with_exports(text: str) -> str:
    """`crossdevice/__init__.py` with the imports and the names of all algorithms, in order."""
    found = list(re.finditer(r"^from (crossdevice\.algorithms\.\w+) import \w+\n", text, re.M))
    first, last = found[0].start(), found[-1].end()
    imports = {each[1]: each[0] for each in found}
    imports |= {kind.__module__: exported(kind) for kind in own_algorithms().values()}
    names = set(re.findall(r'^    "(\w+)",$', text[text.index("__all__ = [") :], re.M))
    names |= {kind.__name__ for kind in own_algorithms().values()}
    listed = "".join(f'    "{name}",\n' for name in sorted(names))
    with_imports = text[:first] + "".join(imports[module] for module in sorted(imports)) + text[last:]
    return re.sub(r"__all__ = \[.*?\]", lambda _: f"__all__ = [\n{listed}]", with_imports, flags=re.S)


def exported(kind: type[CrossDeviceOps]) -> str:
    """The line that imports a class."""
    return f"from {kind.__module__} import {kind.__name__}\n"


def reference() -> Iterator[str]:
    """Yields the lines of the reference pages."""
    for kind in own_algorithms().values():
        yield f".. autoclass:: {kind.__name__}"


def instances() -> Iterator[str]:
    """Yields entries of a list with one of each, for the program that is type checked."""
    for kind in own_algorithms().values():
        yield f"cd.{kind.__name__}(),"


def table() -> Iterator[str]:
    """Yields the table that compares algorithms: formulas of the registry, figures of the plans."""
    yield ""
    columns = ["rounds", "busiest", "traffic", "traffic"]
    counted = [f"{column}, N = {NUM_DEVICES}" for column in columns]
    yield f"| name | class | rounds | busiest | {' | '.join(counted)}, accurate |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for name, kind in own_algorithms().items():
        row = OWN_ALGORITHMS[name]
        cells = [f"`{name}`", f"`{kind.__name__}`", row.rounds, row.busiest, *figures(kind())]
        yield f"| {' | '.join(cells)} |"
    yield ""


def figures(algorithm: CrossDeviceOps) -> list[str]:
    """Rounds and arrays sent, counted from a plan; dashes where an engine decides."""
    if algorithm.uses_engine:
        return ["-"] * 4
    plan = plan_of(algorithm)
    traffic = plan.busiest_device_traffic(), plan.total_traffic(), plan.total_traffic(unsummed=True)
    return [str(plan.num_rounds), *(f"{each / LENGTH:g} S" for each in traffic)]


def plan_of(algorithm: CrossDeviceOps) -> Plan:
    """An all-reduce of one array."""
    devices = [host_device(number) for number in range(NUM_DEVICES)]
    build = PlanBuilder(devices, LENGTH, 0)
    return build.plan(algorithm.plan_sum(build, devices))


def sections() -> Iterator[str]:
    """Yields a section for each algorithm: its docstring before arguments and examples."""
    yield ""
    for kind in own_algorithms().values():
        prose = re.split(r"\n\n(?:Args:|Raises:|>>> )", inspect.getdoc(kind) or "")[0]
        blocks = re.sub(r"::\n\n((?:(?:    .*)?\n)*    .*)", in_a_fence, prose)
        yield from [f"## {kind.__name__}", "", *blocks.splitlines(), ""]


def in_a_fence(block: re.Match[str]) -> str:
    """A literal block of a docstring as one of Markdown."""
    return f":\n\n```\n{textwrap.dedent(block[1])}\n```"


def libraries() -> Iterator[str]:
    """Yields array libraries that are optional, for the contract about them."""
    for name in optional_backends():
        yield f'"{name}",'


def importers() -> Iterator[str]:
    """Yields the one file in `backends` that imports each of them."""
    for name, target in optional_backends().items():
        yield f'"{target.partition(":")[0]} -> {name}",'


EXPORTS = "src/crossdevice/__init__.py"

PARTS: dict[tuple[str, str], Callable[[], Iterator[str]]] = {
    ("docs/algorithms.md", "table"): table,
    ("docs/algorithms.md", "sections"): sections,
    ("docs/reference/algorithms.md", "classes"): reference,
    ("checks/user_program.py", "instances"): instances,
    ("pyproject.toml", "libraries"): libraries,
    ("pyproject.toml", "importers"): importers,
}


if __name__ == "__main__":
    main()

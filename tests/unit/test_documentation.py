"""Claims in the documents, compared with the plans; the pages of the site, compared with what there is."""

import ast
import builtins
import enum
import importlib
import inspect
import re
import runpy
from pathlib import Path

import pytest

import crossdevice as cd
from crossdevice import errors, testing
from crossdevice.algorithms.registry import ALGORITHMS
from crossdevice.values.device import host_device
from unit.algorithms.planning import planned

ROOT = Path(__file__).parents[2]
DEVICES = [host_device(i) for i in range(8)]


def test_generated_parts_are_what_the_registries_say():
    """After a new row: `make generated`."""
    program = runpy.run_path(str(ROOT / "checks/generated.py"))
    assert [path.name for path, text in program["generated"]().items() if path.read_text() != text] == []


def test_the_decision_about_traffic_has_the_figures_of_the_plans():
    record = (ROOT / "docs/decisions/0001-contributions-travel-unsummed.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (\d+) \| (\d+) \|$", record, re.M)
    assert len(rows) > 5
    for name, fast, accurate in rows:
        plan = planned(ALGORITHMS.load(name)(), DEVICES, DEVICES)
        traffic = plan.total_traffic(), plan.total_traffic(unsummed=True)
        assert [each / 640 for each in traffic] == [float(fast), float(accurate)], name


def test_decisions_are_numbered_without_gaps_and_listed_by_their_titles():
    folder = ROOT / "docs" / "decisions"
    records = sorted(folder.glob("0*.md"))
    titles = [re.match(r"# (\d+)\. (.+)\n", record.read_text()).groups() for record in records]
    assert [int(record.name[:4]) for record in records] == list(range(1, len(records) + 1))
    listed = re.findall(r"^\| \[(\d+)\]\((.+)\) \| (.+) \|$", (folder / "README.md").read_text(), re.M)
    assert listed == [
        (number, record.name, title) for (number, title), record in zip(titles, records, strict=True)
    ]


def public_names():
    """Every public name with its module: exports, and what the integrations define."""
    names = [("crossdevice", name) for name in cd.__all__]
    names += [("crossdevice.testing", name) for name in testing.__all__]
    for path in sorted((ROOT / "src/crossdevice/integrations").glob("[!_]*")):
        tree = ast.parse((path / "__init__.py" if path.is_dir() else path).read_text())
        offered = [
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        ]
        defined = [node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
        public = offered[0] if offered else [name for name in defined if not name.startswith("_")]
        names += [(f"crossdevice.integrations.{path.stem}", name) for name in public]
    return names


def documented_names():
    """Every name in the reference with its module."""
    names = []
    for page in sorted((ROOT / "docs/reference").glob("*.md")):
        module = None
        for word, argument in re.findall(r"^\.\. (\w+):: (\S+)$", page.read_text(), re.M):
            if word == "currentmodule":
                module = argument
            elif word in ("autoclass", "autofunction"):
                names.append((module, argument))
    return names


def test_the_reference_has_every_public_name_once():
    documented, public = documented_names(), public_names()
    assert set(public) - set(documented) == set()
    assert sorted(documented) == sorted(public)


def test_a_program_that_is_type_checked_uses_every_public_name():
    program = (ROOT / "checks/user_program.py").read_text()
    names = [*cd.__all__, *testing.__all__]
    assert [name for name in names if not re.search(rf"\b{name}\b", program)] == []


@pytest.mark.parametrize(("module", "name"), public_names())
def test_every_public_name_has_an_example(module, name):
    """In its docstring, in that of a method, or on its page of the reference."""
    home = getattr(cd, name).__module__ if module == "crossdevice" else module
    path = ROOT / "src" / home.replace(".", "/")
    files = path.glob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    docstrings = [
        ast.get_docstring(node) or ""
        for file in files
        for thing in ast.parse(file.read_text()).body
        if getattr(thing, "name", None) == name
        for node in ast.walk(thing)
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    ]
    pages = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    shown = [
        block for block in re.findall(r"```py\w+\n(.+?)```", pages, re.S) if re.search(rf"\b{name}\b", block)
    ]
    assert shown or any(">>> " in text for text in docstrings)


NOT_IN_THE_REFERENCE = {
    name
    for names in re.findall(
        r'^FOR_\w+ = \(?\n?((?:\s*"[\w, ]+"\n?)+)', (ROOT / "docs/conf.py").read_text(), re.M
    )
    for name in re.findall(r"\w+", names)
}


def section(docstring, title):
    found = re.search(rf"^{title}:\n((?:    .+\n?|\n)+)", docstring, re.M)
    return found[1] if found else ""


def documented_callables():
    """Every public function, class and method that the reference shows, by its full name."""
    for module, name in public_names():
        if module.endswith((".tensorflow", ".flower")):  # those libraries are not always installed
            continue
        thing = getattr(importlib.import_module(module), name)
        yield f"{module}.{name}", thing
        for attribute, member in vars(thing).items() if inspect.isclass(thing) else ():
            member = getattr(member, "__func__", member)
            is_own = getattr(member, "__qualname__", "") == f"{thing.__qualname__}.{attribute}"
            shown = not attribute.startswith("_") and attribute not in NOT_IN_THE_REFERENCE
            if inspect.isfunction(member) and is_own and shown and inspect.getdoc(member):
                yield f"{module}.{name}.{attribute}", member


def arguments(thing):
    if inspect.isclass(thing) and issubclass(thing, enum.Enum):
        return []
    try:
        signature = inspect.signature(thing)
    except ValueError:
        return []
    return [name for name in signature.parameters if name not in ("self", "cls", "args", "kwargs")]


def test_the_reference_describes_every_argument_and_result():
    silent = []
    for name, thing in documented_callables():
        docstring = inspect.getdoc(thing)
        described = re.findall(r"^    (\w+): ", section(docstring, "Args"), re.M)
        silent += [f"{name}: {each}" for each in arguments(thing) if each not in described]
        if not inspect.isclass(thing) and not section(docstring, "Returns"):
            returns = inspect.signature(thing).return_annotation
            silent += [f"{name}: result"] if returns not in (None, "None") else []
    assert silent == []


RAISE_NOTHING = {
    "Cluster", "DataParallel.train", "DataParallel.zero_grad", "ExactStep", "Fingerprint",
    "Fingerprint.differing_leaves", "IndexedSlices", "Injected", "InputContext", "MirroredVariable",
    "ModuleBits", "ReplicaContext", "ReproducibleReduceScatter.allocate",
    "ReproducibleReduceScatter.mean_over", "Strategy", "Strategy.experimental_local_results",
    "StrategyExtended", "StrategyExtended.non_slot_devices", "StrategyExtended.read_var",
    "StrategyExtended.value_container", "StrategyExtended.variable_created_in_scope",
    "SyncOnReadVariable", "Topology", "ValueContext", "mark_bits", "register_container",
}  # fmt: skip
"""Public names that take arguments and refuse none of them."""


def test_the_reference_says_what_every_call_raises():
    """What "Raises" names is an error of ours or of Python."""
    silent, unknown = set(), []
    for name, thing in documented_callables():
        raised = re.findall(r"^    (\w+): ", section(inspect.getdoc(thing), "Raises"), re.M)
        unknown += [
            (name, each) for each in raised if not hasattr(errors, each) and each not in vars(builtins)
        ]
        if arguments(thing) and not raised:
            silent.add(thing.__qualname__)
    assert (silent - RAISE_NOTHING, RAISE_NOTHING - silent, unknown) == (set(), set(), [])


def test_signatures_of_public_names_are_those_of_their_calls():
    for name, thing in documented_callables():
        if not (inspect.isclass(thing) and issubclass(thing, enum.Enum)):
            kinds = {str(each) for each in inspect.signature(thing).parameters.values()}
            assert not {"*args: 'Any'", "**kwargs: 'Any'"} <= kinds or name.endswith("MirroredModule.to"), (
                name
            )


def test_the_gallery_has_every_example_with_its_output():
    included = re.findall(r"literalinclude\} \.\./examples/(\S+)", (ROOT / "docs/gallery.md").read_text())
    examples = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert sorted(included) == sorted(
        file for name in examples for file in (f"{name}.py", f"output/{name}.txt")
    )


def test_every_page_is_in_the_menu_of_the_site():
    menu = re.findall(r"^[\w/]+$", (ROOT / "docs/index.md").read_text(), re.M)
    pages = {str(path.relative_to(ROOT / "docs").with_suffix("")) for path in (ROOT / "docs").glob("**/*.md")}
    assert set(menu) == {page for page in pages if page != "index" and not page.startswith("decisions/0")}


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def typed_lines(page):
    """Lines of examples that one types; a session's output, such as an error, is wrapped on the site."""
    kind = None
    for line in page.read_text().splitlines():
        if line.lstrip().startswith("```"):
            kind = line.strip("` ") or "none" if kind is None else None
        elif kind == "python" or (kind == "pycon" and line.lstrip().startswith((">>>", "..."))):
            yield line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_fit_into_88_columns(page):
    assert [line for line in typed_lines(page) if len(line) > 88] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_the_names_on_a_page_exist(page):
    names = set(re.findall(r"\bcd\.([A-Za-z_]\w*)", page.read_text()))
    assert sorted(name for name in names if not hasattr(cd, name)) == []


def test_the_algorithm_that_contributing_shows_runs(capsys):
    (program,) = re.findall(
        r"```python\n(import crossdevice.+?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S
    )
    names = {}
    exec(program, names)
    value = cd.PerReplica([1.0, 2.0, 3.0])
    assert names["strategy"].reduce("sum", value, axis=None) == 6
    assert [float(each) for each in names["ChainAllReduce"]().reduce("sum", value, value).values] == [6, 6, 6]
    assert "ChainAllReduce: SUM of 3 replicas" in capsys.readouterr().out

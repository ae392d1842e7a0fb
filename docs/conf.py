"""Settings of the documentation site; `make docs` builds it with warnings as errors."""

from __future__ import annotations

import builtins
import enum
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import crossdevice

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
REPOSITORY = "https://github.com/crossdevice/crossdevice/blob/main/"

project = "crossdevice"
author = "the crossdevice authors"
version = release = crossdevice.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.linkcode", "sphinx.ext.napoleon"]
highlight_language = "none"
default_role = "py:obj"
python_maximum_signature_line_length = 110
python_trailing_comma_in_multi_line_signatures = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

FOR_AUTHORS_OF_ALGORITHMS = "plan_sum, plan_rounds, uses_engine, fallback_reason"
FOR_OUR_OWN_CODE = (
    "of, with_parts, with_results, meet, local_replica, turn, call, compare_always, "
    "make_call, refuse, end, reduces_on, give_up, value_of_rank, belongs_to, joins_graphs, computed, store, "
    "operand, is_order_statistic, sorted_range, "
    "typical_devices, ring_bytes_per_second, is_on_all_ranks"
)
autodoc_default_options = {
    "members": True,
    "member-order": "bysource",
    "exclude-members": f"{FOR_AUTHORS_OF_ALGORITHMS}, {FOR_OUR_OWN_CODE}",
}
autodoc_typehints_format = "short"
# The reference reads the same without PyTorch, TensorFlow and Flower, which are large.
LARGE = ("torch", "tensorflow", "flwr")
autodoc_mock_imports = [name for name in LARGE if importlib.util.find_spec(name) is None]

html_theme = "furo"
html_title = f"crossdevice {version}"
html_static_path = ["_static"]
html_css_files = ["crossdevice.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sphinx = html_show_copyright = False

INCLUDE = re.compile(r"^```\{include\} (\S+)\n```$", re.M)
BLANK_LAST_LINE = re.compile(r"\n(?=\n *```$)", re.M)
"""Needed by doctest at the end of a block; on a page it is only an empty line."""
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")


def included_pages() -> dict[Path, str]:
    """Files outside this folder that a page here consists of, with the name of that page."""
    return {
        (page.parent / target).resolve(): page.stem
        for page in DOCS.glob("*.md")
        for target in INCLUDE.findall(page.read_text())
    }


def with_links_for_the_site(text: str, source: Path, docname: str) -> str:
    """The text with links that work on the site; what is not a page there is linked in the repository."""
    pages = included_pages()

    def replaced(match: re.Match[str]) -> str:
        target, fragment = (source.parent / match[1]).resolve(), match[2] or ""
        if target in pages:
            target = DOCS / f"{pages[target]}.md"
        if target.is_relative_to(DOCS) or not target.exists():  # MyST warns if it is missing
            return os.path.relpath(target, (DOCS / docname).parent) + fragment
        return f"{REPOSITORY}{target.relative_to(ROOT)}{fragment}"

    return LINK.sub(replaced, text)


def read_source(app: Any, docname: str, source: list[str]) -> None:
    """Inserts the files that a page includes, rewrites links, and lists the decision records in the menu."""
    page = DOCS / f"{docname}.md"
    text = with_links_for_the_site(source[0], page, docname)
    for target in INCLUDE.findall(text):
        file = (page.parent / target).resolve()
        included = with_links_for_the_site(file.read_text(), file, docname)
        app.env.note_dependency(str(file))
        text = text.replace(f"```{{include}} {target}\n```", included)
    if docname == "decisions/README":
        text += "\n```{toctree}\n:hidden:\n:glob:\n\n0*\n```\n"
    source[0] = BLANK_LAST_LINE.sub("", text)


def own_signature(
    _app: Any, what: str, _name: str, thing: Any, _options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """The signature of a class's own constructor, which a mock object as its base class, or enum, hides."""
    from sphinx.util import inspect as sphinx_inspect

    if isinstance(thing, type) and issubclass(thing, enum.Enum):
        return "(value)", returns
    if what == "class" and autodoc_mock_imports and "__init__" in vars(thing):
        own = sphinx_inspect.signature(thing.__init__, bound_method=True)
        return sphinx_inspect.stringify_signature(
            own, show_return_annotation=False, unqualified_typehints=True
        ), returns
    return signature, returns


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """The address of an object's source in the repository; None for what has none."""
    if domain != "py":
        return None
    thing: Any = importlib.import_module(info["module"])
    for name in info["fullname"].split("."):
        thing = getattr(thing, name, None)
    thing = inspect.unwrap(getattr(thing, "fget", thing))
    try:
        lines, first = inspect.getsourcelines(thing)
        path = Path(inspect.getsourcefile(thing) or "").resolve()
    except (OSError, TypeError):
        return None
    if not path.is_relative_to(ROOT):
        return None
    return f"{REPOSITORY}{path.relative_to(ROOT)}#L{first}-L{first + len(lines) - 1}"


PYTHON, TORCH = "https://docs.python.org/3/library/", "https://docs.pytorch.org/docs/stable/"
PYTHON_MODULES = ("collections.abc", "contextlib", "datetime", "os", "pathlib")
TORCH_PAGES = {
    "torch.Tensor": "tensors.html#torch.Tensor",
    "torch.device": "tensor_attributes.html#torch.device",
    "torch.dtype": "tensor_attributes.html#torch.dtype",
    "torch.nn.Module": "generated/torch.nn.Module.html",
    "torch.nn.modules.module.Module": "generated/torch.nn.Module.html",
    "torch.nn.parameter.Parameter": "generated/torch.nn.parameter.Parameter.html",
}


def address_elsewhere(name: str) -> str | None:
    """The address of a name in the documentation of Python, NumPy or PyTorch.

    Intersphinx would ask these sites at every build, which is to work without a network, too.
    """
    module = name.rpartition(".")[0]
    if inspect.isclass(getattr(builtins, name, None)) and issubclass(getattr(builtins, name), Exception):
        return f"{PYTHON}exceptions.html#{name}"
    if module in PYTHON_MODULES:
        return f"{PYTHON}{module}.html#{name}"
    if module == "numpy":
        return f"https://numpy.org/doc/stable/reference/generated/{name}.html"
    return TORCH + TORCH_PAGES[name] if name in TORCH_PAGES else None


def link_elsewhere(app: Any, env: Any, node: Any, shown: Any) -> Any:  # noqa: ARG001
    """A link for a name that is not ours; None if there is no page for it."""
    from docutils import nodes

    address = address_elsewhere(node.get("reftarget", ""))
    return address and nodes.reference("", "", shown, refuri=address, internal=False)


def setup(app: Any) -> None:
    """Adds the directive `command-help`, which prints what `crossdevice COMMAND --help` prints."""
    from docutils import nodes
    from docutils.parsers.rst import Directive

    class CommandHelp(Directive):
        """The help of one command, or of all of them."""

        optional_arguments = 1

        def run(self) -> list[nodes.Node]:
            """The text as a literal block."""
            command = [sys.executable, "-m", "crossdevice", *self.arguments, "--help"]
            environment = {**os.environ, "COLUMNS": "88"}
            answer = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            return [nodes.literal_block(answer.stdout, answer.stdout, language="none")]

    app.add_directive("command-help", CommandHelp)
    app.connect("source-read", read_source)
    app.connect("missing-reference", link_elsewhere)
    app.connect("autodoc-process-signature", own_signature)

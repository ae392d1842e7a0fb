"""The documentation site in a real browser: nothing is clipped, on screens of any usual width."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from chromium import opened_chromium

ROOT = Path(__file__).parents[2]
WIDTHS = {390: 844, 1280: 800, 1366: 768, 1440: 900, 1536: 864, 1680: 1050}
"""Screens by their widths, with their heights; the first is a phone's."""

CLIPPED = """
const kinds = "article pre, article table, article dt.sig, article img, .sidebar-tree a";
return [...document.querySelectorAll(kinds)]
  .filter((one) => one.offsetParent !== null)
  .filter((one) => {
    const end = one.getBoundingClientRect().right;
    const frame = one.tagName === "TABLE" ? one.parentElement.getBoundingClientRect().right : innerWidth;
    const scrolls = one.clientWidth > 0 && one.scrollWidth > one.clientWidth + 1;
    return scrolls || end > Math.min(frame, innerWidth) + 1;
  })
  .map((one) => one.tagName + ": " + one.innerText.slice(0, 60))
"""
RESIZED = """
const done = arguments[0];
dispatchEvent(new Event("resize"));
requestAnimationFrame(() => done());
"""
"""On a busy machine the browser tells a page late that it has another width."""
BROKEN_WORDS = """
const range = document.createRange();
const broken = [];
for (const link of document.querySelectorAll(".sidebar-tree a")) {
  const text = link.firstChild;
  for (const found of text.textContent.matchAll(/\\w+/g)) {
    range.setStart(text, found.index);
    range.setEnd(text, found.index + found[0].length);
    if (range.getClientRects().length > 1) broken.push(found[0]);
  }
}
return broken;
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip("Sphinx is not installed")
    folder = tmp_path_factory.mktemp("site")
    words = ["-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "docs", str(folder)]
    built = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def browser():
    with opened_chromium("--disable-dev-shm-usage") as opened:
        yield opened


def at_width(browser, width):
    """Shows pages as a screen of this width does: windows of a browser have a least width."""
    height = WIDTHS[width]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_async_script(RESIZED)


@pytest.mark.more("Sphinx and Chromium")
def test_no_code_table_or_picture_is_clipped(site, browser):
    pages = sorted(site.glob("*.html")) + sorted(site.glob("reference/*.html"))
    assert len(pages) > 30
    clipped = {}
    for page in pages:
        browser.get(page.as_uri())
        for width in WIDTHS:
            at_width(browser, width)
            found = browser.execute_script(CLIPPED)
            if found:
                clipped[page.name, width] = found
    assert clipped == {}


@pytest.mark.more("Sphinx and Chromium")
def test_names_in_the_side_bar_are_not_broken(site, browser):
    browser.get((site / "reference" / "functions.html").as_uri())
    for width in (1280, 1366, 1680):
        at_width(browser, width)
        assert browser.execute_script(BROKEN_WORDS) == []


@pytest.mark.more("Sphinx and Chromium")
def test_a_copied_example_is_what_was_typed(site, browser):
    browser.get((site / "quickstart.html").as_uri())
    at_width(browser, 1280)
    browser.execute_script("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    buttons = browser.find_elements("css selector", "button.copy")
    copied = []
    for button in buttons[:2]:
        browser.execute_script("arguments[0].click()", button)
        copied.append(browser.execute_script("return window.copied"))
    assert copied[0] == "pip install crossdevice"
    assert copied[1].startswith("import numpy as np, crossdevice as cd\ngradients = [\n    {")
    assert "array(" not in copied[1]


@pytest.mark.more("Sphinx")
def test_names_of_python_numpy_and_pytorch_are_links(site):
    functions, torch = ((site / "reference" / f"{name}.html").read_text() for name in ("functions", "torch"))
    everything = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    assert (
        'href="https://docs.python.org/3/library/collections.abc.html#collections.abc.Sequence"' in functions
    )
    assert 'href="https://docs.pytorch.org/docs/stable/tensors.html#torch.Tensor"' in torch
    assert 'href="https://numpy.org/doc/stable/reference/generated/numpy.ndarray.html"' in everything
    assert 'href="https://docs.python.org/3/library/exceptions.html#ValueError"' in everything

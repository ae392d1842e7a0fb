"""What `make test` leaves out is a repetition, or needs what it does not install: no law is left out."""

from __future__ import annotations

import collections
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

from conformance.rows import ALGORITHM_ROWS, NUMPY, TORCH
from drawn_examples import examples

ROOT = Path(__file__).parents[2]
LAWS = ROOT / "tests" / "conformance"

NEEDED = (
    *("JAX", "TensorFlow", "JAX and TensorFlow", "JAX or TensorFlow", "Triton", "Flower", "rich"),
    *("safetensors", "torchvision", "timm", "transformers", "three networks", "one more launch"),
    *("scikit-learn", "PyTorch's whole battery", "Sphinx", "Sphinx and Chromium", "a matrix of 25 launches"),
    *("a GPU", "jax", "tensorflow", "triton"),
)
"""Reasons for which a test may be left out with all its cases."""


class Case(NamedTuple):
    function: str
    words: str
    reasons: list[str]


@pytest.fixture
def cases(request):
    """All tests that this run found, those that it leaves out included."""
    found = [
        Case(*(identifier.partition("[")[::2]), reasons) for identifier, reasons in request.config.found_tests
    ]
    files = {case.function.partition("::")[0] for case in found}
    if not {f"tests/conformance/{path.name}" for path in LAWS.glob("test_law_*.py")} <= files:
        pytest.skip("only part of the laws was asked for")
    return found


def test_every_test_has_a_case_in_make_test_unless_it_needs_more(cases):
    kept = {case.function for case in cases if not case.reasons}
    left_out = {case.function: case.reasons for case in cases if case.function not in kept}
    assert {name: reasons for name, reasons in left_out.items() if not set(reasons) & set(NEEDED)} == {}


def test_properties_are_tried_on_fewer_examples_and_by_make_test_all_on_all_of_them(request, tmp_path):
    assert examples(150).max_examples == (45 if request.config.option.markexpr == "not more" else 150)
    source = """
        from hypothesis import given, settings, strategies

        @given(strategies.integers())
        def test_property(number):
            assert settings.default.max_examples == {}
    """
    for expression, number in (("more", 100), ("not more", 30)):
        path = tmp_path / f"test_{number}.py"
        path.write_text(textwrap.dedent(source).format(number))
        command = ("-m", "pytest", "-q", "-p", "no:xdist", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT)
        done = subprocess.run(
            [sys.executable, *command, "-p", "conftest", "-m", expression, path],
            cwd=ROOT, capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        assert "1 passed" in done.stdout, (expression, done.stdout, done.stderr)


def test_every_law_keeps_every_algorithm_on_numpy_and_on_pytorch(cases):
    laws, kept = collections.defaultdict(set), collections.defaultdict(set)
    for case in cases:
        is_of_another_library = any(reason.startswith("the laws with") for reason in case.reasons)
        if case.function.startswith("tests/conformance/") and not is_of_another_library:
            words = frozenset(case.words.removesuffix("]").split("-"))
            laws[case.function].add(words)
            if not case.reasons:
                kept[case.function].add(words)
    assert laws == kept
    algorithms = {row.name for row in ALGORITHM_ROWS}
    by_both = [words for words in kept.values() if any({NUMPY.name, "direct"} <= each for each in words)]
    assert len(by_both) > 20
    for words in by_both:
        for backend in (NUMPY.name, TORCH.name):
            assert algorithms <= set().union(*(each for each in words if backend in each)), words


def test_every_law_between_processes_is_kept_by_threads_and_by_two_launches(cases):
    rows = [case for case in cases if case.function.startswith("tests/multiprocess/test_laws.py::")]
    for name, count in (("test_processes_keep", 2), ("test_threads_keep", 2)):
        laws, kept = collections.Counter(), collections.Counter()
        for case in rows:
            if case.function.endswith(name):
                law = case.words.removesuffix("]").rsplit("-", 1)[-1]
                laws[law] += 1
                kept[law] += not case.reasons
        assert min(kept.values(), default=count) >= count
        assert set(kept) == set(laws)

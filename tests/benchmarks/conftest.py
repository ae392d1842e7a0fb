"""Where benchmarks find each other, as they do when they are run."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def benchmark(request, _benchmarks_on_path):
    """The benchmark that the test's file is named after."""
    return importlib.import_module(request.path.stem.removeprefix("test_"))

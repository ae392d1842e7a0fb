"""Deprecations fail a test that causes them; what one library tells another is only reported."""

import sysconfig
import warnings
from pathlib import Path

import pytest

from judged_deprecations import judged_deprecations


def library(name, code):
    """Names defined by code that looks as if it were installed."""
    names = {"warnings": warnings}
    path = Path(sysconfig.get_path("purelib"), name, "__init__.py")
    exec(compile(code, path, "exec"), names)
    return names


def deprecated(stack_level):
    return library("speaker", f"def old(): warnings.warn('old', FutureWarning, stacklevel={stack_level})")[
        "old"
    ]


@pytest.mark.parametrize("stack_level", [1, 2])
def test_a_deprecation_that_our_call_causes_is_an_error(stack_level):
    with pytest.raises(FutureWarning, match="old"):
        deprecated(stack_level)()


def test_it_is_one_behind_a_function_of_python_and_in_a_callback():
    with pytest.raises(FutureWarning, match="old"):
        max([1], key=lambda _: deprecated(1)())
    call_back = library("listener", "def call_back(function): function()")["call_back"]
    with pytest.raises(FutureWarning, match="old"):
        call_back(lambda: deprecated(1)())


@pytest.mark.parametrize("stack_level", [1, 2])
def test_what_one_library_tells_another_is_only_reported(stack_level):
    names = library("listener", "def call(function): function()")
    with warnings.catch_warnings(record=True) as reported, judged_deprecations():
        names["call"](deprecated(stack_level))
    assert [str(warning.message) for warning in reported] == ["old"]


def test_other_warnings_are_errors_whoever_issues_them():
    names = library("listener", "def warn(): warnings.warn('careful', UserWarning, stacklevel=1)")
    with pytest.raises(UserWarning, match="careful"):
        names["warn"]()

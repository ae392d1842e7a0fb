"""What all tests share: the order of imports, judged deprecations, and why tests did not run."""

import collections
import contextlib
import gc
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from judged_deprecations import judged_deprecations

# Before anything loads TensorFlow: in the other order it ends the process.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401

ROOT = Path(__file__).parent

SHARED_MEMORY = Path("/dev/shm")
SECONDS_TO_CLEAN_UP = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--nothing-left`, for whole runs."""
    parser.addoption("--nothing-left", action="store_true", help=f"fail if {SHARED_MEMORY} gains files")


def pytest_configure(config: pytest.Config) -> None:
    """Gives the run a temporary folder of its own, so that nothing of launchers and killed ranks stays."""
    with contextlib.suppress(ModuleNotFoundError):  # in environments of few tests there is no hypothesis
        from drawn_examples import choose_examples

        choose_examples(config.option.markexpr)
    if not hasattr(config, "workerinput"):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # of `tmp_path`, which may stay
        config.own_folder = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="cd-")
        # Open MPI does not remove the segment of a process that no launcher has started.
        os.environ["OMPI_MCA_btl_sm_backing_directory"] = config.own_folder  # noqa: SIM112
        config.found_in_memory = set(SHARED_MEMORY.glob("*"))
        tempfile.tempdir = None


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes that folder."""
    if hasattr(config, "own_folder"):
        shutil.rmtree(config.own_folder, ignore_errors=True)


NEEDED = {
    "src/crossdevice/backends/jax_backend.py": "jax",
    "src/crossdevice/backends/tensorflow_backend.py": "tensorflow",
    "src/crossdevice/integrations/tensorflow.py": "tensorflow",
    "docs/coming_from_tensorflow.md": "tensorflow",
    "docs/reference/tensorflow.md": "tensorflow",
    "tests/parity/names.py": "tensorflow",
}
"""Files whose examples need a library that `make test` does not install."""


def _needed_by(path: Path) -> str | None:
    if not path.is_relative_to(ROOT):
        return None
    name = path.relative_to(ROOT).as_posix()
    is_of_triton = name.startswith(
        ("tests/unit/kernels/cuda/compiled_", "tests/unit/kernels/cuda/interpreted_")
    )
    if is_of_triton:
        return "triton"
    return "tensorflow" if name.startswith("tests/parity/test_") else NEEDED.get(name)


def _is_property(item: pytest.Item) -> bool:
    return bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files without tests or examples, which would be imported, and those of unused libraries."""
    if collection_path.suffix != ".py" or collection_path.name == "conftest.py":
        is_left_out = False
    else:
        is_test = collection_path.name.startswith("test_")
        is_left_out = not is_test and ">>>" not in collection_path.read_text()
    if needed := _needed_by(collection_path):
        is_left_out |= config.option.markexpr == "not more" or importlib.util.find_spec(needed) is None
    return is_left_out or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests that others leave out, and notes all that was found, before marks are chosen.

    `make test-all` repeats properties on all of their examples.
    """
    for item in items:
        is_on_gpu = item.path.is_relative_to(ROOT / "tests" / "gpu")
        if needed := "a GPU" if is_on_gpu else _needed_by(item.path):
            item.add_marker(pytest.mark.more(needed))
        elif config.option.markexpr == "more" and _is_property(item):
            item.add_marker(pytest.mark.more("all of its examples"))
    config.found_tests = [
        (item.nodeid, [mark.args[0] for mark in item.iter_markers("more")]) for item in items
    ]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Judges deprecations at import, which no test would report; of what is imported, nothing is garbage."""
    gc.disable()
    try:
        with judged_deprecations():
            return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, Any, Any]:
    """Judges those of fixtures and tests."""
    with judged_deprecations():
        return (yield)


def pytest_collection_finish() -> None:
    """Keeps the millions of objects of libraries and collected tests out of garbage collections."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints what is left in memory, and why tests were skipped or failed as expected, with counts."""
    for path in getattr(config, "left_in_memory", ()):
        terminalreporter.write_line(f"left behind: {path}", red=True)
    counts = collections.Counter(
        (outcome, _reason_of(report))
        for outcome in ("skipped", "xfailed")
        for report in terminalreporter.stats.get(outcome, ())
    )
    if counts:
        terminalreporter.section("did not run, or failed as expected")
    for (outcome, reason), count in sorted(counts.items(), key=lambda row: (row[0][0], -row[1])):
        terminalreporter.write_line(f"{count:6} {outcome:8} {reason}")


def _reason_of(report: Any) -> str:
    if reason := getattr(report, "wasxfail", None):
        return str(reason).removeprefix("reason: ")
    return str(report.longrepr[2]).removeprefix("Skipped: ")


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, Any, Any]:
    """Lets objects go, which some libraries want when Python ends; fails if files outlive all workers."""
    gc.unfreeze()
    result = yield
    config = session.config
    if config.getoption("--nothing-left") and not hasattr(config, "workerinput"):
        config.left_in_memory = _left_in_memory(config.found_in_memory)
        if config.left_in_memory:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return result


def _left_in_memory(found_before: set[Path]) -> list[Path]:
    """The new files that stay: Python's resource tracker cleans up after the workers, and may be late."""
    deadline = time.monotonic() + SECONDS_TO_CLEAN_UP
    while left := set(SHARED_MEMORY.glob("*")) - found_before:
        left -= _of_other_programs()
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return sorted(left)


def _of_other_programs() -> set[Path]:
    """Files in shared memory that a process has mapped or open which this run has not started."""
    found = set()
    of_this_run = f"TMPDIR={os.environ['TMPDIR']}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            environment = (process / "environ").read_bytes().split(b"\0")
            if of_this_run not in environment and process.name != str(os.getpid()):
                opened = [os.readlink(link) for link in (process / "fd").iterdir()]
                mapped = [line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines()]
                found |= {Path(name) for name in (*opened, *mapped) if name.startswith(f"{SHARED_MEMORY}/")}
    return found

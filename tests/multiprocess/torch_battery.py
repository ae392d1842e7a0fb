"""Runs PyTorch's own battery for backends of torch.distributed, which its wheel has, on one of them.

    python torch_battery.py BACKEND WORLD_SIZE OUTCOMES.json [TEST ...]

All that is here are patches of `torch.testing._internal.distributed.distributed_test`:

- while it is imported, its BACKEND equals "gloo" and "mpi", so that its decorators choose the tests that gloo
  runs, and the all-to-alls of CPU tensors, which they keep for MPI;
- three ranks are enough for tests that ask for more without a need;
- ranks are forked from a process in which nothing has run yet, and not started anew for each test.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import unittest
from typing import Any

TEST_SECONDS = 60


class Alias(str):
    """The name of a backend, in whose tests it counts as another one too."""

    __slots__ = ()
    also: tuple[str, ...] = ("gloo", "mpi")

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) is True or other in Alias.also

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


def battery(backend: str) -> Any:
    """The module of tests, patched for a backend, with its profiler events asked for."""
    import torch.testing._internal.common_distributed as common

    for names in common.DistTestCases.backend_feature.values():
        names.add(backend)
    if int(os.environ["WORLD_SIZE"]) >= 3:
        common.skip_if_small_worldsize = lambda test: test
    common.TIMEOUT_OVERRIDE.clear()
    environment = type(os.environ)
    plain = environment.__getitem__
    environment.__getitem__ = lambda self, key: Alias("gloo") if key == "BACKEND" else plain(self, key)
    try:
        import torch.testing._internal.distributed.distributed_test as tests
    finally:
        environment.__getitem__ = plain
    os.environ["BACKEND"] = backend
    tests.BACKEND = Alias(backend)
    Alias.also = ("gloo",)
    for names in (tests.PROFILING_SUPPORTED_BACKENDS, tests.SEND_RECV_PROFILING_SUPPORTED_BACKENDS):
        if backend not in names:
            names.append(backend)
    return tests


def cases(tests: Any) -> type[unittest.TestCase]:
    """The battery as a case that forks its ranks."""
    import torch

    class Battery(tests.TestDistBackend, tests.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)
            self.started = list(self.processes)

        def tearDown(self) -> None:
            super().tearDown()
            for process in self.started:
                process.join(2)
                if process.is_alive():
                    process.kill()
                    process.join()

    return Battery


class Outcomes(unittest.TestResult):
    """What became of each test, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[Any]] = {}
        self.began = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self.began = time.monotonic()
        self.note(test, "passed")

    def note(self, test: unittest.TestCase, outcome: str, text: str = "") -> None:
        seconds = round(time.monotonic() - self.began, 2)
        self.found[test._testMethodName] = [outcome, seconds, text]

    def addSuccess(self, test: unittest.TestCase) -> None:
        self.note(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self.note(test, "skipped", reason)

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self.note(test, "failed", self._exc_info_to_string(err, test)[-4000:])

    addFailure = addError


def main(backend: str, world_size: str, path: str, *names: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(
            BACKEND="gloo",
            WORLD_SIZE=world_size,
            TMPDIR=folder,
            TEMP_DIR=folder,
            INIT_METHOD=f"file://{folder}/shared_init_file",
            DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(TEST_SECONDS),
            GLOO_SOCKET_IFNAME="lo",
            CUDA_VISIBLE_DEVICES="",
            OMP_NUM_THREADS="1",
            TORCH_DISABLE_ADDR2LINE="1",
        )
        tempfile.tempdir = None
        if backend == "crossdevice":
            import crossdevice.integrations.torch  # noqa: F401 - registers the backend
        battery_cases, outcomes = cases(battery(backend)), Outcomes()
        for name in names or unittest.TestLoader().getTestCaseNames(battery_cases):
            battery_cases(name).run(outcomes)
        with open(path, "w") as file:
            json.dump(outcomes.found, file, indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:])

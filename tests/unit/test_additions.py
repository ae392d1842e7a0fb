"""An algorithm, a backend, a transport and a layout take the files that CONTRIBUTING says, and no more."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

ALGORITHM_HEAD = '''"""Along a chain and back."""

from __future__ import annotations

from collections.abc import Sequence

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.plans.builder import PlanBuilder
from crossdevice.plans.steps import Buffer
from crossdevice.values.device import Device


'''

TRANSPORT = '''"""All arrays to all ranks, in one message from each."""

from __future__ import annotations

import numpy as np

from crossdevice.kernels.host.fused_pass import fused_batch


def whole_unavailable(wanted):
    """Reason arrays cannot go this way; None if they can."""
    return None if wanted.options.precision == "accurate" else "it is for accurate sums"


class Whole:
    """Sends all arrays of this rank to every other one, and runs its own tasks on those of all."""

    def __init__(self, emit, leaves, group, devices):
        self.plan, self._group = emit(is_small=True, seen_by=None), group

    def explained(self):
        return "sends everything to every other process"

    def small_arrays(self):
        return None

    def run(self, call, inputs, results, weights=None):
        (leaf, (own,)), *_ = inputs.items()
        come = [np.frombuffer(each, own.dtype) for each in call.all_gather(own.tobytes())]
        for task in self.plan.results:
            if task.worker == self._group.rank:
                arrays = [come[ref.buffer.rank][ref.start : ref.stop] for ref in task.inputs]
                fused_batch([(arrays, results[leaf, 0])], task.recipe.with_weights(weights))
'''

TRANSPORT_ROW = """    "whole": Transport(
        whole_unavailable,
        functools.partial(HostReduction, prepare=Whole),
        "it only has all-reduces",
        "it only has all-reduces",
        is_on_host=True,
    ),
    "messages": Transport("""

LAYOUT = '''"""Shift: each rank gets the array of the one before it."""

from __future__ import annotations

from crossdevice.plans.tasks import Buffer, Ref, Task, TaskPlan
from crossdevice.values.recipe import COPYING


def shift(num_bytes, size, *, distance=1, seen_by=None):
    """The tasks for one array of so many bytes on each rank."""
    tasks = []
    for worker in range(size):
        source = Buffer("input", (worker - distance) % size, 0, 0, "uint8", num_bytes)
        target = Buffer("result", worker, 0, 0, "uint8", num_bytes)
        tasks.append(Task(1, worker, (Ref.whole(source),), COPYING, (Ref.whole(target),)))
    return TaskPlan(size, tuple(tasks), seen_by)
'''

MEANING = '''

def meaning_of_shift(num_bytes: int, size: int) -> Meaning:
    """Each rank has what the one before it had."""
    return _of_places(
        {
            (rank, 0, 0): [Made(0, num_bytes, COPYING, (((rank - 1) % size, 0, 0, 0),))]
            for rank in range(size)
        }
    )
'''

PROGRAM = """
import array_api_strict, numpy as np
import crossdevice as cd
from crossdevice.errors import PlanError
from crossdevice.execution.processes.layouts.shift import shift
from crossdevice.plans.task_ledger import check_tasks, meaning_of_shift
from crossdevice.testing import run_ranks

value = cd.PerReplica([1.0, 2.0, 3.0])
assert cd.ChainAllReduce().reduce("sum", value, "cpu:0") == 6
assert cd.AllReduceCrossDeviceOps("chain").reduce("sum", value, "cpu:0") == 6
assert "ChainAllReduce" in cd.__all__

arrays = [array_api_strict.asarray([1.0, 2.0]), array_api_strict.asarray([3.0, 4.0])]
assert cd.reduce(arrays).__class__.__module__.startswith("array_api_strict")

def rank(group):
    value = np.arange(10000.0) + group.rank
    for precision, words in (("accurate", "sends everything to every other"), ("fast", "sends shards")):
        options = cd.CommunicationOptions(precision=precision)
        ops = cd.CollectiveAllReduce(group=group, options=options)
        assert np.array_equal(ops.reduce("sum", value, "cpu:0"), 2 * np.arange(10000.0) + 1)
        assert words in str(ops.explain(value, "cpu:0"))

run_ranks(2, rank)

check_tasks(shift(100, 3), meaning_of_shift(100, 3))
try:
    check_tasks(shift(100, 3, distance=2), meaning_of_shift(100, 3))
except PlanError:
    print("all four work")
"""


def insert(path, before, row):
    text = path.read_text()
    assert text.count(before) == 1, path
    path.write_text(text.replace(before, row))


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A copy of what `make generated` reads, with one more of each."""
    root = tmp_path_factory.mktemp("house")
    for name in ("src", "docs", "checks"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    shutil.copy(ROOT / "pyproject.toml", root)
    package = root / "src/crossdevice"
    shown = re.search(r"(class ChainAllReduce\(.+?)\n\n\n", (ROOT / "CONTRIBUTING.md").read_text(), re.S)[1]
    source = ALGORITHM_HEAD + shown.replace("cd.CrossDeviceOps", "CrossDeviceOps") + "\n"
    (package / "algorithms/chain_all_reduce.py").write_text(source)
    row = '"crossdevice.algorithms.chain_all_reduce:ChainAllReduce", "2 (N - 1)", "2 S"'
    first = "OWN_ALGORITHMS: Mapping[str, AlgorithmRow] = {\n"
    insert(package / "algorithms/registry.py", first, f'{first}    "chain": AlgorithmRow({row}),\n')
    shutil.copy(ROOT / "tests/plugins/array_api_strict_backend.py", package / "backends")
    numpys = '        "numpy": "crossdevice.backends.numpy_backend:NumpyBackend",\n'
    target = "crossdevice.backends.array_api_strict_backend:ArrayApiStrictBackend"
    insert(package / "backends/registry.py", numpys, f'{numpys}        "array_api_strict": "{target}",\n')
    processes = package / "execution/processes"
    (processes / "transports/whole.py").write_text(TRANSPORT)
    insert(processes / "choice.py", '    "messages": Transport(', TRANSPORT_ROW)
    imports = "from crossdevice.execution.processes.transports.windows import"
    new = "from crossdevice.execution.processes.transports.whole import Whole, whole_unavailable\n"
    insert(processes / "choice.py", imports, new + imports)
    (processes / "layouts/shift.py").write_text(LAYOUT)
    ledger = package / "plans/task_ledger.py"
    ledger.write_text(ledger.read_text() + MEANING)
    run(root, "checks/generated.py")
    return root


def run(root, *arguments):
    env = os.environ | {"PYTHONPATH": str(root / "src"), "CROSSDEVICE_KERNELS": "numpy"}
    ended = subprocess.run(
        [sys.executable, *arguments], cwd=root, env=env, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_one_more_of_each_works(house):
    assert run(house, "-c", PROGRAM) == "all four work\n"


def test_files_that_speak_of_all_algorithms_know_one_more(house):
    page = (house / "docs/algorithms.md").read_text()
    assert "\n| `chain` | `ChainAllReduce` | 2 (N - 1) | 2 S | 14 | 2 S | 14 S | 35 S |\n" in page
    assert "\n## ChainAllReduce\n\nEach device adds its own" in page
    assert ".. autoclass:: ChainAllReduce\n" in (house / "docs/reference/algorithms.md").read_text()
    assert "        cd.ChainAllReduce(),\n" in (house / "checks/user_program.py").read_text()


def test_the_contract_about_frameworks_knows_one_more_backend(house):
    project = tomllib.loads((house / "pyproject.toml").read_text())
    (optional,) = (
        each
        for each in project["tool"]["importlinter"]["contracts"]
        if each["name"].startswith("Frameworks are optional")
    )
    assert "array_api_strict" in optional["forbidden_modules"]
    importer = "crossdevice.backends.array_api_strict_backend -> array_api_strict"
    assert importer in optional["ignore_imports"]

"""What `crossdevice doctor` prints, on this machine and on machines that are made up."""

import importlib.machinery
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import crossdevice
from crossdevice.cli.doctor import diagnosis
from crossdevice.cli.main import main
from crossdevice.kernels.host.fused_pass import select_kernels
from crossdevice.kernels.host.resources import threads

TITLES = [
    "devices",
    "libraries",
    "NCCL",
    "links between GPUs",
    "shared memory",
    "threads",
    "kernels",
    "processes",
    "algorithms",
]


def said(capsys, *words):
    assert main(["doctor", *words]) == 0
    return capsys.readouterr().out


def findings(capsys):
    """All findings by section and name."""
    sections = json.loads(said(capsys, "--json"))["sections"]
    return {title: {each["what"]: each for each in found} for title, found in sections.items()}


class NVMLError(Exception):
    pass


@pytest.fixture
def machine(monkeypatch):
    """A machine with GPUs that only the management library and PyTorch know of; a test says which."""
    nvml = types.ModuleType("pynvml")
    nvml.__spec__ = importlib.machinery.ModuleSpec("pynvml", None)
    nvml.NVMLError, nvml.NVML_P2P_STATUS_OK, nvml.NVML_NVLINK_MAX_LINKS = NVMLError, 0, 36
    nvml.names = ["H200", "H200", "T4"]
    nvml.failure = None

    def init():
        if nvml.failure:
            raise NVMLError(nvml.failure)

    def link_state(handle, link):
        if link >= 18:
            raise NVMLError("Invalid Argument")
        return 1

    def peer_status(one, other, capability):
        same = nvml.names[one] == nvml.names[other]
        return 0 if same and capability == diagnosis.PEER_NVLINK else 5

    nvml.nvmlInit, nvml.nvmlShutdown = init, lambda: None
    nvml.nvmlDeviceGetCount = lambda: len(nvml.names)
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetName = lambda handle: nvml.names[handle].encode()
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(total=2 << 30, free=1 << 30)
    nvml.nvmlSystemGetDriverVersion = lambda: "580.1"
    nvml.nvmlSystemGetCudaDriverVersion_v2 = lambda: 13020
    nvml.nvmlDeviceGetNvLinkState, nvml.nvmlDeviceGetP2PStatus = link_state, peer_status
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    nvml.seen = {"torch": 3}
    monkeypatch.setattr(diagnosis, "seen_by_libraries", lambda: nvml.seen)
    monkeypatch.setattr(
        diagnosis.Path, "exists", lambda path: str(path) != "/dev/nvidiactl" and os.path.exists(path)
    )
    return nvml


def test_the_text_has_all_sections_in_order_and_the_versions(capsys):
    text = said(capsys)
    assert text.startswith(f"crossdevice {crossdevice.__version__} python ")
    places = [text.index(f"\n{title}\n") for title in TITLES]
    assert places == sorted(places)
    import numpy as np

    assert f"numpy             {np.__version__}" in text
    assert "cpu:0, cpu:1, ...  DirectAllReduce: all devices share the host's memory" in text


def test_json_has_the_same_findings(capsys):
    answer = json.loads(said(capsys, "--json"))
    assert list(answer["sections"]) == TITLES
    assert answer["crossdevice"] == crossdevice.__version__
    for found in answer["sections"].values():
        assert found
        for each in found:
            assert set(each) == {"what", "found", "is_well", "advice", "is_complete"}
    assert "could not be looked at" not in json.dumps(answer)


def test_the_launcher_is_told_and_what_it_left_out(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert findings(capsys)["processes"]["launcher"]["found"].startswith(
        "RANK is set (1), but WORLD_SIZE is not"
    )
    assert "\n  ! launcher: set the missing variables" in said(capsys)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert findings(capsys)["processes"]["launcher"]["found"].startswith("environment: rank 1 of 2")


@pytest.mark.more("rich")
def test_a_terminal_with_rich_gets_tables(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("TERM", raising=False)
    text = said(capsys)
    assert "libraries" in text
    assert "DirectAllReduce" in text


def test_gpus_links_and_the_choice_for_them(machine, capsys):
    found = findings(capsys)
    assert found["devices"]["GPU 2"]["found"] == "T4, 2 GiB, 1 GiB of it free"
    assert found["devices"]["NVIDIA driver"]["found"] == "580.1, for CUDA up to 13.2"
    assert found["devices"]["GPUs that torch can use"]["found"] == "cuda:0, cuda:1, cuda:2"
    links = found["links between GPUs"]["GPU 0"]
    assert links["found"] == "18 NVLinks; GPU 1 NVLink, GPU 2 through the host"
    assert not links["is_well"]
    assert "nvidia-smi topo -m" in links["advice"]
    assert found["algorithms"]["cuda:0, cuda:1, cuda:2"]["found"].startswith("NcclAllReduce: ")
    assert list(found["NCCL"]) == ["nccl4py", "torch.cuda.nccl", "cupy.cuda.nccl", "for torch arrays"]


def test_gpus_that_fuse_are_told_from_those_that_do_not(machine, capsys, monkeypatch):
    monkeypatch.setattr(diagnosis, "kernels_unavailable", lambda: None)
    monkeypatch.setattr(
        diagnosis, "gpu_unavailable", lambda index: "this GPU has 7.5" if index == 2 else None
    )
    kernels = findings(capsys)["kernels"]
    assert kernels["fused passes on cuda:0"]["found"] == "by Triton kernels"
    assert kernels["fused passes on cuda:2"]["found"].endswith("run step by step: this GPU has 7.5")
    assert not kernels["fused passes on cuda:2"]["is_well"]
    monkeypatch.setattr(diagnosis, "kernels_unavailable", lambda: "its kernels need Triton")
    missing = findings(capsys)["kernels"]["fused passes on cuda:1"]
    assert (missing["is_well"], missing["advice"]) == (False, "pip install 'crossdevice[gpu]', on Linux")


def test_a_library_that_sees_no_gpu_where_there_is_one_is_told_on(machine, capsys):
    machine.seen = {"torch": 0, "cupy": "ImportError: libcudart.so"}
    devices = findings(capsys)["devices"]
    assert not devices["GPUs that torch can use"]["is_well"]
    assert "CUDA build of torch" in devices["GPUs that torch can use"]["advice"]
    assert devices["GPUs that cupy can use"]["found"] == "ImportError: libcudart.so"
    assert "\n  ! GPUs that torch can use: install the CUDA build of torch" in said(capsys)


def test_where_there_is_no_gpu_nothing_is_recommended_for_one(machine, capsys, monkeypatch):
    machine.names, machine.seen = [], None  # and libraries are not even asked
    monkeypatch.setattr(diagnosis, "seen_by_libraries", lambda: pytest.fail("asked"))
    monkeypatch.setattr(diagnosis, "installed_version", lambda distribution: None)
    found = findings(capsys)
    assert found["libraries"]["cupy"] == {
        "what": "cupy",
        "found": "not installed",
        "is_well": True,
        "advice": "",
        "is_complete": True,
    }
    assert found["libraries"]["torch"]["advice"].startswith("pip install 'crossdevice[torch]': ")
    assert not found["libraries"]["numpy"]["is_well"]
    assert found["NCCL"]["NCCL"]["found"] == "needs a GPU; there is none"


@pytest.mark.parametrize("failure", ["Driver Not Loaded", "Insufficient Permissions"])
def test_a_management_library_that_fails_is_quoted(machine, capsys, failure):
    machine.failure = failure
    found = findings(capsys)
    assert found["devices"]["NVIDIA management library"]["found"] == failure
    assert found["links between GPUs"]["links"]["found"] == f"unknown: {failure}"


def test_missing_libraries_are_named_with_what_they_give(machine, capsys, monkeypatch):
    real = diagnosis.installed_version
    missing = {"mpi4py", "triton"}
    monkeypatch.setattr(diagnosis, "installed_version", lambda name: None if name in missing else real(name))
    text = said(capsys)
    assert "\n  mpi4py: pip install 'crossdevice[mpi]': reductions between the processes of MPI\n" in text
    assert "triton: pip install 'crossdevice[gpu]': the fused GPU kernel" in text


def test_a_section_that_fails_says_so_and_the_others_go_on(capsys, monkeypatch):
    def fails(gpus):
        yield from ()
        raise OSError("no such device")

    monkeypatch.setitem(diagnosis.SECTIONS, "shared memory", fails)
    found = findings(capsys)
    (shared,) = found["shared memory"].values()
    assert shared["found"] == "could not be examined: OSError: no such device"
    assert not shared["is_well"]
    assert found["threads"]["threads of a large pass"]["is_well"]


def test_more_threads_than_processors_are_noticed(capsys, monkeypatch):
    granted = threads.granted_processors()
    threads.set_num_threads(granted + 1)
    try:
        found = findings(capsys)["threads"]["threads of a large pass"]
    finally:
        threads.set_num_threads(None)
    assert not found["is_well"]
    assert "CROSSDEVICE_NUM_THREADS" in found["advice"]


def test_the_folder_of_compiled_kernels_is_the_one_that_numba_uses(capsys):
    pytest.importorskip("numba")
    from crossdevice.kernels.host.llvm.numba_pass import compiled_kernel

    folder = compiled_kernel("chain native SUM float32").stats.cache_path
    assert list(Path(folder).glob("*.nbi"))
    assert findings(capsys)["kernels"]["compiled kernels"]["found"].startswith(f"{folder}: ")


def test_kernels_that_are_not_compiled_are_noticed(capsys):
    select_kernels("numpy")
    try:
        found = findings(capsys)["kernels"]["compiled kernels"]
    finally:
        select_kernels(None)
    assert found["found"] == "disabled, fused passes use NumPy"
    assert "NUMBA_DISABLE_JIT" in found["advice"]


def test_a_small_shared_memory_is_noticed(capsys, monkeypatch):
    usage = types.SimpleNamespace(total=64 << 20, free=60 << 20)
    monkeypatch.setattr(diagnosis.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(diagnosis.Path, "is_dir", lambda path: True)
    (found,) = findings(capsys)["shared memory"].values()
    assert found["found"] == "64 MiB, 60 MiB of it free"
    assert "--shm-size" in found["advice"]


def test_only_libraries_that_are_asked_for_gpus_are_imported():
    code = (
        "import contextlib, io, sys\n"
        "from crossdevice.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()): main(['doctor'])\n"
        "print(sorted({'jax', 'tensorflow', 'triton', 'mpi4py'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"

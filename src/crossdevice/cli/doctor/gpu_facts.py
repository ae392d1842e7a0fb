"""Facts about GPUs from NVIDIA's management library, without waking them, and from the array libraries."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from typing import Any, NamedTuple

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

"""Calls of the CUDA driver, for which a table of functions stands in."""

from __future__ import annotations

import ctypes
import gc

import pytest

from crossdevice.kernels.cuda import driver

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("has_context_then", [True, False])
def test_a_thread_without_a_context_takes_that_of_the_gpu_and_calls_again(monkeypatch, has_context_then):
    calls = []

    class Stream:
        def query(self):
            calls.append("query")

    def synchronize(stream):
        calls.append("synchronize")
        return 0 if has_context_then and "query" in calls else driver.INVALID_CONTEXT

    functions = {"cuStreamSynchronize": synchronize, "cuGetErrorName": lambda status, text: 0}
    monkeypatch.setattr(driver, "_function", functions.__getitem__)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    if has_context_then:
        driver.synchronize(0)
    else:
        with pytest.raises(driver.DriverError, match="cuStreamSynchronize"):
            driver.synchronize(0)
    assert calls == ["synchronize", "query", "synchronize"]


def test_a_prepared_launch_keeps_its_arguments(monkeypatch):
    launched = []

    def launch(function, *rest):
        *grid, stream, none, buffer = rest
        assert none is None
        num_bytes = ctypes.c_size_t.from_address(buffer[3]).value
        numbers = (ctypes.c_int64 * (num_bytes // 8)).from_address(buffer[1])
        assert (buffer[0], buffer[2], buffer[4]) == (driver.BUFFER, driver.BUFFER_BYTES, None)
        launched.append((function.value, [each.value for each in grid], stream.value, list(numbers)))
        return 0

    monkeypatch.setattr(driver, "_function", {"cuLaunchKernel": launch}.__getitem__)
    start = driver.prepared_launch(1 << 40, 3, 256, 4096, [1 << 45, -7, 0])
    gc.collect()
    for stream in (1 << 41, 5):
        start(stream)
    expected = 1 << 40, [3, 1, 1, 256, 1, 1, 4096]
    assert launched == [(*expected, stream, [1 << 45, -7, 0]) for stream in (1 << 41, 5)]

"""Calls of the CUDA driver, for which a table of functions stands in."""

from __future__ import annotations

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

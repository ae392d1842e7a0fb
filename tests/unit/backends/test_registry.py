"""There is one backend object for each library, whichever threads ask first."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import crossdevice as cd
from crossdevice.backends import registry
from crossdevice.errors import ConversionError


def test_threads_that_meet_a_library_at_once_get_one_backend(monkeypatch):
    together = threading.Barrier(8, timeout=60)

    class Library:
        def __init__(self):
            together.wait()  # all threads make one, as if all had found none

    monkeypatch.setattr(registry, "_by_name", {})
    monkeypatch.setattr(registry.BACKENDS, "load", lambda name: Library)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(registry.backend_named, ["some library"] * 8))
    assert len({id(backend) for backend in found}) == 1
    assert registry.backend_named("some library") is found[0]


def test_a_module_with_a_dtype_is_no_array():
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):  # as PreTrainedModel of transformers
        dtype = property(lambda self: torch.float32)

    assert registry.backend_of_type(Model) is None
    assert registry.backend_of_type(torch.nn.Parameter) is registry.backend_named("torch")
    with pytest.raises(ConversionError, match="replica 0 holds a Model"):
        cd.Accumulator().add(Model())

"""There is one backend object for each library, whichever threads ask first."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from crossdevice.backends import registry


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

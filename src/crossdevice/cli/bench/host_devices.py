"""Logical host devices of libraries that fix their number when they start."""

from __future__ import annotations

import contextlib
import importlib

from crossdevice.backends.registry import backend_named
from crossdevice.values.device import host_device


def make_host_devices(library: str, number: int) -> None:
    """Has the library make so many; refused where it has started already with fewer, or has none."""
    backend = backend_named(library)
    with contextlib.suppress(RuntimeError):  # it has started: what it has may do
        if library == "jax":
            config = importlib.import_module("jax").config
            config.update("jax_enable_x64", True)  # else its doubles have 32 bits, and are counted as wrong
            config.update("jax_num_cpu_devices", number)
        elif library == "tensorflow":
            config = importlib.import_module("tensorflow").config
            host = config.list_physical_devices("CPU")[0]
            config.set_logical_device_configuration(host, [config.LogicalDeviceConfiguration()] * number)
    for index in range(number):
        backend.check_device(host_device(index))

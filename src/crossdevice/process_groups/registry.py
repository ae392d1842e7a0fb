"""The engines between processes, by name."""

from __future__ import annotations

from crossdevice.values.registry import Registry

PROCESS_ENGINES = Registry(
    "an engine between processes",
    {
        "torch": "crossdevice.process_groups.torch_group:form_in_cluster",
        "mpi": "crossdevice.process_groups.mpi_group:form_in_cluster",
        "threads": "crossdevice.process_groups.thread_group:form_in_cluster",
    },
    entry_point_group="crossdevice.engines",
)
"""Each is a function `(cluster, *, name, timeout_seconds) -> Engine`."""

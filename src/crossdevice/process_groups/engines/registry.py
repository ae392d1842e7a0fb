"""The engines between processes, by name."""

from __future__ import annotations

from crossdevice.values.registry import Registry

PROCESS_ENGINES = Registry(
    "an engine between processes",
    {
        "torch": "crossdevice.process_groups.engines.torch_engine:form_in_cluster",
        "mpi": "crossdevice.process_groups.engines.mpi_engine:form_in_cluster",
        "local": "crossdevice.process_groups.engines.local_engine:form_in_cluster",
        "threads": "crossdevice.process_groups.engines.thread_engine:form_in_cluster",
    },
    entry_point_group="crossdevice.engines",
)
"""Each is a function `(cluster, *, name, timeout_seconds) -> Engine`."""

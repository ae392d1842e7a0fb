"""JAX's psum in a shard_map on logical CPU devices: a peer.

It runs in a process of its own, since the number of devices is fixed when JAX starts.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from crossdevice.cli.bench import data
from crossdevice.cli.bench.calls import Calls, Competitor
from crossdevice.cli.bench.host_devices import make_host_devices
from crossdevice.cli.bench.peers import PeerSetup
from crossdevice.cli.bench.workload import Workload

_FUNCTIONS = {"SUM": "psum", "MEAN": "pmean", "MIN": "pmin", "MAX": "pmax"}


class JaxPsum(Competitor):
    """One compiled psum over all arrays, waited for."""

    name = "jax"
    collectives = ("all_reduce",)
    ops = tuple(_FUNCTIONS)

    def __init__(self, setup: PeerSetup) -> None:
        os.environ["JAX_PLATFORMS"] = "cpu"
        make_host_devices("jax", setup.num_devices)
        self._jax: Any = importlib.import_module("jax")

    def ready(self, work: Workload, inputs: Sequence[data.Arrays]) -> Calls:
        """JAX arrays cannot be written to: results are always new."""
        self.check(work)
        jax, sharding = self._jax, importlib.import_module("jax.sharding")
        devices = jax.devices("cpu")[: work.num_devices]
        mesh = sharding.Mesh(np.array(devices), ("replicas",))
        split, whole = sharding.PartitionSpec("replicas"), sharding.PartitionSpec()
        function = getattr(jax.lax, _FUNCTIONS[work.op])

        def all_reduce(arrays: list[Any]) -> list[Any]:
            return [function(array, "replicas") for array in arrays]

        compiled = jax.jit(jax.shard_map(all_reduce, mesh=mesh, in_specs=split, out_specs=whole))
        values = [
            jax.make_array_from_single_device_arrays(
                (work.num_devices * column[0].size,),
                sharding.NamedSharding(mesh, split),
                [jax.device_put(array, device) for array, device in zip(column, devices, strict=True)],
            )
            for column in zip(*inputs, strict=True)
        ]
        return Calls(work, {"fresh": lambda: jax.block_until_ready(compiled(values))}, read=_read)


def _read(results: list[Any]) -> list[data.Arrays]:
    columns = [[np.asarray(shard.data) for shard in result.addressable_shards] for result in results]
    return [list(arrays) for arrays in zip(*columns, strict=True)]

"""JAX and TensorFlow on logical CPU devices: peers that compile the whole call.

Each runs in a process of its own, since the number of devices is fixed when the library starts.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.protocol import dtype_named
from crossdevice.backends.registry import backend_named
from crossdevice.cli.bench import data
from crossdevice.cli.bench.measure import Calls, Competitor
from crossdevice.cli.bench.peers import PeerSetup
from crossdevice.cli.bench.workload import Workload
from crossdevice.values.device import host_device


def make_host_devices(library: str, number: int) -> None:
    """Makes the library create this many host devices; refuses if it has started with fewer."""
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
        """Prepares calls with new results: JAX arrays cannot be written to."""
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


class JaxJit(Competitor):
    """A jitted sum of arrays on one device; the result is one array."""

    name = "jax_jit"
    collectives = ("reduce",)
    ops = ("SUM", "MEAN")

    def __init__(self, setup: PeerSetup) -> None:
        del setup
        os.environ["JAX_PLATFORMS"] = "cpu"
        self._jax: Any = importlib.import_module("jax")
        self._jax.config.update("jax_enable_x64", True)

    def ready(self, work: Workload, inputs: Sequence[data.Arrays]) -> Calls:
        """Prepares calls with new results: JAX arrays cannot be written to."""
        self.check(work)
        jax = self._jax
        columns = [[jax.device_put(array) for array in column] for column in zip(*inputs, strict=True)]

        def all_sums(columns: Any) -> Any:
            totals = []
            for first, *others in columns:
                total = first
                for other in others:
                    total = total + other
                totals.append(total / work.num_devices if work.op == "MEAN" else total)
            return totals

        compiled = jax.jit(all_sums)
        return Calls(
            work,
            {"fresh": lambda: jax.block_until_ready(compiled(columns))},
            read=lambda totals: [[np.asarray(total) for total in totals]],
        )


Columns = list[list[Any]]
"""Tensors of all replicas, for each array."""


class TensorflowReductionToOneDevice(Competitor):
    """TensorFlow's default on CPUs; its results turn out to be one buffer that all devices see."""

    name = "tensorflow"
    collectives = ("all_reduce",)
    ops = ("SUM", "MEAN")

    def __init__(self, setup: PeerSetup) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        make_host_devices("tensorflow", setup.num_devices)
        self._tf: Any = importlib.import_module("tensorflow")
        self._distribute = "tensorflow.python.distribute"

    def ready(self, work: Workload, inputs: Sequence[data.Arrays]) -> Calls:
        """Prepares calls with new results, as TensorFlow always makes them."""
        self.check(work)
        columns = self._placed(list(column) for column in zip(*inputs, strict=True))
        function = self._tf.function(self._all_reduce(work), autograph=False)
        return Calls(work, {"fresh": lambda: function(columns)}, read=self._read)

    def _all_reduce(self, work: Workload) -> Callable[[Columns], Columns]:
        """Returns the function that becomes a tf.function."""
        ops = self._ops()
        op = self._tf.distribute.ReduceOp(work.op)
        per_replica = importlib.import_module(f"{self._distribute}.values").PerReplica

        def all_reduce(columns: Columns) -> Columns:
            values = [per_replica(column) for column in self._placed(columns)]
            results = ops.batch_reduce(op, [(value, value) for value in values])
            return [list(result.values) for result in results]

        return all_reduce

    def _ops(self) -> Any:
        return self._tf.distribute.ReductionToOneDevice()

    def _read(self, columns: Columns) -> list[data.Arrays]:
        return [[self._view(tensor) for tensor in tensors] for tensors in zip(*columns, strict=True)]

    def _view(self, tensor: Any) -> NDArray[Any]:
        """Views arrays without a copy, so that addresses show shared results; bfloat16 has no buffers."""
        if tensor.dtype == self._tf.bfloat16:
            bits = np.asarray(memoryview(self._tf.bitcast(tensor, self._tf.uint16)))
            return bits.view(dtype_named("bfloat16"))
        return np.asarray(memoryview(tensor))

    def _placed(self, columns: Any) -> Columns:
        placed: Columns = []
        for column in columns:
            placed.append([])
            for replica, array in enumerate(column):
                with self._tf.device(f"/cpu:{replica}"):
                    placed[-1].append(self._tf.identity(array))
        return placed


class TensorflowHierarchicalCopy(TensorflowReductionToOneDevice):
    """Its other algorithm that runs on CPUs, with everything in one pack; memory for each device."""

    name = "tensorflow_hierarchical_copy"

    def _ops(self) -> Any:
        return self._tf.distribute.HierarchicalCopyAllReduce(num_packs=1)


class TensorflowRing(TensorflowReductionToOneDevice):
    """The ring of its older interface, on each replica's arrays end to end."""

    name = "tensorflow_ring"

    def _all_reduce(self, work: Workload) -> Callable[[Columns], Columns]:
        tf = self._tf
        build = importlib.import_module(f"{self._distribute}.v1.all_reduce").build_ring_all_reduce
        lengths = [int(np.prod(shape)) for shape in work.shapes]
        finish = (lambda total: total / work.num_devices) if work.op == "MEAN" else None

        def all_reduce(columns: Columns) -> Columns:
            long = []
            for replica, parts in enumerate(zip(*columns, strict=True)):
                with tf.device(f"/cpu:{replica}"):
                    long.append(tf.concat(parts, 0))
            results = build(long, 1, 1, list(range(work.num_devices)), tf.math.add, finish)
            split = []
            for replica, result in enumerate(results):
                with tf.device(f"/cpu:{replica}"):
                    split.append(tf.split(result, lengths) if len(lengths) > 1 else [result])
            return [list(column) for column in zip(*split, strict=True)]

        return all_reduce

"""Combines values of several devices and copies them between devices, with the same bits every time.

>>> import numpy as np, crossdevice as cd
>>> grads = cd.PerReplica([np.float32([1, 2]), np.float32([3, 4])])
>>> cd.ReductionToOneDevice().reduce("mean", grads, destinations=grads).values[1]
array([2., 3.], dtype=float32)
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from crossdevice import errors as errors  # for type checkers, which see no modules that are not imported
from crossdevice.algorithms.all_reduce_cross_device_ops import AllReduceCrossDeviceOps
from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.algorithms.collective_all_reduce import CollectiveAllReduce
from crossdevice.algorithms.direct_all_reduce import DirectAllReduce
from crossdevice.algorithms.halving_doubling_all_reduce import HalvingDoublingAllReduce
from crossdevice.algorithms.hierarchical_copy_all_reduce import HierarchicalCopyAllReduce
from crossdevice.algorithms.nccl_all_reduce import NcclAllReduce
from crossdevice.algorithms.reduction_to_one_device import ReductionToOneDevice
from crossdevice.algorithms.ring_all_reduce import RingAllReduce
from crossdevice.algorithms.tree_all_reduce import TreeAllReduce
from crossdevice.choosing import choose_algorithm
from crossdevice.combining.accumulator import Accumulator
from crossdevice.combining.average_files import average_files
from crossdevice.costs.topology import Topology, read_topology
from crossdevice.execution.bound import BoundCall
from crossdevice.execution.fingerprints import Fingerprint, fingerprint
from crossdevice.execution.pending import Pending
from crossdevice.execution.tracing import flight_record, trace
from crossdevice.functions import (
    all_gather,
    all_reduce,
    all_to_all,
    bind,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    to_dense,
)
from crossdevice.kernels.host.resources.pool import pool_bytes, release_memory, set_pool_bytes
from crossdevice.kernels.host.resources.threads import num_threads, set_num_threads
from crossdevice.process_groups.cluster import Cluster, cluster_from_env
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.recording import recorder as _recorder
from crossdevice.recording.recorder import mark_bits, record_bits
from crossdevice.strategies.base import Strategy
from crossdevice.strategies.current import (
    experimental_set_strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
)
from crossdevice.strategies.data.input import InputContext, ValueContext
from crossdevice.strategies.data.micro_batches import MicroBatches
from crossdevice.strategies.extended import StrategyExtended
from crossdevice.strategies.mirrored import MirroredStrategy, OneDeviceStrategy
from crossdevice.strategies.multi_worker import MultiWorkerMirroredStrategy
from crossdevice.strategies.running.replica_context import ReplicaContext
from crossdevice.strategies.variables.variable import Variable
from crossdevice.strategies.variables.variables import MirroredVariable, SyncOnReadVariable
from crossdevice.values.device import Device
from crossdevice.values.distributed import DistributedValues, IndexedSlices, Mirrored, PerReplica
from crossdevice.values.options import CollectiveHints, CommunicationImplementation, CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp, VariableAggregation, VariableSynchronization, trimmed_mean

__version__ = "0.2.0"

__all__ = [
    "Accumulator",
    "AllReduceCrossDeviceOps",
    "BoundCall",
    "Cluster",
    "CollectiveAllReduce",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "CrossDeviceOps",
    "Device",
    "DirectAllReduce",
    "DistributedValues",
    "Fingerprint",
    "HalvingDoublingAllReduce",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "InputContext",
    "MicroBatches",
    "Mirrored",
    "MirroredStrategy",
    "MirroredVariable",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "Pending",
    "PerReplica",
    "ProcessGroup",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RingAllReduce",
    "Strategy",
    "StrategyExtended",
    "SyncOnReadVariable",
    "Topology",
    "TreeAllReduce",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "average_files",
    "bind",
    "broadcast",
    "choose_algorithm",
    "cluster_from_env",
    "experimental_set_strategy",
    "fingerprint",
    "flight_record",
    "gather",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "mark_bits",
    "num_threads",
    "pool_bytes",
    "read_topology",
    "record_bits",
    "reduce",
    "reduce_scatter",
    "release_memory",
    "set_num_threads",
    "set_pool_bytes",
    "to_dense",
    "trace",
    "trimmed_mean",
]

_OLD_NAMES = {"choose": "choose_algorithm", "cluster": "cluster_from_env and Cluster"}
"""Names of an earlier version, kept for one release, with their replacements."""


def __dir__() -> list[str]:
    """Lists the public names, without this module's own imports."""
    return sorted([*__all__, "__version__", "errors"])


if not TYPE_CHECKING:  # else every misspelt name would pass a type checker

    def __getattr__(name: str) -> Any:
        """A name of an earlier version, with a warning."""
        if name not in _OLD_NAMES:
            raise AttributeError(f"module 'crossdevice' has no attribute {name!r}")
        message = f"crossdevice.{name} will be removed; use {_OLD_NAMES[name]} of crossdevice"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        if name == "choose":
            return choose_algorithm
        return importlib.import_module("crossdevice.process_groups.cluster")


_recorder.record_from_environment()

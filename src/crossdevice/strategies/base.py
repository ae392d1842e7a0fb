"""Base of all strategies; each says in its own file how replicas are run."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from crossdevice.errors import OptionError
from crossdevice.process_groups.cluster import Cluster
from crossdevice.strategies.data import input as datasets
from crossdevice.strategies.data import regrouping
from crossdevice.strategies.data.along_axis import reduce_along_axis
from crossdevice.strategies.data.input import InputContext, ReplicaPlacement, ValueContext
from crossdevice.strategies.extended import StrategyExtended
from crossdevice.strategies.running.place import scope_of
from crossdevice.strategies.variables.variables import MirroredVariable, SyncOnReadVariable, create_variable
from crossdevice.values.device import host_device
from crossdevice.values.distributed import DelegatingValues, DistributedValues, PerReplica
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp, VariableAggregation, VariableSynchronization
from crossdevice.values.replica_scope import check_cross_replica


class Strategy(abc.ABC):
    """Runs one function as several replicas, and combines what they return.

    The common interface of `MirroredStrategy`, `MultiWorkerMirroredStrategy` and the default strategy.

    >>> from crossdevice import get_strategy
    >>> strategy = get_strategy()
    >>> isinstance(strategy, Strategy), strategy.num_replicas_in_sync
    (True, 1)
    """

    first_replica: int = 0
    """The number of this process's first replica among those of all processes."""

    def __init__(self, extended: StrategyExtended) -> None:
        self._extended = extended
        extended.belongs_to(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As it was, with extended calls that are its own."""
        self.__dict__.update(state)
        self._extended.belongs_to(self)

    @abc.abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Calls `fn` once per replica; distributed arguments arrive as the replica's own components."""

    @property
    def extended(self) -> StrategyExtended:
        """Calls for authors of optimizers and training loops."""
        return self._extended

    @property
    def cluster_resolver(self) -> Cluster | None:
        """This process's place in the cluster; None in a single process."""
        return None

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that run together, in all processes."""
        return self._extended.num_replicas

    def scope(self) -> AbstractContextManager[Strategy]:
        """Makes this the current strategy for a `with` block, which may be entered again inside itself."""
        return scope_of(self)

    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None, *, weights: Any = None
    ) -> Any:
        """Combines a value over replicas, and over `axis` of their arrays if given; the result is on `cpu:0`.

        With an axis every element counts once, even if replicas have different numbers of them.

        Args:
            weights: without an axis, a number for each replica here, as in `CrossDeviceOps.reduce`.
        """
        op = ReduceOp(reduce_op)
        if axis is None:
            result = self._extended.reduce_to(op, value, host_device(0), weights=weights)
            return result if isinstance(value, PerReplica) else regrouping.map_structure(_bare, result)
        if weights is not None:
            raise OptionError("weights with an axis: every element counts once there; reduce with axis=None")
        check_cross_replica("reduce")
        devices = self._extended.worker_devices

        value = regrouping.in_our_classes(value)

        def reduced(leaf: Any) -> Any:
            if not isinstance(leaf, DistributedValues):
                leaf = PerReplica([leaf] * len(devices))
            return reduce_along_axis(op, leaf, axis, host_device(0), self._extended.cross_device_ops)

        return regrouping.map_structure(reduced, value)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the arrays of all replicas along `axis`, on `cpu:0`; sizes along `axis` may differ."""
        check_cross_replica("gather")
        value = regrouping.in_our_classes(value)
        if regrouping.is_sparse(value):
            raise NotImplementedError("gather of IndexedSlices is not defined; reduce them instead")
        if not regrouping.distributed_leaves(value):
            return value
        return self._extended.cross_device_ops.gather(value, host_device(0), axis)

    def create_variable(
        self,
        initial_value: Any,
        name: str | None = None,
        dtype: Any = None,
        trainable: bool | None = None,
        synchronization: VariableSynchronization | str = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | str = VariableAggregation.NONE,
        shape: Any = None,
    ) -> MirroredVariable | SyncOnReadVariable:
        """Creates a variable with a copy on each device, inside or outside of the scope.

        In a replica function all replicas make one variable together, of the first replica's value.

        Args:
            initial_value: an array or number, or a function that makes it, called once.
            synchronization: ON_READ gives a SyncOnReadVariable, anything else a MirroredVariable.
            trainable: None means yes, except ON_READ.
        """
        settings = name, dtype, trainable, synchronization, aggregation, shape
        return create_variable(self, initial_value, *settings)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The components of a value in this process; a value that is not distributed is the only one."""
        value = regrouping.in_our_classes(value)
        if isinstance(value, DistributedValues):
            return value.values
        if not regrouping.distributed_leaves(value):
            return (value,)
        own = range(len(self._extended.worker_devices))
        return tuple(regrouping.select_replica(replica, value) for replica in own)

    def experimental_distribute_dataset(
        self,
        dataset: Iterable[Any],
        options: Any = None,
        *,
        batch_size: int | None = None,
    ) -> Iterable[Any]:
        """Splits global batches along their first axis, so that every example goes to one replica.

        Args:
            dataset: any iterable of batches, such as a PyTorch DataLoader; or, with `batch_size`, an
                array or a structure of arrays.
        """
        datasets.check_input_options(options)
        return datasets.DistributedDataset(datasets.batches_of(dataset, batch_size), self._placement)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Iterable[Any]],
        options: Any = None,
    ) -> Iterable[Any]:
        """Distributes batches that `dataset_fn(InputContext)` makes, one per replica, in turn.

        With several processes, each makes the batches of its own replicas.
        """
        datasets.check_input_options(options)
        context = InputContext(num_replicas_in_sync=self.num_replicas_in_sync)
        return datasets.DealtDataset(datasets.batches_of(dataset_fn(context), None), self._placement)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[Any]], options: Any = None
    ) -> Iterable[Any]:
        """The older name of `distribute_datasets_from_function`."""
        return self.distribute_datasets_from_function(dataset_fn, options)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """A PerReplica (or a structure of them) of what `value_fn(ValueContext)` returns for each replica."""
        placement = self._placement
        values = [value_fn(ValueContext(number, placement.num_replicas)) for number in placement.numbers]
        return regrouping.regroup(values, placement.devices, always_wrap=True)

    @property
    def _placement(self) -> ReplicaPlacement:
        return ReplicaPlacement(self._extended.worker_devices, self.first_replica, self.num_replicas_in_sync)


def _bare(leaf: Any) -> Any:
    return leaf.current() if isinstance(leaf, DelegatingValues) else leaf

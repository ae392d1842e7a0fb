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
from crossdevice.strategies.running.place import check_cross_replica_of, scope_of
from crossdevice.strategies.variables.variables import MirroredVariable, SyncOnReadVariable, create_variable
from crossdevice.values.device import host_device
from crossdevice.values.distributed import DelegatingValues, DistributedValues, PerReplica
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp, VariableAggregation, VariableSynchronization


class Strategy(abc.ABC):
    """Execution of one function as several replicas, with their results combined.

    The common interface of `MirroredStrategy`, `MultiWorkerMirroredStrategy` and the default strategy.

    Args:
        extended: what is offered as `strategy.extended`.

    >>> from crossdevice import get_strategy
    >>> strategy = get_strategy()
    >>> isinstance(strategy, Strategy), strategy.num_replicas_in_sync
    (True, 1)
    """

    first_replica: int = 0
    """Number of this process's first replica among those of all processes."""

    def __init__(self, extended: StrategyExtended) -> None:
        self._extended = extended
        extended.belongs_to(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores the state, with extended calls of its own."""
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
        """Calls `fn` once per replica; distributed arguments arrive as the replica's own components.

        Args:
            fn: the function, called with `args` and `kwargs`.
            args: its arguments; of distributed ones each replica gets its own component.
            kwargs: its keyword arguments, likewise.
            options: only `timeout_seconds` is used, a deadline for the whole run.

        Returns:
            A PerReplica of what the replicas returned; the bare result if there is one replica.

        Raises:
            ReplicaError: replicas make different calls, or some have ended.
            DeadlineError: a replica did not come in time.
        """

    @property
    def extended(self) -> StrategyExtended:
        """Calls for authors of optimizers and training loops."""
        return self._extended

    @property
    def cluster_resolver(self) -> Cluster | None:
        """The place of this process in the cluster; None in a single process."""
        return None

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that run together, in all processes."""
        return self._extended.num_replicas

    def scope(self) -> AbstractContextManager[Strategy]:
        """Makes this the current strategy for a `with` block, which may be entered again inside itself.

        Returns:
            A context manager that gives the strategy.

        Raises:
            ContextError: on entering it inside another strategy.

        >>> from crossdevice import MirroredStrategy
        >>> with MirroredStrategy(["cpu:0", "cpu:1"]).scope() as strategy:
        ...     strategy.num_replicas_in_sync
        2
        """
        return scope_of(self)

    def reduce(
        self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None, *, weights: Any = None
    ) -> Any:
        """Combines a value over replicas, and over `axis` of their arrays if given; the result is on `cpu:0`.

        With an axis every element counts once, even if replicas have different numbers of them.

        Args:
            reduce_op: the operation, as in `CrossDeviceOps.reduce`.
            value: a value per replica, or a structure of them.
            axis: the axis or axes of each array that are combined too; None keeps the shape of the arrays.
            weights: without an axis, a number for each replica here, as in `CrossDeviceOps.reduce`.

        Returns:
            The result, on the first device of the host.

        Raises:
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            DtypeError: the operation is not defined for this dtype.
            ReduceOpError: the operation is unknown, or a sum of a value that is not distributed.
            OptionError: an option or a weight is outside its range.
            ConversionError: something cannot be read as an array.
            DeadlineError: other processes did not come in time.
            ProcessGroupError: a process of the group was lost.

        >>> from crossdevice import MirroredStrategy, PerReplica
        >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
        >>> float(strategy.reduce("sum", PerReplica([[1.0, 2.0], [3.0]]), axis=0))
        6.0
        """
        op = ReduceOp(reduce_op)
        if axis is None:
            result = self._extended.reduce_to(op, value, host_device(0), weights=weights)
            return result if isinstance(value, PerReplica) else regrouping.map_structure(_bare, result)
        if weights is not None:
            raise OptionError("weights with an axis: every element counts once there; reduce with axis=None")
        check_cross_replica_of(self, "reduce")
        devices = self._extended.worker_devices

        value = regrouping.in_our_classes(value)

        def reduced(leaf: Any) -> Any:
            if not isinstance(leaf, DistributedValues):
                leaf = PerReplica([leaf] * len(devices))
            return reduce_along_axis(op, leaf, axis, host_device(0), self._extended.cross_device_ops)

        return regrouping.map_structure(reduced, value)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the arrays of all replicas along `axis`, on `cpu:0`; sizes along `axis` may differ.

        Args:
            value: a value per replica, or a structure of them.
            axis: the axis along which arrays are concatenated.

        Returns:
            The whole array, on the first device of the host.

        Raises:
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            ConversionError: something cannot be read as an array.
            DeadlineError: other processes did not come in time.
            ProcessGroupError: a process of the group was lost.

        >>> from crossdevice import MirroredStrategy, PerReplica
        >>> MirroredStrategy(["cpu:0", "cpu:1"]).gather(PerReplica([[1, 2], [3]]), axis=0)
        array([1, 2, 3], dtype=int32)
        """
        check_cross_replica_of(self, "gather")
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
        aggregation: VariableAggregation | str | None = VariableAggregation.NONE,
        shape: Any = None,
    ) -> MirroredVariable | SyncOnReadVariable:
        """Creates a variable with a copy on each device, inside or outside of the scope.

        In a replica function all replicas make one variable together, of the first replica's value.

        Args:
            initial_value: an array or number, or a function that makes it, called once.
            name: the name of the variable.
            dtype: the dtype of the variable; that of the initial value if None.
            trainable: None means yes, except ON_READ.
            synchronization: ON_READ gives a SyncOnReadVariable, anything else a MirroredVariable.
            aggregation: how values that replicas write, or have written, are combined.
            shape: the shape that the initial value must have.

        Returns:
            A MirroredVariable or a SyncOnReadVariable.

        Raises:
            ConversionError: the initial value cannot be read as an array.
            ShapeMismatchError: it has another shape.
            OptionError: the aggregation or the synchronization is unknown.
        """
        settings = name, dtype, trainable, synchronization, aggregation, shape
        return create_variable(self, initial_value, *settings)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the components of a value in this process.

        Args:
            value: any value.

        Returns:
            A tuple; a value that is not distributed is the only one in it. Of a structure there is one for
            each replica, with what is not distributed in all of them.
        """
        value = regrouping.in_our_classes(value)
        if isinstance(value, DistributedValues):
            return value.values
        if not regrouping.is_structure(value):
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
        """Splits global batches along their first axis; every example goes to one replica.

        Args:
            dataset: any iterable of batches, such as a PyTorch DataLoader; or, with `batch_size`, an array
                or a structure of arrays.
            options: TensorFlow's; nothing depends on it.
            batch_size: the size of the global batches that are cut from `dataset`.

        Returns:
            An iterable of PerReplicas, as often as the dataset can be iterated.

        Raises:
            ConversionError: the dataset is not an iterable of batches.
            OptionError: `batch_size` is not 1 or more.
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

        Args:
            dataset_fn: called once, with an InputContext; returns an iterable of batches for one replica
                each.
            options: TensorFlow's; nothing depends on it.

        Returns:
            An iterable of PerReplicas.

        Raises:
            ConversionError: the function returned no iterable.
        """
        datasets.check_input_options(options)
        context = InputContext(num_replicas_in_sync=self.num_replicas_in_sync)
        return datasets.DealtDataset(datasets.batches_of(dataset_fn(context), None), self._placement)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[Any]], options: Any = None
    ) -> Iterable[Any]:
        """Does the same as `distribute_datasets_from_function`, under its older name.

        Args:
            dataset_fn: as there.
            options: as there.

        Returns:
            An iterable of PerReplicas.

        Raises:
            ConversionError: the function returned no iterable.
        """
        return self.distribute_datasets_from_function(dataset_fn, options)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Calls a function for each replica and puts the values together.

        Args:
            value_fn: called with a ValueContext, which knows the replica's number.

        Returns:
            A PerReplica, or a structure of them, of what it returned.

        Raises:
            MismatchError: replicas got values of different structures.
            TypeError: the function cannot be called.
        """
        placement = self._placement
        values = [value_fn(ValueContext(number, placement.num_replicas)) for number in placement.numbers]
        return regrouping.regroup(values, placement.devices, always_wrap=True)

    @property
    def _placement(self) -> ReplicaPlacement:
        return ReplicaPlacement(self._extended.worker_devices, self.first_replica, self.num_replicas_in_sync)


def _bare(leaf: Any) -> Any:
    return leaf.current() if isinstance(leaf, DelegatingValues) else leaf

"""Variables in step: mirrored (on every write) and summed up (on every read)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, assert_never

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.algorithms.collective_all_reduce import CollectiveAllReduce, group_of
from crossdevice.backends.numpy_backend import array_of_numbers
from crossdevice.backends.registry import backend_of_type
from crossdevice.errors import ConversionError, OptionError, ReduceOpError
from crossdevice.strategies.variables.distributed import (
    DistributedVariable,
    ReplicaVariable,
    Write,
    refuse_per_replica,
)
from crossdevice.strategies.variables.scattering import scatter_with
from crossdevice.values.distributed import Mirrored, PerReplica, components_of
from crossdevice.values.dtypes import COMPLEXES, FLOATS
from crossdevice.values.indexed_slices import IndexedSlices
from crossdevice.values.nesting import NUMBERS, is_number_list
from crossdevice.values.reduce_op import ReduceOp, VariableAggregation, VariableSynchronization
from crossdevice.values.replica_scope import check_cross_replica

if TYPE_CHECKING:
    from crossdevice.strategies.base import Strategy


class MirroredVariable(DistributedVariable, Mirrored):
    """A variable whose copies are the same on every device, because every write goes to all of them.

    Outside of replica functions, a write goes to every copy. In one, the aggregation decides: SUM and MEAN
    write what the replicas' values add up to, ONLY_FIRST_REPLICA writes replica 0's value everywhere, and
    NONE lets each replica write its own copy, after which the copies may differ.
    """

    def current(self) -> Any:
        """The running replica's own array; the first outside of replica functions."""
        context = self._context()
        return self._values[0].value() if context is None else self._copy_of(context).value()

    def _write(self, method: str, write: Write, value: Any) -> Any:
        self._refuse_sum_of_number(value)
        value = self._converted(value)
        context = self._context()
        if context is None:
            return self._written(write, self._strategy.extended.cross_device_ops.broadcast(value, self))
        aggregation = self.aggregation
        if aggregation is VariableAggregation.NONE:
            return self._write_own(context, write, value)

        def merge(values: list[Any]) -> Sequence[Any]:
            ops = self._strategy.extended.cross_device_ops
            if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
                return components_of(
                    self._written(write, ops.broadcast(of_first_replica(values[0], ops), self))
                )
            op = ReduceOp.from_variable_aggregation(aggregation)
            return components_of(
                self._written(write, ops.reduce(op, PerReplica.of(tuple(values), self.devices), self))
            )

        return context.meet(f"{self.name}.{method}", (), value, merge)

    def _written(self, write: Write, everywhere: Any) -> Any:
        """Writes a fresh Mirrored, or a lone replica's fresh array, to the copies."""
        for copy, value in zip(self._values, components_of(everywhere), strict=True):
            write(copy, value)
        values = tuple(copy.value() for copy in self._values)
        return values[0] if len(values) == 1 else Mirrored.of(values, self.devices)

    def _refuse_sum_of_number(self, value: Any) -> None:
        if (
            self.aggregation is VariableAggregation.SUM
            and isinstance(value, NUMBERS)
            and self._context() is not None
        ):
            raise ReduceOpError(
                f"variable {self.name!r} sums what replicas assign; got the number {value!r}, of which it is "
                "unclear whether each replica contributes it; assign an array"
            )

    def _scatter(self, method: str, slices: IndexedSlices) -> Any:
        if not isinstance(slices, IndexedSlices):
            raise ConversionError(f"{method} takes IndexedSlices, got a {type(slices).__name__}")
        reduces = self.aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN)
        if reduces and method in ("scatter_min", "scatter_max", "scatter_update"):
            raise NotImplementedError(
                f"{method} of variable {self.name!r} with aggregation {self.aggregation.name}: rows of "
                "several replicas have no sum or mean there; use NONE or ONLY_FIRST_REPLICA"
            )
        return self._write(method, scatter_with(method), slices)


class SyncOnReadVariable(DistributedVariable):
    """A variable whose replicas write their own copies; reading it elsewhere brings the copies together.

    Right for counters and metrics: writes cost no communication. The aggregation says what a read is:
    SUM or MEAN of the copies, or the first one.
    """

    def current(self) -> Any:
        """The running replica's own array; what all copies aggregate to outside of replica functions."""
        context = self._context()
        if context is not None:
            return self._copy_of(context).value()
        arrays = tuple(copy.value() for copy in self._values)
        match self.aggregation:
            case VariableAggregation.SUM | VariableAggregation.MEAN as aggregation:
                op = ReduceOp.from_variable_aggregation(aggregation)
                whole = PerReplica.of(arrays, self.devices)
                return self._strategy.extended.cross_device_ops.reduce(op, whole, self.devices[0])
            case VariableAggregation.ONLY_FIRST_REPLICA:
                return of_first_replica(arrays[0], self._strategy.extended.cross_device_ops)
            case VariableAggregation.NONE:
                raise ReduceOpError(
                    f"variable {self.name!r} has aggregation NONE, so its copies have no common value; "
                    "read it in a replica function, or take one of its .values"
                )
            case _ as never:
                assert_never(never)

    def _write(self, method: str, write: Write, value: Any) -> Any:
        value = self._converted(value)
        context = self._context()
        if context is not None:
            return self._write_own(context, write, value)
        if self.aggregation is VariableAggregation.SUM:
            if method != "assign":
                raise ReduceOpError(
                    f"{method} of variable {self.name!r}, whose copies are summed on reading: it is unclear "
                    "how much belongs to each copy; call it in a replica function"
                )
            # Copies that add up to the value, as near as their dtype allows.
            dtype = self._backend.dtype_of(value)
            value = self._backend.cast(value / self._strategy.num_replicas_in_sync, dtype)
        everywhere = self._strategy.extended.cross_device_ops.broadcast(value, self)
        for copy, own in zip(self._values, components_of(everywhere), strict=True):
            write(copy, own)
        return everywhere


def create_variable(
    strategy: Strategy,
    initial_value: Any,
    name: str,
    dtype: Any,
    trainable: bool | None,
    synchronization: VariableSynchronization,
    aggregation: VariableAggregation,
) -> MirroredVariable | SyncOnReadVariable:
    """A variable with one copy of its initial value on each device of a strategy.

    Where there are several processes, the value is that of the first.
    """
    check_cross_replica("create_variable")
    on_read = synchronization is VariableSynchronization.ON_READ
    if synchronization is VariableSynchronization.NONE:
        raise OptionError(f"variable {name!r} has synchronization NONE; expected AUTO, ON_WRITE or ON_READ")
    if on_read and trainable:
        raise OptionError(f"variable {name!r} cannot be trainable and synchronized ON_READ")
    refuse_per_replica("the initial value", name, initial_value)
    array = initial_value() if callable(initial_value) else initial_value
    if isinstance(array, NUMBERS) or is_number_list(array):
        array = array_of_numbers(array)
    backend = backend_of_type(type(array))
    if backend is None:
        raise ConversionError(
            f"variable {name!r} was given a {type(array).__name__}; expected an array or a number"
        )
    devices = strategy.extended.parameter_devices
    for device in devices:
        backend.check_device(device)
    if dtype is not None:
        array = backend.cast(array, _dtype_name(dtype))
    array = _of_first_process(array, strategy.extended.cross_device_ops)
    found = backend.dtype_of(array)
    if aggregation is VariableAggregation.MEAN and found not in (*FLOATS, *COMPLEXES):
        raise OptionError(
            f"variable {name!r} of dtype {found} cannot have aggregation MEAN, which is not an integer"
        )
    copies = [
        ReplicaVariable(
            backend.copy(array, device),
            device,
            f"{name}/replica_{replica}" if replica else name,
            VariableSynchronization.ON_READ if on_read else VariableSynchronization.ON_WRITE,
            aggregation,
        )
        for replica, device in enumerate(devices)
    ]
    kind = SyncOnReadVariable if on_read else MirroredVariable
    return kind(strategy, copies, not on_read if trainable is None else trainable)


def of_first_replica(value: Any, ops: CrossDeviceOps) -> Any:
    """What the first replica of all processes holds, from what the first of this process does."""
    group = group_of(ops)
    if not isinstance(value, IndexedSlices) or group is None:
        return _of_first_process(value, ops)
    # Processes may have different numbers of rows, so all but the first add none.
    rows = slice(None) if group.rank == 0 else slice(0)
    values, indices = (ops.gather(part[rows], part) for part in (value.values, value.indices))
    return value.with_parts(values, indices, value.dense_shape)


def _of_first_process(value: Any, ops: CrossDeviceOps) -> Any:
    return ops.value_of_rank(value, 0) if isinstance(ops, CollectiveAllReduce) else value


def _dtype_name(dtype: Any) -> str:
    """`float32`, from a name or from the dtype objects of NumPy and PyTorch."""
    return str(getattr(dtype, "__name__", dtype)).rpartition(".")[2]

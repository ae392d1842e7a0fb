"""Variables in step: mirrored (on every write) and summed up (on every read)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, assert_never

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.algorithms.collective_all_reduce import CollectiveAllReduce, group_of
from crossdevice.errors import ContextError, OptionError, ReduceOpError
from crossdevice.strategies.data.regrouping import placed_on
from crossdevice.strategies.running.place import current_context
from crossdevice.strategies.variables.distributed_variable import (
    DistributedVariable,
    ReplicaVariable,
    Write,
    refuse_per_replica,
)
from crossdevice.strategies.variables.row_updates import rows_of, scatter_with
from crossdevice.strategies.variables.variable import (
    backend_of_variable,
    checked_name,
    checked_trainable,
    initial_array,
)
from crossdevice.values.distributed import IndexedSlices, Mirrored, PerReplica, components_of
from crossdevice.values.dtypes import COMPLEXES, FLOATS
from crossdevice.values.nesting import NUMBERS
from crossdevice.values.reduce_op import (
    ReduceOp,
    VariableAggregation,
    VariableSynchronization,
    as_aggregation,
    as_setting,
)

if TYPE_CHECKING:
    from crossdevice.strategies.base import Strategy


class MirroredVariable(DistributedVariable, Mirrored):
    """A variable with equal copies on every device, because every write goes to all of them.

    Outside of replica functions, a write goes to every copy. In one, the aggregation decides: SUM and MEAN
    write what the replicas' values add up to, ONLY_FIRST_REPLICA writes replica 0's value everywhere, and
    NONE lets each replica write its own copy, after which the copies may differ.

    Args:
        strategy: the strategy that makes it, by `create_variable`.
        copies: the variable of each replica.
    """

    def operand(self) -> Any:
        """Returns the running replica's own array; the first outside of replica functions."""
        return self._copy_here().operand()

    def _write(self, method: str, write: Write, value: Any, *, is_rows: bool = False) -> Any:
        own, context = self._own_copy(), current_context()
        is_sum = self.aggregation is VariableAggregation.SUM and context is not None
        if is_sum and isinstance(value, NUMBERS):
            raise ReduceOpError(
                f"variable {self.name!r} sums what replicas assign; got the number {value!r}, of which it is "
                "unclear whether each replica contributes it; assign an array"
            )
        value = self._converted(value, is_rows)
        if own is None:
            return self._written(write, self._strategy.extended.cross_device_ops.broadcast(value, self))
        aggregation = self.aggregation
        if context is None or aggregation is VariableAggregation.NONE:
            return self._write_own(own, write, value)

        def merge(values: list[Any]) -> Sequence[Any]:
            ops = self._strategy.extended.cross_device_ops
            if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
                everywhere = ops.broadcast(of_first_replica(values[0], ops), self)
            else:
                op = ReduceOp.from_variable_aggregation(aggregation)
                whole = PerReplica.of(tuple(values), placed_on(values, self.devices))
                everywhere = ops.reduce(op, whole, self)
            return components_of(self._written(write, everywhere))

        return context.meet(f"{self.name}.{method}", (), value, merge)

    def _scatter(self, method: str, slices: Any) -> Any:
        rows = rows_of(method, slices)
        reduces = self.aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN)
        if reduces and method in ("scatter_min", "scatter_max", "scatter_update"):
            raise NotImplementedError(
                f"{method} of variable {self.name!r} with aggregation {self.aggregation.name}: rows of "
                "several replicas have no sum or mean there; use NONE or ONLY_FIRST_REPLICA"
            )
        return self._write(method, scatter_with(method), rows, is_rows=True)


class SyncOnReadVariable(DistributedVariable):
    """A variable with one copy per replica to write to; reading it elsewhere combines the copies.

    Right for counters and metrics: writes cost no communication. The aggregation says what a read is:
    SUM or MEAN of the copies, or the first one.

    Args:
        strategy: the strategy that makes it, by `create_variable`.
        copies: the variable of each replica.
    """

    def operand(self) -> Any:
        """Returns the running replica's own array; the combined copies outside of replica functions."""
        if self._own_copy() is not None or self._strategy.num_replicas_in_sync == 1:
            return self._copy_here().operand()
        arrays = tuple(copy.operand() for copy in self._values)
        match self.aggregation:
            case VariableAggregation.SUM | VariableAggregation.MEAN as aggregation:
                op = ReduceOp.from_variable_aggregation(aggregation)
                whole = PerReplica.of(arrays, self.devices)
                return self._strategy.extended.cross_device_ops.reduce(op, whole, self.devices[0])
            case VariableAggregation.ONLY_FIRST_REPLICA:
                return of_first_replica(arrays[0], self._strategy.extended.cross_device_ops)
            case VariableAggregation.NONE:
                raise self._no_common_value()
            case _ as never:
                assert_never(never)

    def _write(self, method: str, write: Write, value: Any, *, is_rows: bool = False) -> Any:
        value = self._converted(value, is_rows)
        own = self._own_copy()
        if own is not None:
            return self._write_own(own, write, value)
        is_alone = self._strategy.num_replicas_in_sync == 1
        if self.aggregation is VariableAggregation.NONE and not is_alone:
            raise self._no_common_value()
        if self.aggregation is VariableAggregation.SUM and not is_alone:
            if method != "assign":
                raise ReduceOpError(
                    f"{method} of variable {self.name!r}, whose copies are summed on reading: it is unclear "
                    "how much belongs to each copy; call it in a replica function"
                )
            # Copies that add up to the value, as near as their dtype allows.
            dtype = self._backend.dtype_of(value)
            value = self._backend.cast(value / self._strategy.num_replicas_in_sync, dtype)
        self._written(write, self._strategy.extended.cross_device_ops.broadcast(value, self))
        return self.value()

    def _no_common_value(self) -> ReduceOpError:
        return ReduceOpError(
            f"variable {self.name!r} has aggregation NONE, so its copies have no common value; "
            "use it in a replica function, or use its .values one by one"
        )


def create_variable(
    strategy: Strategy,
    initial_value: Any,
    name: str | None,
    dtype: Any,
    trainable: bool | None,
    synchronization: VariableSynchronization | str,
    aggregation: VariableAggregation | str | None,
    shape: Any,
) -> MirroredVariable | SyncOnReadVariable:
    """Creates a variable with one copy of its initial value on each device of a strategy.

    In a replica function all replicas make it together, of the first one's value. Where there are several
    processes, the value is that of the first.
    """
    name = checked_name(name)
    timing = as_setting(VariableSynchronization, synchronization)
    aggregation = as_aggregation(aggregation)
    on_read = timing is VariableSynchronization.ON_READ
    if timing is VariableSynchronization.NONE:
        raise OptionError(f"variable {name!r} has synchronization NONE; expected AUTO, ON_WRITE or ON_READ")
    checked_trainable(trainable, name)
    refuse_per_replica("the initial value", name, initial_value)

    def make(given: list[Any]) -> list[MirroredVariable | SyncOnReadVariable]:
        name, value = given[0]
        array = initial_array(value, dtype, shape, name)
        array = _of_first_process(array, strategy.extended.cross_device_ops)
        backend = backend_of_variable(array)
        for device in strategy.extended.parameter_devices:
            backend.check_device(device)
        found = backend.dtype_of(array)
        if aggregation is VariableAggregation.MEAN and found not in (*FLOATS, *COMPLEXES):
            raise OptionError(
                f"variable {name!r} of dtype {found} cannot have aggregation MEAN, which is not an integer"
            )
        kept = VariableSynchronization.ON_READ if on_read else VariableSynchronization.ON_WRITE
        settings = kept, aggregation, not on_read if trainable is None else trainable
        copies = [
            ReplicaVariable(
                backend.copy(array, device), device, f"{name}/replica_{k}" if k else name, *settings
            )
            for k, device in enumerate(strategy.extended.parameter_devices)
        ]
        return [(SyncOnReadVariable if on_read else MirroredVariable)(strategy, copies)] * len(given)

    context = current_context()
    if context is None:
        return make([(name, initial_value)])[0]
    if context.strategy is not strategy:
        raise ContextError(f"create_variable of {strategy} was called in a replica of {context.strategy}")
    details = (timing.name, aggregation.name)  # a name may be each replica's own: the first one's counts
    made: MirroredVariable | SyncOnReadVariable = context.meet(
        "Variable", details, (name, initial_value), make
    )
    return made


def of_first_replica(value: Any, ops: CrossDeviceOps) -> Any:
    """Returns the value of the first replica of all processes, given this process's first."""
    group = group_of(ops)
    if not isinstance(value, IndexedSlices) or group is None:
        return _of_first_process(value, ops)
    # Processes may have different numbers of rows, so all but the first add none.
    rows = slice(None) if group.rank == 0 else slice(0)
    values, indices = (ops.gather(part[rows], part) for part in (value.values, value.indices))
    return value.with_parts(values, indices, value.dense_shape)


def _of_first_process(value: Any, ops: CrossDeviceOps) -> Any:
    return ops.value_of_rank(value, 0) if isinstance(ops, CollectiveAllReduce) else value

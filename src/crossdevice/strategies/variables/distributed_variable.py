"""Base of variables with one copy per device, whenever the copies are synchronized."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import optree

from crossdevice.backends.protocol import Backend
from crossdevice.errors import ContextError, ConversionError
from crossdevice.strategies.running.place import current_strategy
from crossdevice.strategies.variables.row_updates import ScatterMethods, whole_array
from crossdevice.strategies.variables.variable import ReadsAsArray, Variable, backend_of_variable, converted
from crossdevice.values.delegation import operand_of
from crossdevice.values.device import Device
from crossdevice.values.distributed import (
    DelegatingValues,
    IndexedSlices,
    Mirrored,
    PerReplica,
    components_of,
)
from crossdevice.values.quantities import kind_text
from crossdevice.values.reduce_op import VariableAggregation, VariableSynchronization
from crossdevice.values.replica_scope import current_component

if TYPE_CHECKING:
    from crossdevice.strategies.base import Strategy

Write: TypeAlias = Callable[[Variable, Any], object]
"""Writes a fresh value of the right library and dtype, already on the copy's device, to one copy."""


class ReplicaVariable(Variable):
    """One copy of a distributed variable, the only owner of its array."""

    __slots__ = ("_container",)

    def __init__(
        self,
        fresh: Any,
        device: Device,
        name: str,
        synchronization: VariableSynchronization,
        aggregation: VariableAggregation,
        trainable: bool,
    ) -> None:
        self._value, self.device, self.name, self.trainable = fresh, device, name, trainable
        self.synchronization, self.aggregation = synchronization, aggregation

    def belongs_to(self, container: DistributedVariable) -> None:
        """Remembers the variable this is a copy of, without keeping it alive."""
        self._container = weakref.ref(container)

    @property
    def container(self) -> Any:
        """The variable this is a copy of."""
        return self._container()


def _of_first(name: str, meaning: str) -> Any:
    return property(lambda variable: getattr(variable.values[0], name), doc=meaning)


class DistributedVariable(ScatterMethods, ReadsAsArray, DelegatingValues):
    """A variable with a copy on each device of a strategy; `values` are the copies."""

    def __init__(self, strategy: Strategy, copies: Sequence[ReplicaVariable]) -> None:
        self._values = tuple(copies)
        self._devices = tuple(copy.device for copy in copies)
        self._strategy = strategy
        for copy in copies:
            copy.belongs_to(self)

    @property
    def distribute_strategy(self) -> Strategy:
        """The strategy with the copies on its devices."""
        return self._strategy

    @property
    def device(self) -> Device:
        """The device of the running replica's copy; that of the first outside of replica functions."""
        return self._copy_here().device

    name: str = _of_first("name", "Its name; copy k > 0 is called `<name>/replica_k`.")
    shape: tuple[int, ...] = _of_first("shape", "The shape of each copy.")
    dtype: Any = _of_first("dtype", "The dtype of each copy.")
    aggregation: VariableAggregation = _of_first("aggregation", "How replicas' values become one.")
    synchronization: VariableSynchronization = _of_first("synchronization", "When copies come into step.")
    trainable: bool = _of_first("trainable", "Whether it is to be trained.")

    def assign(
        self,
        value: Any,
        use_locking: bool = False,  # noqa: ARG002
        name: str | None = None,  # noqa: ARG002
        read_value: bool = True,
    ) -> Any:
        """Replaces the value; returns the new one, Mirrored outside of replica functions.

        Args:
            use_locking: TensorFlow's, as `name`: they change nothing.
            read_value: False returns None.
        """
        written = self._write("assign", Variable.store, value)
        return written if read_value else None

    def assign_add(
        self,
        value: Any,
        use_locking: bool = False,  # noqa: ARG002
        name: str | None = None,  # noqa: ARG002
        read_value: bool = True,
    ) -> Any:
        """Adds to the value; returns the new one."""
        written = self._write("assign_add", _computing(operator.add), value)
        return written if read_value else None

    def assign_sub(
        self,
        value: Any,
        use_locking: bool = False,  # noqa: ARG002
        name: str | None = None,  # noqa: ARG002
        read_value: bool = True,
    ) -> Any:
        """Subtracts from the value; returns the new one."""
        written = self._write("assign_sub", _computing(operator.sub), value)
        return written if read_value else None

    def _write(self, method: str, write: Write, value: Any, *, is_rows: bool = False) -> Any:
        """Brings a value, or rows of one, to the copies it concerns here and now."""
        raise NotImplementedError

    def _scatter(self, method: str, slices: Any) -> Any:
        raise NotImplementedError(f"{method} of variable {self.name!r}: {kind_text(self)} has no scatter")

    def _own_copy(self) -> ReplicaVariable | None:
        """Returns the copy of the running replica or update; None across replicas. Checks the strategy."""
        number = current_component()
        if number is None:
            return None
        if current_strategy() is not self._strategy:
            raise ContextError(
                f"variable {self.name!r} belongs to {self._strategy}; it was used by {current_strategy()}"
            )
        copy: ReplicaVariable = self._values[number]
        return copy

    def _copy_here(self) -> ReplicaVariable:
        """Returns the copy of the running replica or update; the first across replicas."""
        own = self._own_copy()
        return self._values[0] if own is None else own

    def _write_own(self, copy: ReplicaVariable, write: Write, value: Any) -> Any:
        """Writes a converted value, in new memory, to the one copy."""
        write(copy, _moved(value, self._backend, copy.device))
        return copy.value()

    def _written(self, write: Write, everywhere: Any) -> Any:
        """Writes a fresh Mirrored, or a lone replica's fresh array, to the copies."""
        for copy, value in zip(self._values, components_of(everywhere), strict=True):
            write(copy, value)
        values = tuple(copy.value() for copy in self._values)
        return values[0] if len(values) == 1 else Mirrored.of(values, self.devices)

    @property
    def _backend(self) -> Backend:
        return backend_of_variable(self._values[0].operand())

    def _converted(self, value: Any, is_rows: bool = False) -> Any:
        """Returns a value in this variable's library and dtype, as the running replica sees it."""
        if isinstance(value, PerReplica):
            number = current_component()
            if number is None and len(value.values) == self._strategy.num_replicas_in_sync == 1:
                number = 0
            if number is None:
                refuse_per_replica("assign", self.name, value)
            else:
                value = value.values[number]
        if is_rows:
            return IndexedSlices(self._converted(value.values), value.indices, value.dense_shape)
        value = whole_array(operand_of(value), self.name)
        return converted(value, self._backend, self._backend.dtype_of(self._values[0].operand()), self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        entered = current_strategy()
        if entered not in (None, self._strategy):
            raise ContextError(
                f"variable {self.name!r} of {self._strategy} cannot be copied in the scope of {entered}"
            )
        settings = self.synchronization, self.aggregation, self.trainable
        copies = []
        for copy in self._values:
            array = self._backend.copy(copy.operand(), copy.device)
            copies.append(ReplicaVariable(array, copy.device, copy.name, *settings))
        memo[id(self)] = made = type(self)(self._strategy, copies)
        return made

    def __reduce__(self) -> Any:
        raise ConversionError(
            f"variable {self.name!r} cannot be pickled, nor copied by copy.copy: its copies are on the "
            "devices of its strategy; pickle its numpy(), and assign that to a variable made where it arrives"
        )

    def __repr__(self) -> str:
        copies = "".join(f"\n  {copy.device}: {copy._value!r}," for copy in self._values)
        return f"{type(self).__name__}({self.name!r}, {self.aggregation.name}{copies}\n)"


def refuse_per_replica(call: str, name: str, arguments: Any) -> None:
    """Refuses values that would silently make the copies of a variable differ."""
    if any(isinstance(leaf, PerReplica) for leaf in optree.tree_leaves(arguments)):
        raise ConversionError(
            f"{call} of variable {name!r} got a PerReplica: its copies would differ; reduce it first"
        )


def _computing(operation: Callable[[Any, Any], Any]) -> Write:
    return lambda copy, own: copy.store(copy.computed(operation, own))


def _moved(value: Any, backend: Backend, device: Device) -> Any:
    if isinstance(value, IndexedSlices):
        rows, indices = backend.copy(value.values, device), backend.copy(value.indices, device)
        return IndexedSlices(rows, indices, value.dense_shape)
    return backend.copy(value, device)

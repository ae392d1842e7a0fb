"""Single-replica default strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from crossdevice.algorithms.reduction_to_one_device import ReductionToOneDevice
from crossdevice.errors import ConversionError, OptionError
from crossdevice.strategies.base import Strategy
from crossdevice.strategies.data.input import ValueContext
from crossdevice.strategies.extended import StrategyExtended
from crossdevice.strategies.running.place import check_same, outside_of_replicas
from crossdevice.strategies.running.replica_context import ReplicaContext
from crossdevice.strategies.variables.distributed import DistributedVariable
from crossdevice.values.device import host_device
from crossdevice.values.options import CommunicationOptions, as_options, either
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.replica_scope import RunningCode, running_as


class DefaultExtended(StrategyExtended):
    """With one replica, values are their own reductions."""

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,  # noqa: ARG002
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
        weights: Any = None,
    ) -> Any:
        """The value, untouched."""
        _check(reduce_op, either(options, experimental_hints), weights)
        return value

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
        weights: Any = None,
    ) -> list[Any]:
        """The values, untouched."""
        _check(reduce_op, either(options, experimental_hints), weights)
        return [value for value, _ in value_destination_pairs]

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """There is nowhere else to copy to."""
        raise NotImplementedError("broadcast_to needs a strategy; use crossdevice.broadcast without one")

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn` on the variable itself."""
        result = fn(var, *args, **(kwargs or {}))
        return result if group else (result,)

    def update_non_slot(
        self,
        colocate_with: Any,  # noqa: ARG002
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn`."""
        result = fn(*args, **(kwargs or {}))
        return result if group else (result,)

    def variable_created_in_scope(self, v: Any) -> bool:
        """Returns whether a variable belongs to no strategy."""
        return not isinstance(self.value_container(v), DistributedVariable)


class DefaultStrategy(Strategy):
    """One replica in the calling thread; `get_strategy()` returns it where no strategy was entered."""

    def __init__(self) -> None:
        super().__init__(DefaultExtended((host_device(0),), ReductionToOneDevice()))

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: CommunicationOptions | None = None,  # noqa: ARG002
    ) -> Any:
        """Calls the function."""
        if not isinstance(args, (list, tuple)):
            raise ConversionError(f"args must be a list or tuple, got a {type(args).__name__}")
        check_same(self, "run")
        with running_as(RunningCode()):  # as without a strategy, in a merge function too
            return fn(*args, **(kwargs or {}))

    def scope(self) -> AbstractContextManager[Strategy]:
        """A block in which nothing changes; refused inside the scope of another strategy."""
        check_same(self, "scope")
        return nullcontext(self)

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Returns `value_fn(ValueContext())`: the one replica's value is bare."""
        return value_fn(ValueContext())

    def __repr__(self) -> str:
        return "the default strategy"


class LoneReplicaContext(ReplicaContext):
    """The context of the one replica: its calls return at once."""

    __slots__ = ()

    def __init__(self, strategy: Strategy) -> None:
        # Without a rendezvous: there is nobody to meet.
        self._strategy, self._replica, self._device = strategy, 0, host_device(0)

    def _collective(self, name: str, details: tuple[Any, ...], value: Any, *_: Any) -> Any:  # noqa: ARG002
        """The value, untouched."""
        return value

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls `merge_fn(strategy, ...)` at once."""
        with outside_of_replicas(self._strategy):
            return merge_fn(self._strategy, *args, **(kwargs or {}))


DEFAULT_STRATEGY = DefaultStrategy()
DEFAULT_CONTEXT = LoneReplicaContext(DEFAULT_STRATEGY)


def _check(reduce_op: ReduceOp | str, options: Any, weights: Any) -> None:
    ReduceOp(reduce_op), as_options(options)
    if weights is not None:
        raise OptionError("weights without a strategy: there is one replica, whose values stay as they are")

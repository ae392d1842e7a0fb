"""What code without a strategy gets: one replica, which meets nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from crossdevice.algorithms.reduction_to_one_device import ReductionToOneDevice
from crossdevice.errors import ConversionError, OptionError
from crossdevice.strategies.base import Strategy
from crossdevice.strategies.extended import StrategyExtended
from crossdevice.strategies.running.place import outside_of_replicas
from crossdevice.strategies.running.replica_context import ReplicaContext
from crossdevice.values.device import host_device
from crossdevice.values.options import CommunicationOptions, as_options, either
from crossdevice.values.reduce_op import ReduceOp


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
        return fn(*args, **(kwargs or {}))

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

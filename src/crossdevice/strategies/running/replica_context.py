"""Context of a replica function: its replica, and the calls in which all replicas meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.backends.protocol import Merge
from crossdevice.backends.registry import backend_named
from crossdevice.errors import ContextError
from crossdevice.strategies.data.regrouping import (
    checked_arguments,
    own_component,
    placed_on,
    regroup,
    spread,
)
from crossdevice.strategies.running import loaded_libraries
from crossdevice.strategies.running.loaded_libraries import refuse_tracing
from crossdevice.strategies.running.place import current_context
from crossdevice.strategies.running.rendezvous import Call, Deadline, Rendezvous
from crossdevice.values.device import Device
from crossdevice.values.distributed import PerReplica, components_of
from crossdevice.values.options import DEFAULT_OPTIONS, CommunicationOptions, as_options, differences, either
from crossdevice.values.reduce_op import ReduceOp

if TYPE_CHECKING:
    from crossdevice.strategies.base import Strategy


CALLED_ELSEWHERE = (
    " and was called elsewhere: in another replica, a merge function or another thread; call it in the "
    "replica's function, or in a thread started with target=contextvars.copy_context().run there"
)
BACKWARD_ELSEWHERE = (
    ", and the backward pass has reached it outside of that replica's function; call backward() there, in "
    "every replica, or return what replicas computed and reduce or gather it outside"
)


class ReplicaContext:
    """The running replica, as returned by `get_replica_context()` in a function that `strategy.run` calls.

    All replicas must make the same calls in the same order. If some do not, an error names them.

    Args:
        strategy: the strategy that runs the replica, and makes its context.
        replica: the number of the replica in this process.
        device: its device.
        rendezvous: where replicas meet.

    >>> import crossdevice as cd
    >>> strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> def step():
    ...     context = cd.get_replica_context()
    ...     return float(context.all_reduce("sum", context.replica_id_in_sync_group + 1.0))
    >>> strategy.run(step).values
    (3.0, 3.0)
    """

    __slots__ = ("_device", "_rendezvous", "_replica", "_strategy", "joins_graphs")

    def __init__(self, strategy: Strategy, replica: int, device: Device, rendezvous: Rendezvous) -> None:
        self._strategy = strategy
        self._replica = replica
        self._device = device
        self._rendezvous = rendezvous
        self.joins_graphs = False
        """True if gradients are computed after the run, by one backward pass through all replicas."""

    @property
    def strategy(self) -> Strategy:
        """The strategy that runs this replica."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """The number of this replica, from 0, among those of all processes."""
        return self._strategy.first_replica + self._replica

    @property
    def local_replica(self) -> int:
        """Its number among those of this process, the index in the components of local values."""
        return self._replica

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that run together."""
        return self._strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[Device, ...]:
        """The one device of this replica."""
        return (self._device,)

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Combines an array or tree with those of all other replicas, in one batch.

        Each replica contributes, even if all pass the same array, and each gets its own result. PyTorch
        differentiates SUM and MEAN: in the backward passes of replicas, gradients are all-reduced.

        Args:
            reduce_op: the operation, as in `CrossDeviceOps.reduce`.
            value: an array or a tree of arrays.
            options: also carries `timeout_seconds`, how long to wait for the other replicas.
            experimental_hints: the older name of `options`.

        Returns:
            The result, on the replica's device.

        Raises:
            ReplicaError: replicas make different calls, or some have ended.
            DeadlineError: a replica did not come in time.
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            DtypeError: the operation is not defined for this dtype.
            ReduceOpError: the operation is unknown.
            OptionError: an option or a weight is outside its range.
            ConversionError: something cannot be read as an array.
        """
        op, chosen = ReduceOp(reduce_op), as_options(either(options, experimental_hints))

        def call(whole: PerReplica) -> Any:
            return self._ops.batch_reduce(op, [(whole, whole)], chosen)[0]

        return self._collective("all_reduce", (op.name,), value, call, chosen)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenates the arrays or trees of all replicas along `axis`; sizes along `axis` may differ.

        Args:
            value: an array or a tree of arrays.
            axis: the axis along which arrays are concatenated.
            options: `timeout_seconds`, how long to wait for the other replicas.

        Returns:
            The whole array or tree, on the replica's device.

        Raises:
            ReplicaError: replicas make different calls, or some have ended.
            DeadlineError: a replica did not come in time.
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            ConversionError: something cannot be read as an array.
        """
        chosen = as_options(options)

        def call(whole: PerReplica) -> Any:
            return self._ops.all_gather(whole, axis, chosen)

        return self._collective("all_gather", (f"axis={axis}",), value, call, chosen)

    def reduce_scatter(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: int = 0,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combines an array or tree with those of all other replicas; each gets its own part along `axis`.

        Parts are as equal as possible, the longer ones first. `all_gather` of them is an all-reduce.

        Args:
            reduce_op: the operation, as in `CrossDeviceOps.reduce`.
            value: an array or a tree of arrays.
            axis: the axis along which the result is split.
            options: precision, and `timeout_seconds`, how long to wait for the other replicas.

        Returns:
            This replica's slice of the result.

        Raises:
            ReplicaError: replicas make different calls, or some have ended.
            DeadlineError: a replica did not come in time.
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            DtypeError: the operation is not defined for this dtype.
            ReduceOpError: the operation is unknown.
            OptionError: an option or a weight is outside its range.
            ConversionError: something cannot be read as an array.
        """
        op, chosen = ReduceOp(reduce_op), as_options(options)

        def call(whole: PerReplica) -> Any:
            return self._ops.reduce_scatter(op, whole, axis, chosen)

        return self._collective("reduce_scatter", (op.name, f"axis={axis}"), value, call, chosen)

    def all_to_all(self, value: Any, axis: int = 0, options: CommunicationOptions | None = None) -> Any:
        """Splits an array or tree along `axis`; part `i` goes to replica `i`.

        Args:
            value: an array or a tree of arrays.
            axis: the axis along which arrays are split and joined.
            options: `timeout_seconds`, how long to wait for the other replicas.

        Returns:
            The parts this replica received, joined in replica order.

        Raises:
            ReplicaError: replicas make different calls, or some have ended.
            DeadlineError: a replica did not come in time.
            MismatchError: replicas differ in shape, dtype, structure, device or library; the message names
                the odd one out.
            ConversionError: something cannot be read as an array.
        """
        chosen = as_options(options)

        def call(whole: PerReplica) -> Any:
            return self._ops.all_to_all(whole, axis, chosen)

        return self._collective("all_to_all", (f"axis={axis}",), value, call, chosen)

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Calls `merge_fn(strategy, ...)` once for all replicas, in the cross-replica context.

        It gets the arguments of all replicas as PerReplica. Each replica gets its component of the result.

        Args:
            merge_fn: called with the strategy, `args` and `kwargs`.
            args: arguments, of each replica its own.
            kwargs: keyword arguments, likewise.

        Returns:
            This replica's component of what `merge_fn` returned.

        Raises:
            ReplicaError: replicas make different calls, or some have ended.
            DeadlineError: a replica did not come in time.
        """
        devices = self._strategy.extended.worker_devices

        def merge(arguments: list[Any]) -> Sequence[Any]:
            merged_args, merged_kwargs = regroup(arguments, devices, among=self.num_replicas_in_sync)
            return spread(merge_fn(self._strategy, *merged_args, **merged_kwargs), devices)

        name = getattr(merge_fn, "__qualname__", type(merge_fn).__name__)
        arguments = checked_arguments("merge_call", args, kwargs)
        return self._meet_recorded("merge_call", (name,), arguments, merge, DEFAULT_OPTIONS)

    def meet(
        self,
        name: str,
        details: tuple[Any, ...],
        value: Any,
        merge: Merge,
        options: CommunicationOptions = DEFAULT_OPTIONS,
        *,
        is_backward: bool = False,
    ) -> Any:
        """Waits for the same call of all replicas; `merge` turns all their values into all their answers.

        Args:
            is_backward: whether this is in a backward pass, which PyTorch runs in a thread of its own on
                every GPU.
        """
        running = current_context()
        may_be_elsewhere = is_backward and running is None and not self._device.is_host
        if running is not self and not (may_be_elsewhere and self._rendezvous.is_running(self._replica)):
            owner = f"{name} belongs to replica {self.replica_id_in_sync_group} ({self._device})"
            raise ContextError(owner + (BACKWARD_ELSEWHERE if is_backward else CALLED_ELSEWHERE))
        refuse_tracing(name)
        if options is not DEFAULT_OPTIONS:
            # A deadline is each replica's own affair.
            given = [item for item in differences(options).items() if item[0] != "timeout_seconds"]
            details = (*details, *(f"{name}={value}" for name, value in given))
        deadline = Deadline.after(options.timeout_seconds)
        return self._rendezvous.meet(self._replica, Call(name, details, value, merge, deadline))

    def _collective(
        self,
        name: str,
        details: tuple[Any, ...],
        value: Any,
        call: Callable[[PerReplica], Any],
        options: CommunicationOptions,
    ) -> Any:
        """Runs the algorithm once with the values of all replicas; each gets its component."""

        def merge(trees: list[Any]) -> Sequence[Any]:
            devices = placed_on(trees, self._strategy.extended.worker_devices)
            return components_of(call(PerReplica.of(tuple(trees), devices)))

        return self._meet_recorded(name, details, self._own_component(value), merge, options)

    def _own_component(self, value: Any) -> Any:
        return own_component(self._replica, len(self._strategy.extended.worker_devices), value)

    def _meet_recorded(
        self, name: str, details: tuple[Any, ...], value: Any, merge: Merge, options: CommunicationOptions
    ) -> Any:
        """Runs `meet`, recorded for automatic differentiation if the value of some replica is recorded.

        Every replica has a graph of its own and runs its own backward pass, in which all of them meet again.
        Those of a context that `joins_graphs` share one graph, for one backward pass after the run.
        """
        autograd = backend_named("torch").autograd if loaded_libraries.is_torch_loaded() else None
        if autograd is None:
            return self.meet(name, details, value, merge, options)

        def exchange(value: Any, merge: Merge, *, is_backward: bool = False) -> Any:
            made, unusual = (f"gradient of {name}", "create_graph") if is_backward else (name, "no_grad")
            # Replicas have to agree on whether they record: the values of all are merged.
            mode = (unusual,) if autograd.is_recording() == is_backward else ()
            return self.meet(made, (*details, *mode), value, merge, options, is_backward=is_backward)

        if autograd.is_recording():
            if self.joins_graphs:
                return exchange(value, merge)
            apart = [one for one in self._strategy.extended.worker_devices if not one.is_host]
            # Those that share a GPU share the one thread that PyTorch has for its backward passes.
            if len(set(apart)) < len(apart):
                return exchange(autograd.cut(value), merge)
        return autograd.meeting(exchange, self._replica, value, merge)

    @property
    def _ops(self) -> CrossDeviceOps:
        return self._strategy.extended.cross_device_ops

    def __repr__(self) -> str:
        number, count = self.replica_id_in_sync_group, self.num_replicas_in_sync
        return f"ReplicaContext(replica {number} of {count}, {self._device})"

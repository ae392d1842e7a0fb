"""A call of fixed arrays, prepared once and made many times: what a training loop repeats."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from crossdevice import runtime
from crossdevice.backends.cuda_streams import SideStreams
from crossdevice.backends.protocol import Array, Backend
from crossdevice.errors import BoundError, ContextError
from crossdevice.execution.local.batch import CheckedBatch
from crossdevice.execution.local.planning import Planner
from crossdevice.execution.local.prepared import CheckedCall
from crossdevice.execution.pending import THIS_PROCESS, Pending, end_of, finish_started, start
from crossdevice.execution.processes.between_processes import BetweenProcesses
from crossdevice.execution.reading.leaf_spec import Columns, Dense
from crossdevice.kernels.host.fixed_arrays import FixedArrays
from crossdevice.values.replica_scope import check_cross_replica


class BoundCall:
    """A call of fixed arrays, prepared once by `bind` or `ops.bound`; calling it computes the results again.

    It keeps references to its arrays. Results are in `out`, or in memory that it owns and overwrites in
    each call: copy what you need after the next call. An array that has moved in memory
    (`ndarray.resize`, `Tensor.set_`), or is to be written and has become read-only (`setflags`), raises
    BoundError before anything is written; on a GPU, whose kernel is launched first, after the memory that
    the array had was written. Each call returns new results if the library's arrays cannot be
    written to, if values are sparse, if the algorithm overrides `reduce_implementation` or has an
    `accumulation_fn`, and between processes, without `out`, for all but reductions of arrays on the host
    or on GPUs that the group has reduced before: how long parts and gathered rows are is known only in the
    call. Results of processes of one host are in memory that these share.

    `start` lets it run while Python goes on. Several threads may call it; they take turns.

    Args:
        run: computes the results; `bind` gives it, as it does all arguments here.
        check: compares the arrays with those that were bound.
        owner: started calls of one owner run one after the other.
        side_streams: the GPU streams on which started calls run.

    Raises:
        BoundError: in a call, if an array has moved or has become read-only.
        ContextError: in a call, if it is running already.

    >>> import numpy as np, crossdevice as cd
    >>> arrays = [np.float32([1, 2]), np.float32([3, 4])]
    >>> bound = cd.bind(arrays, "sum", "cpu:0")
    >>> arrays[0] += 10
    >>> bound()
    array([14., 16.], dtype=float32)
    """

    def __init__(
        self,
        run: Callable[[], Any],
        check: Callable[[], None] | None = None,
        *,
        owner: object = THIS_PROCESS,
        side_streams: Callable[[], SideStreams | None] = lambda: None,
    ) -> None:
        """Started calls of one `owner` keep their order; `side_streams` is for arrays on GPUs."""
        self._run, self._check = run, check
        self._owner, self._side_streams = owner, side_streams
        self._start_anew()
        _bound_calls.add(self)

    def _start_anew(self) -> None:
        self._turn = threading.Lock()
        self._running: int | None = None
        self._pending: weakref.ref[Pending] | None = None
        self._end_of_started: Callable[[], None] | None = None

    def __call__(self) -> Any:
        """Makes the call: one result for one value, a list for pairs."""
        check_cross_replica("a bound reduction")
        end = self._end_of_started
        if end is not None:
            self._check_waited_for()
            end()  # without its Pending it may still wait behind other calls, and not have its turn
            if self._end_of_started is end:
                self._end_of_started = None
        return self._run_in_turn()

    def start(self) -> Pending:
        """Starts the call and returns at once; `pending.wait()` gives its results.

        A worker thread runs it, on GPUs a side stream. Started calls of one process, and of
        one group of processes, run in the order in which they were started.

        Returns:
            A `Pending`; its `wait()` returns the results.
        """
        check_cross_replica("start")
        self._check_waited_for()
        pending = start(self._run_in_turn, self._owner, self._side_streams())
        # Not the object itself: an interrupt may lose it, and then nobody could wait for it any more.
        self._pending, self._end_of_started = weakref.ref(pending), end_of(pending)
        return pending

    def _check_waited_for(self) -> None:
        pending = None if self._pending is None else self._pending()
        if pending is not None and not pending.is_waited_for:
            raise ContextError(
                "this bound reduction was started before; call wait() on what start() returned"
            )

    def _run_in_turn(self) -> Any:
        thread = threading.get_ident()
        if self._running == thread and self._turn.locked():
            # Only a signal's handler gets here: waiting for the call it interrupted would never end.
            raise ContextError("a bound reduction was called while it runs in this very thread")
        with self._turn:
            try:
                self._running = thread
                if self._check is not None:
                    self._check()
                return self._run()
            finally:
                self._running = None

    def __reduce__(self) -> Any:
        raise BoundError(
            "a bound reduction cannot be pickled or copied: it keeps addresses of memory of this process; "
            "pickle its arrays, and bind them where they arrive"
        )

    def with_results(self, convert: Callable[[Any], Any]) -> BoundCall:
        """The same call, whose results are handed over in another form."""
        run = self._run
        return BoundCall(
            lambda: convert(run()), self._check, owner=self._owner, side_streams=self._side_streams
        )


def bind_call(
    call: CheckedCall,
    planner: Planner,
    again: Callable[[], Any],
    answer_of: Callable[[list[Any]], Any],
) -> BoundCall:
    """Binds a checked call; its results are made now, and written again whenever it is made.

    Args:
        again: makes the call in full, for values of which nothing can be kept: sparse rows, and arrays that
            cannot be written to.
        answer_of: turns the results of all values into what a call returns.
    """
    side_streams = functools.partial(side_streams_of, call)
    if not call.is_dense or any(leaf.backend.is_immutable for leaf in call.dense):
        return BoundCall(again, side_streams=side_streams)
    dense = list(map(_with_arrays, call.dense))
    columns, outs = [leaf.arrays for leaf in dense], [leaf.out for leaf in dense]
    prepared, weights = call.prepared(planner), call.weights
    assert prepared is not None
    if None in outs:
        new = prepared.run(columns, [None] * len(outs), weights)
        outs = [results if out is None else out for out, results in zip(outs, new, strict=True)]
    written = [tuple(out) for out in outs if out is not None]
    answer = answer_of(call.wrapped(written))
    work, memory = prepared.bind(columns, written, weights), _Memory(dense, written)
    is_on_gpus = all(leaf.spec.shared_gpu is not None for leaf in dense)

    def run() -> Any:
        work()
        if is_on_gpus:
            # To ask a thousand tensors for their addresses takes 0.2 ms: the GPU is at work meanwhile.
            memory.check()
        return answer

    return BoundCall(run, None if is_on_gpus else memory.check, side_streams=side_streams)


def bind_between_processes(
    call: CheckedCall,
    planner: Planner,
    between: BetweenProcesses,
    answer_of: Callable[[list[Any]], Any],
) -> BoundCall | None:
    """Binds a checked call of several processes; None unless all of its arrays are dense, on the host.

    Other processes are not asked now, so only a batch of reductions, whose results have shapes that this
    process knows, gets memory for them. Each call is one of the group's, also if it is refused here.
    """
    prepared = call.prepared(planner)
    if prepared is None or not call.is_dense or any(leaf.spec.backend.is_immutable for leaf in call.dense):
        return None
    outs = [leaf.out for leaf in call.dense]
    if isinstance(call, CheckedBatch):
        outs = [
            between.empty_results(leaf.spec, dtype) if leaf.out is None else tuple(leaf.out)
            for leaf, dtype in zip(call.dense, call.result_dtypes, strict=True)
        ]
    dense = [_with_arrays(leaf) for leaf in call.dense]
    columns, weights = [leaf.arrays for leaf in dense], call.weights
    written = [out for out in outs if out is not None]
    memory = _Memory(dense, [() if out is None else out for out in outs])
    is_written = len(written) == len(outs)
    answer = answer_of(call.wrapped(written)) if is_written else None
    work = prepared.bind(columns, written, weights) if is_written else None

    def run() -> Any:
        finish_started(between.group)  # ranks make their calls in the order of their programs
        try:
            memory.check()
        except BaseException as error:
            between.group.refuse(f"{type(error).__name__}: {error}")
            raise
        if work is None:
            return answer_of(call.wrapped(prepared.run(columns, outs, weights)))
        work()
        return answer

    return BoundCall(run, owner=between.group)


def _with_arrays(leaf: Dense) -> Dense:
    """The same leaf; NumPy's scalars, which have no memory of their own to be read, become arrays."""
    arrays = [np.asarray(each) if isinstance(each, np.generic) else each for each in leaf.arrays]
    return leaf._replace(arrays=arrays)


def side_streams_of(call: CheckedCall) -> SideStreams | None:
    """Streams for the GPUs of a call; None for a thread, on the host or where there are two libraries."""
    backends = {leaf.spec.backend for leaf in call.dense}
    if len(backends) != 1:
        return None
    places = {device for leaf in call.dense for device in (*leaf.spec.devices, *leaf.spec.destinations)}
    return backends.pop().side_streams(places)


_bound_calls: weakref.WeakSet[BoundCall] = weakref.WeakSet()


def _forget_turns() -> None:
    """In a forked process, the thread that held the lock does not exist."""
    for bound in _bound_calls:
        bound._start_anew()


runtime.renew_after_fork(_forget_turns)


class _Memory:
    """The addresses of a bound call's arrays; one that moved would be read or written where it was."""

    def __init__(self, leaves: Sequence[Dense], outs: Columns) -> None:
        names: dict[Backend, dict[int, tuple[Array, str]]] = {}
        written = {id(array) for out in outs for array in out}
        for number, (leaf, out) in enumerate(zip(leaves, outs, strict=True)):
            of_backend = names.setdefault(leaf.spec.backend, {})
            for k, (array, device) in enumerate(zip(leaf.arrays, leaf.spec.devices, strict=True)):
                of_backend.setdefault(id(array), (array, f"replica {k} ({device}) of value {number}"))
            for k, (array, device) in enumerate(zip(out, leaf.spec.destinations, strict=False)):
                of_backend.setdefault(id(array), (array, f"out[{k}] ({device}) of value {number}"))
        # In place, an array is input and output: it is looked at once.
        self._looks: list[tuple[Callable[[], int], list[str]]] = []
        self._kept: list[FixedArrays] = []
        for backend, found in names.items():
            arrays = [array for array, _ in found.values()]
            if backend.name == "numpy":
                fixed = FixedArrays(arrays, [id(array) in written for array in arrays])
                self._kept.append(fixed)
                first_changed = fixed.first_changed
            else:
                known = backend.addresses_of(arrays)
                first_changed = functools.partial(_first_moved, backend, arrays, known)
            self._looks.append((first_changed, [name for _, name in found.values()]))

    def check(self) -> None:
        """Raises BoundError if an array is not where it was."""
        for first_changed, names in self._looks:
            changed = first_changed()
            if changed >= 0:
                raise BoundError(
                    f"{names[changed]} has another address or shape than when the reduction was "
                    "bound, or has become read-only; bind again"
                )


def _first_moved(backend: Backend, arrays: Sequence[Array], known: list[int]) -> int:
    addresses = backend.addresses_of(arrays)
    if addresses == known:
        return -1
    return next(n for n, pair in enumerate(zip(addresses, known, strict=True)) if len(set(pair)) > 1)

"""Recording of the bits that go into calls and come out of them, without cost when it is off."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from crossdevice import runtime
from crossdevice.algorithms.base import CrossDeviceOps
from crossdevice.errors import FileError
from crossdevice.execution.bound import BoundCall
from crossdevice.execution.collective import Call
from crossdevice.execution.fingerprints import digests_of_arrays, fingerprint
from crossdevice.execution.pending import Pending, is_started_work
from crossdevice.process_groups.cluster import cluster_from_env
from crossdevice.recording.bits_file import DIGEST_BYTES, BitsWriter, Event, Header, Kind, path_of_rank
from crossdevice.values.nesting import flatten
from crossdevice.values.replica_scope import current_replica

CALLS = (
    "reduce",
    "batch_reduce",
    "gather",
    "broadcast",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "value_of_rank",
)
"""Recorded methods of CrossDeviceOps, with their arguments and results."""

VALUES = ("per_replica_value", "value", "tensor", "value_destination_pairs")
"""Arguments of those methods that have values."""

COMPONENT = re.compile(r"\.values\[\d+\]")
"""Path entry of one component of a distributed value."""

logger = logging.getLogger("crossdevice")

Leaves = dict[str, list[str]]
"""The digests of all replicas, by the path to a leaf."""


@contextlib.contextmanager
def record_bits(path: str | os.PathLike[str]) -> Iterator[None]:
    """Writes which bits every call of crossdevice in the block gets and gives, as fingerprints of each leaf.

    `crossdevice bits run_a.bits run_b.bits` says where two such runs part. In a launch of several processes
    each writes a file of its own, such as `run_a.rank0.bits`. Events are appended as they happen, 8 bytes for
    each leaf and replica, and are there if the process is killed. `mark_bits` adds what is in between. The
    variable CROSSDEVICE_RECORD_BITS, set to a path, records a whole process.

    Args:
        path: the file, replaced if it exists.

    Returns:
        A context manager.

    Raises:
        FileError: the file cannot be written, or another process is writing it.

    >>> import pathlib, tempfile, numpy as np, crossdevice as cd
    >>> path = pathlib.Path(tempfile.mkdtemp(), "run.bits")
    >>> with cd.record_bits(path):
    ...     _ = cd.all_reduce([np.ones(4), np.ones(4)])
    >>> path.stat().st_size < 200
    True
    """
    global _recorder
    outer, recorder = _recorder, _Recorder(path)
    recorder.open()
    try:
        _recorder = recorder
        if outer is None:
            _instrument()
        yield
    finally:
        _recorder = outer
        if outer is None:
            _restore()
        recorder.close()


def record_from_environment() -> None:
    """Records this process from now on, if the variable names a file."""
    global _recorder
    path = runtime.RECORD_BITS.read()
    if path and _recorder is None:
        if not os.access(Path(path).parent, os.W_OK):
            raise FileError(
                f"{runtime.RECORD_BITS.variable} is {path}; "
                "expected a file in a folder that can be written to"
            )
        _recorder = _Recorder(path)
        _instrument()


def is_recording() -> bool:
    """Returns True if `mark_bits` writes anything."""
    return _recorder is not None


def mark_bits(name: str, tree: Any, *, inputs: Any = None) -> None:
    """Adds fingerprints of a structure of arrays to the record, under a name; does nothing without one.

    A name may be used again: a comparison counts how often it was. In a replica function the replica's number
    is put behind it.

    Args:
        name: what the record calls this place of the program.
        tree: an array or a structure of arrays.
        inputs: what the values were made from, where that is known. If they are equal in two runs and
            `tree` is not, what made it is at fault.

    >>> import numpy as np, crossdevice as cd
    >>> cd.mark_bits("after forward", {"loss": np.float32(0.5)})
    """
    if _recorder is not None:
        write_mark(named_by_replica(name), digests_of(inputs), digests_of(tree))


def named_by_replica(name: str) -> str:
    """Adds the replica to the name of its mark, since the order among replicas is random."""
    replica = current_replica()
    return name if replica is None else f"{name} in replica {replica}"


def write_mark(name: str, inputs: Leaves, results: Leaves) -> None:
    """Adds a mark with its digests."""
    if _recorder is not None:
        _recorder.write(name, None, False, inputs, results)


def write_call(name: str, rank: int, inputs: Leaves, results: Leaves) -> None:
    """Adds a call of an integration; its inner calls of crossdevice belong under `as_one_call`."""
    if _recorder is not None:
        _recorder.write(name, rank, True, inputs, results)


class _Recorder:
    """Writes the events of this process; a process forked from it has none.

    Its file is made with the first event: until then a launcher, or a program that starts its ranks itself,
    may have said nothing of ranks.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._file: BitsWriter | None = None
        self._is_closed = False

    def open(self) -> BitsWriter:
        """Creates the file, if there is none yet."""
        with self._lock:
            if self._file is None:
                header = self._header = Header(*_rank_and_size())
                own = self._path if header.size == 1 else path_of_rank(self._path, header.rank)
                self._file = BitsWriter(own, header)
            return self._file

    def write(self, name: str, rank: int | None, is_call: bool, inputs: Leaves, results: Leaves) -> None:
        """Appends an event; its rank counts where one process has several, each with a thread."""
        counts = [tuple((path, len(found)) for path, found in part.items()) for part in (inputs, results)]
        digests = [digest for part in (inputs, results) for found in part.values() for digest in found]
        with self._lock:
            if self._is_closed or os.getpid() != self._process:
                return
            file = self.open()
            if rank is None or self._header.size > 1:
                rank = self._header.rank
            kind = Kind(name, rank, is_call, counts[0], counts[1])
            file.append(Event(kind, tuple(bytes.fromhex(digest[: 2 * DIGEST_BYTES]) for digest in digests)))

    def close(self) -> None:
        """Ends the record."""
        with self._lock:
            self._is_closed = True
            if self._file is not None:
                self._file.close()


def _rank_and_size() -> tuple[int, int]:
    """Returns the process's rank and size, from its launcher or from torch.distributed."""
    cluster = cluster_from_env()
    distributed = sys.modules.get("torch.distributed")
    is_formed = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if cluster.size == 1 and distributed is not None and is_formed:
        return distributed.get_rank(), distributed.get_world_size()
    return cluster.rank, cluster.size


_recorder: _Recorder | None = None

_originals: list[tuple[type, str, Any]] = []
"""The methods that recording ones have taken the place of."""

_bound: weakref.WeakKeyDictionary[BoundCall, tuple[str, int | None, Any]] = weakref.WeakKeyDictionary()
"""Values of bound reductions, with their names and the rank that bound them."""

_started: weakref.WeakKeyDictionary[Pending, tuple[str, int | None, Leaves]] = weakref.WeakKeyDictionary()


class _Inside(threading.local):
    """Mark of a thread inside a recorded call, so that calls it makes count as part of it."""

    is_inside = False


_inside = _Inside()


def _instrument() -> None:
    for kind in _with_subclasses(CrossDeviceOps):
        for name in (*CALLS, *_RECORDING):
            if name in vars(kind):
                _replace(kind, name, _RECORDING.get(name, _recorded_call))
    _replace(BoundCall, "__call__", _recorded_bound)
    _replace(BoundCall, "start", _recorded_start)
    for kind in _with_subclasses(Pending)[1:]:
        _replace(kind, "wait", _recorded_wait)


def _replace(kind: type, name: str, recorded: Callable[[str, Any], Any]) -> None:
    method = vars(kind)[name]
    _originals.append((kind, name, method))
    setattr(kind, name, functools.wraps(method)(recorded(name, method)))


def _restore() -> None:
    while _originals:
        kind, name, method = _originals.pop()
        setattr(kind, name, method)


def _with_subclasses(kind: type) -> list[type]:
    found: list[type] = [kind]
    for each in found:  # which grows meanwhile
        children: list[type] = each.__subclasses__()
        found += [child for child in children if child not in found]
    return found


def _is_seen() -> bool:
    """Returns True if a call of this thread is to be recorded.

    One of the program's own, not a part of another.
    """
    return _recorder is not None and not _inside.is_inside and not is_started_work()


@contextlib.contextmanager
def as_one_call() -> Iterator[None]:
    """Treats the calls of crossdevice in the block as part of one that is recorded as a whole."""
    _inside.is_inside = True
    try:
        yield
    finally:
        _inside.is_inside = False


def _recorded_call(name: str, method: Any) -> Any:
    signature = inspect.signature(method)

    def call(self: CrossDeviceOps, *args: Any, **kwargs: Any) -> Any:
        recorder = _recorder
        if recorder is None or not _is_seen():
            return method(self, *args, **kwargs)
        try:
            found = signature.bind(self, *args, **kwargs)
        except TypeError:  # which the method itself says better
            return method(self, *args, **kwargs)
        value, what = _given(name, found.arguments)
        before = digests_of(value)
        with as_one_call():
            result = method(*found.args, **found.kwargs)
        recorder.write(what, _rank_of(self), True, before, digests_of(result))
        return result

    return call


def _recorded_bind(_name: str, method: Any) -> Any:
    def bind(self: CrossDeviceOps, call: Call, later: Callable[[], Any]) -> Any:
        if not _is_seen():
            return method(self, call, later)
        with as_one_call():
            bound = method(self, call, later)
        _bound[bound] = f"bound {_what(call)}", _rank_of(self), _values(call)
        return bound

    return bind


def _recorded_start_call(_name: str, method: Any) -> Any:
    def start(self: CrossDeviceOps, call: Call, later: Callable[[], Any]) -> Any:
        if not _is_seen():
            return method(self, call, later)
        before = digests_of(_values(call))
        with as_one_call():
            pending = method(self, call, later)
        _started[pending] = f"start_{_what(call)}", _rank_of(self), before
        return pending

    return start


def _values(call: Call) -> Any:
    """Returns the value of a call that is prepared or started; of a batch a list."""
    values = [value for value, _ in call.pairs]
    return values if call.collective.name == "batch_reduce" else values[0]


def _what(call: Call) -> str:
    name, op, *_ = call.collective
    return _named(name.removeprefix("batch_"), op)


def _named(name: str, op: Any) -> str:
    """Describes a call."""
    return name if op is None else f"{name} {getattr(op, 'name', str(op).upper())}"


_RECORDING = {"_bind": _recorded_bind, "_start": _recorded_start_call}


def _recorded_bound(_name: str, method: Any) -> Any:
    def call(self: BoundCall) -> Any:
        recorder = _recorder
        if recorder is None or not _is_seen():
            return method(self)
        what, rank, value = _bound.get(self, ("bound reduce", None, None))
        before = digests_of(value)
        with as_one_call():
            result = method(self)
        recorder.write(what, rank, True, before, digests_of(result))
        return result

    return call


def _recorded_start(_name: str, method: Any) -> Any:
    def start(self: BoundCall) -> Any:
        recorder = _recorder
        if recorder is None or not _is_seen():
            return method(self)
        what, rank, value = _bound.get(self, ("bound reduce", None, None))
        before = digests_of(value)
        pending = method(self)
        _started[pending] = what, rank, before
        return pending

    return start


def _recorded_wait(_name: str, method: Any) -> Any:
    def wait(self: Pending, timeout: float | None = None) -> Any:
        result = method(self, timeout)
        recorder, known = _recorder, _started.pop(self, None)
        if recorder is not None and known is not None:
            what, rank, before = known
            recorder.write(what, rank, True, before, digests_of(result))
        return result

    return wait


def _given(name: str, given: dict[str, Any]) -> tuple[Any, str]:
    """Returns the value among the arguments of a call, and its description; an iterator becomes a list."""
    which = next(each for each in VALUES if each in given)
    value = given[which]
    if which == "value_destination_pairs":
        value = given[which] = list(value)
        value = [pair[0] if isinstance(pair, tuple) and pair else pair for pair in value]
    return value, _named(name, given.get("reduce_op", given.get("op")))


def _rank_of(ops: CrossDeviceOps) -> int | None:
    group = getattr(ops, "group", None)
    return None if group is None else int(group.rank)


def digests_by_path(arrays: Mapping[str, Any]) -> Leaves:
    """Returns the digests of arrays with known paths, without a search in trees."""
    try:
        return {path: [digest] for path, digest in digests_of_arrays(arrays).items()}
    except Exception:
        return digests_of(dict(arrays))


def digests_of(tree: Any) -> Leaves:
    """Returns the digests of a structure; skips leaves that are not arrays."""
    if tree is None:
        return {}
    try:
        leaves = fingerprint(tree).leaves
    except Exception as error:
        try:
            kept = [leaf for leaf in flatten(tree)[0] if hasattr(leaf, "dtype") and hasattr(leaf, "shape")]
            leaves = fingerprint(kept).leaves
        except Exception:
            logger.warning("a value was not recorded: %s: %s", type(error).__name__, error)
            return {}
    grouped: Leaves = {}
    for path, digest in leaves.items():
        grouped.setdefault(COMPONENT.sub("", path), []).append(digest)
    return grouped

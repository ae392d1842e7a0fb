"""Models that arrive one by one, combined in the memory of one; their totals over the ranks of a group."""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.backends.registry import backend_named
from crossdevice.combining.between_ranks import RoundedSum, gathered_json, write_totals
from crossdevice.combining.saving import described, load, save, undescribed
from crossdevice.combining.trees import (
    INTEGERS,
    ArrivedTree,
    Integers,
    Leaf,
    LeafTotal,
    check_like,
    check_same,
    divisor_of,
    read_tree,
    rebuilt,
    results_of,
    united,
)
from crossdevice.errors import ContextError, FileError, MismatchError, OptionError
from crossdevice.kernels.host.resources.pool import result_pool
from crossdevice.kernels.host.running_sum import RunningSum, add_all
from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.values.device import Device
from crossdevice.values.options import Precision
from crossdevice.values.quantities import counted
from crossdevice.values.reduce_op import ReduceOp
from crossdevice.values.weights import factor_of


def results_of_ranks(
    group: ProcessGroup,
    skeleton: Any,
    totals: Mapping[str, LeafTotal],
    *,
    is_partial: bool,
    integers: Integers,
    is_mean: bool,
) -> tuple[Any, dict[str, Any]]:
    """Returns the structure of all trees, and arrays by path: sums, or means by the weights of all ranks.

    `totals` are none on a rank that has added nothing.
    """
    own = {
        "settings": f"partial={is_partial}, integers={integers!r}, mean={is_mean}",
        "tree": described(skeleton) if totals else None,
        "leaves": {path: _facts_of(total) for path, total in totals.items()},
    }
    # Two calls: what is wrong is found by all ranks alike between them, and the group stays usable.
    with group.call("compare accumulators", b"compare accumulators") as call:
        of_ranks = gathered_json(call, own)
    skeleton, leaves = _united(group.members, of_ranks, is_partial=is_partial)
    if not leaves:
        raise ContextError("no rank has added anything yet, so there is no result")
    mine = {path: totals.get(path) or LeafTotal(leaf, "exact", integers) for path, leaf in leaves.items()}
    weights = {
        path: sum(
            (Fraction(facts["leaves"][path][-1]) for facts in of_ranks if path in facts["leaves"]), Fraction()
        )
        for path in leaves
    }
    sizes = [(total.size, total.dtype) for total in mine.values()]
    flats = dict(zip(mine, result_pool.empty_batch(sizes), strict=True))
    sums = [
        RoundedSum(
            total.running,
            flats[path].view(total.running.dtype),
            divisor_of(weights[path], path) if is_mean else Fraction(1),
        )
        for path, total in mine.items()
        if total.running is not None
    ]
    digest = hashlib.blake2b(json.dumps(of_ranks).encode(), digest_size=16).digest()
    with group.call(f"combine accumulators of {counted(len(leaves), 'array')}", digest) as call:
        write_totals(call, sums)
        for path, total in mine.items():
            if total.running is None:
                flats[path][:] = _kept_of_ranks(call, total, integers)
    return skeleton, {
        path: total.leaf.backend.from_host(flats[path], total.leaf.shape, total.leaf.device)
        for path, total in mine.items()
    }


def _facts_of(total: LeafTotal) -> list[Any]:
    leaf = total.leaf
    return [leaf.backend.name, leaf.dtype, list(leaf.shape), str(leaf.device), str(total.weight)]


def _united(
    members: Sequence[str], of_ranks: Sequence[Mapping[str, Any]], *, is_partial: bool
) -> tuple[Any, dict[str, Leaf]]:
    """Returns the structure and leaves of all ranks; refuses ranks that differ from those before."""
    skeleton: Any = None
    leaves: dict[str, Leaf] = {}
    try:
        for name, facts in zip(members, of_ranks, strict=True):
            if facts["settings"] != of_ranks[0]["settings"]:
                raise MismatchError(
                    f"{name} combines accumulators with {facts['settings']}; {members[0]} with "
                    f"{of_ranks[0]['settings']}"
                )
            if facts["tree"] is None:
                continue
            found = undescribed(facts["tree"])
            for path, (library, dtype, shape, device, _) in facts["leaves"].items():
                leaf = Leaf(backend_named(library), dtype, tuple(shape), Device.parse(device))
                check_like(leaf, leaves.setdefault(path, leaf), name, path)
            if skeleton is None:
                skeleton = found
            elif is_partial:
                skeleton = united(skeleton, found, name)
            else:
                check_same(skeleton, found, name)
    except MismatchError as error:
        error.is_on_all_ranks = True
        raise
    return skeleton, leaves


def _kept_of_ranks(call: GroupCall, total: LeafTotal, integers: Integers) -> NDArray[Any]:
    """Returns integers that are not summed: those of the lowest rank that has some, or the largest."""
    kept = LeafTotal(total.leaf, "exact", integers)
    for found in call.all_gather_uneven(b"" if total.kept is None else total.kept.tobytes()):
        if found:
            kept.enter([np.frombuffer(found, total.dtype)], [])
    assert kept.kept is not None
    return kept.kept


class Accumulator:
    """A running mean or sum of arrays or trees of arrays, added one by one, each times its weight.

    The result has the bits of `reduce` on all of them at once, in the order in which they came. Under
    `precision="exact"` it is the true mean or sum, rounded once: the order does not matter, nor does which
    accumulator took what before they were merged. It may be called from several threads.

    Args:
        precision: `"accurate"` keeps sums in float64, those of float64 with their rounding errors;
            `"exact"` keeps all bits, in two float64 per element, three for float64.
        partial: trees may lack entries of their dicts; each leaf is divided by the weights of those that
            had it.
        integers: what becomes of integers and booleans: `"mean"` is rounded to nearest even, `"first"` is
            what came first, `"max"` the largest.
        max_pending: how many trees may wait so that one pass adds them all, which is faster. Their arrays
            are kept, not copied: they must not change until then. 1 adds each at once.

    Raises:
        OptionError: an argument is outside its range.

    >>> import numpy as np
    >>> total = Accumulator()
    >>> total.add({"w": np.float32([1, 2])}, weight=3)
    >>> total.add({"w": np.float32([5, 6])}, weight=1)
    >>> total.mean()
    {'w': array([2., 3.], dtype=float32)}
    """

    def __init__(
        self,
        precision: Precision = "accurate",
        *,
        partial: bool = False,
        integers: Integers = "mean",
        max_pending: int = 1,
    ) -> None:
        if precision not in ("accurate", "exact"):
            raise OptionError(f"precision must be accurate or exact; got {precision!r}")
        if integers not in INTEGERS:
            raise OptionError(f"integers must be one of {', '.join(INTEGERS)}; got {integers!r}")
        if isinstance(max_pending, bool) or not isinstance(max_pending, int) or max_pending < 1:
            raise OptionError(f"max_pending must be a whole number, 1 or more; got {max_pending!r}")
        self.precision = precision
        self.partial = partial
        self.integers = integers
        self.max_pending = max_pending
        self._lock = threading.RLock()  # a signal's handler may add while its thread is here
        self._is_changing = False
        self._count = 0
        self._skeleton: Any = None
        self._totals: dict[str, LeafTotal] = {}
        self._pending: list[tuple[dict[str, NDArray[Any]], float]] = []

    @property
    def count(self) -> int:
        """The number of trees that were added."""
        return self._count

    def add(self, tree: Any, weight: float = 1.0) -> None:
        """Adds an array or a tree of arrays; after an error the accumulator is as it was.

        Args:
            tree: an array, or a tree of dicts, lists and tuples of arrays, like those added before.
            weight: the number by which it is multiplied, finite.

        Raises:
            MismatchError: the tree differs from those before it; the message names the leaf.
            ConversionError: a leaf cannot be read as an array.
            OptionError: the weight is not a finite number.
        """
        factor = factor_of(weight, ReduceOp.SUM)
        arrived = read_tree(tree)
        flats = {path: leaf.backend.to_host(array) for path, (leaf, array) in arrived.leaves.items()}
        with self._lock:
            skeleton = self._checked(arrived)
            with self._changing():
                self._enter(arrived, skeleton)
                self._pending.append((flats, factor))
                self._count += 1
                if len(self._pending) >= self.max_pending:
                    self._add_pending()

    def merge(self, other: Accumulator) -> None:
        """Adds everything another accumulator of the same settings holds; the other one stays unchanged.

        Under `"accurate"` sums of sums are rounded: only `"exact"` has the bits of adding all to one.

        Args:
            other: an accumulator with the same settings.

        Raises:
            OptionError: it is something else, or has other settings.
            MismatchError: its trees differ from those of this one.
        """
        if not isinstance(other, Accumulator):
            raise OptionError(f"merge takes another Accumulator, got {type(other).__name__}")
        if other is self:
            raise OptionError("an accumulator cannot be merged with itself")
        for name in ("precision", "integers"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                raise OptionError(f"the other accumulator has {name}={theirs!r}; this one has {ours!r}")
        first, second = sorted((self, other), key=id)  # two that merge each other must not wait for ever
        with first._lock, second._lock:
            if not other._count:
                return
            other._settle()
            leaves = {path: (total.leaf, None) for path, total in other._totals.items()}
            arrived = ArrivedTree(other._skeleton, leaves)
            skeleton = self._checked(arrived)
            with self._changing():
                self._add_pending()
                self._enter(arrived, skeleton)
                for path, total in other._totals.items():
                    self._totals[path].merge(total)
                self._count += other._count

    def mean(self, group: ProcessGroup | None = None) -> Any:
        """Divides the weighted sum of each leaf by the sum of its weights; rounds once to the leaf's dtype.

        Args:
            group: processes with accumulators to combine, which must be exact: all of them call this, and
                get the same mean of everything that was added on any of them. Each adds up
                a share of it; accumulators stay as they are, and may be empty on some.

        Returns:
            A tree like those that were added.

        Raises:
            ContextError: nothing has been added yet.
            OptionError: there is a group, and sums are not exact.
            MismatchError: ranks have added different trees.

        >>> import numpy as np
        >>> from crossdevice.testing import run_ranks
        >>> def train(group):
        ...     total = Accumulator("exact")
        ...     for number in range(group.rank, 5, group.size):  # its share of five micro-batches
        ...         total.add(np.float32([0.1, 0.7]) ** number)
        ...     return total.mean(group).tobytes()
        >>> len({*run_ranks(1, train), *run_ranks(2, train), *run_ranks(3, train)})
        1
        """
        return self._result(group, is_mean=True)

    def sum(self, group: ProcessGroup | None = None) -> Any:
        """Rounds the sum of weights times values once to the dtype of each leaf.

        Args:
            group: processes with accumulators to combine, as in `mean`.

        Returns:
            A tree like those that were added.

        Raises:
            ContextError: nothing has been added yet.
            OptionError: there is a group, and sums are not exact.
            MismatchError: ranks have added different trees.
        """
        return self._result(group, is_mean=False)

    def save(self, file: str | PathLike[str]) -> None:
        """Writes what `load` needs to continue, as an `.npz` without pickles; an old file is replaced last.

        Trees must be made of dicts with plain keys, lists and tuples.

        Args:
            file: the path of the `.npz`.

        Raises:
            FileError: the file cannot be written.
            ConversionError: a tree has something else than dicts, lists and tuples.
        """
        with self._lock:
            self._settle()
            settings = {name: getattr(self, name) for name in SETTINGS}
            save(file, {**settings, "count": self._count}, self._skeleton, self._totals)

    @classmethod
    def load(cls, file: str | PathLike[str]) -> Accumulator:
        """Reads an accumulator that was saved.

        Args:
            file: the path of the `.npz`.

        Returns:
            An accumulator that goes on where the saved one stopped.

        Raises:
            FileError: the file cannot be read, or is not a saved accumulator.
        """
        header, skeleton, totals = load(file)
        try:
            made = cls(**{name: header[name] for name in SETTINGS})
        except (KeyError, TypeError, OptionError) as error:
            raise FileError(f"{file} cannot be read as a saved accumulator: {error}") from error
        made._count, made._skeleton, made._totals = header["count"], skeleton, totals
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Returns the complete state, for `pickle` and `copy`."""
        with self._lock:
            self._settle()
            return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())

    def __copy__(self) -> Accumulator:
        return copy.deepcopy(self)  # two must not add to the same sums

    def _result(self, group: ProcessGroup | None, *, is_mean: bool) -> Any:
        if group is not None and self.precision != "exact":
            raise OptionError(
                f"accumulators of several processes are combined under precision='exact'; this one has "
                f"{self.precision!r}, whose bits would depend on who has added what"
            )
        with self._lock:
            if group is None or group.size == 1:
                if not self._count:
                    raise ContextError("nothing has been added yet, so there is no result")
                self._settle()
                return rebuilt(self._skeleton, results_of(self._totals, is_mean=is_mean))
            self._settle()
            skeleton, results = results_of_ranks(
                *(group, self._skeleton, self._totals),
                is_partial=self.partial,
                integers=self.integers,
                is_mean=is_mean,
            )
            return rebuilt(skeleton, results)

    def _checked(self, arrived: ArrivedTree) -> Any:
        """Returns the structure of all trees so far, this one included."""
        name = f"tree {self._count}"
        for path, (leaf, _) in arrived.leaves.items():
            if path in self._totals:
                check_like(leaf, self._totals[path].leaf, name, path)
        if not self._count:
            return arrived.skeleton
        if self.partial:
            return united(self._skeleton, arrived.skeleton, name)
        check_same(self._skeleton, arrived.skeleton, name)
        return self._skeleton

    def _enter(self, arrived: ArrivedTree, skeleton: Any) -> None:
        """Makes room for leaves that are new."""
        self._skeleton = skeleton
        for path, (leaf, _) in arrived.leaves.items():
            if path not in self._totals:
                self._totals[path] = LeafTotal(leaf, self.precision, self.integers)

    def _settle(self) -> None:
        """Adds what waits; an interrupt in between leaves a complete accumulator."""
        if self._pending or self._is_changing:
            with self._changing():
                self._add_pending()

    def _add_pending(self) -> None:
        pending, self._pending = self._pending, []
        tasks: list[tuple[RunningSum, list[NDArray[Any]], list[float]]] = []
        for path, total in self._totals.items():
            having = [(flats[path], weight) for flats, weight in pending if path in flats]
            if having:
                weights = [weight for _, weight in having]
                flats = total.enter([flat for flat, _ in having], weights)
                if total.running is not None:
                    tasks.append((total.running, flats, weights))
        add_all(tasks)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Sums that an interrupt has left half added are never used again."""
        if self._is_changing:
            raise ContextError(
                "a call was interrupted while it added, so the sums are incomplete; start again, or load "
                "what was saved"
            )
        self._is_changing = True
        yield
        self._is_changing = False


SETTINGS = ("precision", "partial", "integers", "max_pending")

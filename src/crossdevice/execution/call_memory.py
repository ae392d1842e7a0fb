"""What one object remembers of its calls, so that the next ones like them are run at once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from crossdevice.backends.protocol import Array
from crossdevice.execution.local.batch import Algorithm, Request, checked_leaves
from crossdevice.execution.reading.destinations import read_destinations
from crossdevice.execution.reading.leaf_spec import Dense
from crossdevice.execution.reading.values import read_value
from crossdevice.execution.remembering import (
    RecentCall,
    RememberedBatch,
    RememberedCall,
    batch_key,
    call_key,
    is_plain_batch,
)
from crossdevice.execution.signature_cache import SignatureCache
from crossdevice.values.distributed import DistributedValues
from crossdevice.values.dtypes import result_dtype
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.reduce_op import ReduceOp


class CallMemory:
    """Calls of one object by their keys: `find` them before they are read, `keep` them after they were made.

    Only plain values are kept: dense arrays that are read as they are.
    """

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        self._calls: SignatureCache[RememberedCall] = SignatureCache()
        self._batches: SignatureCache[RememberedBatch] = SignatureCache()
        self._recent: RecentCall | None = None

    def find(
        self, op: Any, value: Any, destinations: Any, options: Any
    ) -> tuple[Hashable, Callable[[Sequence[Array], Any], Any] | None]:
        """The key of a call, None if it cannot be kept, and what runs it on arrays and an `out`, if known."""
        recent = self._recent
        if recent is not None and recent.fits(op, value, destinations, options):
            return None, recent
        key = call_key(op, value, destinations, options)
        known = None if key is None else self._calls.get(key)
        if known is not None:
            self._recent = known.as_recent(op, value, destinations, options)
        return key, known

    def keep(
        self, key: Hashable, op: ReduceOp, value: Any, destinations: Any, options: CommunicationOptions
    ) -> None:
        """Remembers a call that was made, if its value is plain."""
        leaf = _plain_leaf(value, destinations, op, options)
        if leaf is not None:
            prepared = self._algorithm.prepared((leaf.spec,), op, options)
            self._calls[key] = RememberedCall(prepared, leaf.spec, result_dtype(leaf.spec.dtype, op))

    def find_batch(
        self, op: Any, pairs: Sequence[tuple[Any, Any]], options: Any, outs: Sequence[Any]
    ) -> tuple[Hashable, Callable[[], list[Any]] | None]:
        """The key of a batch, None if it cannot be kept, and what runs it, if it is as it was."""
        key = batch_key(op, pairs, options, outs)
        known = None if key is None else self._batches.get(key)
        arrays = None if known is None else known.fitting(pairs, outs)
        if known is None or arrays is None:
            return key, None
        return key, lambda: known(arrays)

    def keep_batch(
        self,
        key: Hashable,
        op: ReduceOp,
        pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions,
        outs: Sequence[Any],
    ) -> None:
        """Remembers a batch that was reduced, if all its values are plain and of one library."""
        if not is_plain_batch(pairs, outs):
            return
        leaves: list[Dense] = []
        for (value, destinations), out in zip(pairs, outs, strict=True):
            leaf = _plain_leaf(value, destinations, op, options, out)
            if leaf is None:
                return
            leaves.append(leaf)
        if len({leaf.spec.backend for leaf in leaves}) == 1:
            prepared = self._algorithm.prepared(tuple(leaf.spec for leaf in leaves), op, options)
            self._batches[key] = RememberedBatch(prepared, leaves, pairs)


def _plain_leaf(
    value: DistributedValues,
    destinations: Any,
    op: ReduceOp,
    options: CommunicationOptions,
    out: Any = None,
) -> Dense | None:
    """The leaf of a value that is reduced as it is; numbers, variables and rows are read in every call."""
    request = Request(read_value(value), read_destinations(destinations), out)
    if request.value.structure is not None:
        return None
    (leaf,) = checked_leaves(request, op, options)
    if not isinstance(leaf, Dense) or not all(map(operator.is_, leaf.arrays, value.values)):
        return None
    return leaf

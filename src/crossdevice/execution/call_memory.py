"""What one object remembers of its calls, so that the next ones like them are run at once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from crossdevice.backends.protocol import Array
from crossdevice.execution.batch import Algorithm, Request, checked_leaves
from crossdevice.execution.destinations import read_destinations
from crossdevice.execution.intake import read_value
from crossdevice.execution.leaf_spec import Dense, LeafSpec
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
        spec = _plain_spec(value, destinations, op, options)
        if spec is not None:
            prepared = self._algorithm.prepared((spec,), op, options)
            self._calls[key] = RememberedCall(prepared, spec, result_dtype(spec.dtype, op))

    def find_batch(
        self, op: Any, pairs: Sequence[tuple[Any, Any]], options: Any
    ) -> tuple[Hashable, Callable[[], list[Any]] | None]:
        """The key of a batch, None if it cannot be kept, and what runs it, if it is as it was."""
        key = batch_key(op, pairs, options)
        known = None if key is None else self._batches.get(key)
        columns = None if known is None else known.columns_of(pairs)
        if known is None or columns is None:
            return key, None
        return key, lambda: known(columns)

    def keep_batch(
        self,
        key: Hashable,
        op: ReduceOp,
        pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions,
    ) -> None:
        """Remembers a batch that was reduced, if all its values are plain and of one library."""
        if not is_plain_batch(pairs):
            return
        specs: list[LeafSpec] = []
        for value, destinations in pairs:
            spec = _plain_spec(value, destinations, op, options)
            if spec is None:
                return
            specs.append(spec)
        if len({spec.backend for spec in specs}) == 1:
            prepared = self._algorithm.prepared(tuple(specs), op, options)
            self._batches[key] = RememberedBatch(prepared, specs, pairs)


def _plain_spec(
    value: DistributedValues, destinations: Any, op: ReduceOp, options: CommunicationOptions
) -> LeafSpec | None:
    """The spec of a value that is reduced as it is; numbers, variables and rows are read in every call."""
    request = Request(read_value(value), read_destinations(destinations))
    if request.value.structure is not None:
        return None
    (leaf,) = checked_leaves(request, op, options)
    if not isinstance(leaf, Dense) or not all(map(operator.is_, leaf.arrays, value.values)):
        return None
    return leaf.spec

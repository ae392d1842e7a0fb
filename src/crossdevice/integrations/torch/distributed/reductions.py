"""Reductions of host tensors: operations and dtypes of torch.distributed in terms of ours.

Kernels are loaded in the background: a program's first collectives do not wait for a compiler.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from crossdevice import runtime
from crossdevice.algorithms.collective_all_reduce import CollectiveAllReduce
from crossdevice.backends.registry import backend_of_type
from crossdevice.errors import DtypeError, ReduceOpError
from crossdevice.integrations.torch.distributed.copies import HostCopies
from crossdevice.integrations.torch.distributed.work import named
from crossdevice.kernels.host import fused_pass
from crossdevice.process_groups.background import BackgroundThread
from crossdevice.values.distributed import PerReplica
from crossdevice.values.dtypes import check_reducible
from crossdevice.values.options import CommunicationOptions
from crossdevice.values.recipe import Recipe
from crossdevice.values.reduce_op import ReduceOp

Flat = NDArray[Any]

_KIND = dist.ReduceOp.RedOpType
NAMES: dict[Any, str] = {
    _KIND.SUM: "sum",
    _KIND.AVG: "mean",
    _KIND.MIN: "min",
    _KIND.MAX: "max",
    _KIND.PRODUCT: "prod",
}
"""Operations that floats have, and ours for each."""

_OF_TRUTH = {_KIND.SUM: "max", _KIND.MAX: "max", _KIND.PRODUCT: "min", _KIND.MIN: "min"}
"""Operations on truth values, as in c10d."""

_BITWISE: dict[Any, Any] = {
    _KIND.BAND: np.bitwise_and,
    _KIND.BOR: np.bitwise_or,
    _KIND.BXOR: np.bitwise_xor,
}

BOUND_BYTES = 64 << 10
"""Up to here a bound call, with two copies, takes less time than reading a call does."""

MAX_BOUND = 64
"""Small reductions of one operation and dtype that are kept bound."""

_torch = backend_of_type(torch.Tensor)
assert _torch is not None
host_view: Callable[[torch.Tensor], Flat] = _torch.host_view
"""The memory of a contiguous host tensor, flat; with the dtypes of ml_dtypes where NumPy lacks one."""


class Reduction:
    """One operation of torch.distributed on tensors of one dtype.

    Raises:
        ReduceOpError: there is no such operation on this dtype.
    """

    def __init__(self, op: Any, dtype: torch.dtype) -> None:
        kind = op.op if isinstance(op, dist.ReduceOp) else op
        self.kind = kind
        self.weights: list[float] | None = None
        self.bitwise = _BITWISE.get(kind)
        self._is_truth = dtype == torch.bool
        self._is_half_complex = dtype == torch.complex32  # which NumPy lacks
        self._divides = kind == _KIND.AVG and not (dtype.is_floating_point or dtype.is_complex)
        is_integer = not (dtype.is_floating_point or dtype.is_complex)
        name = (_OF_TRUTH if self._is_truth else NAMES).get(kind)
        if kind == _KIND.PREMUL_SUM and not is_integer:
            name, factor = "sum", op.factor
            self.weights = [float(factor.item() if isinstance(factor, torch.Tensor) else factor)]
        if self.bitwise is not None and is_integer:
            name = str(kind)
        if self._is_half_complex and name not in ("sum", "mean"):
            name = None
        if name is None:
            raise _refusal(kind, dtype)
        if self.bitwise is None and not (self._is_truth or self._is_half_complex):
            try:
                check_reducible(str(dtype).removeprefix("torch."), ReduceOp(name), "the tensor")
            except (DtypeError, ReduceOpError) as error:
                raise named(error) from None
        self.name = name
        self._bound: dict[tuple[tuple[int, ...], Any], tuple[Flat, Callable[[], Any]]] = {}

    def memory(self, tensor: torch.Tensor) -> Any:
        """Returns a contiguous tensor's elements, flat: on the host as ndarrays; truth values as 0 and 1.

        Complex numbers of two float16 are read as these.
        """
        if self._is_half_complex:
            tensor = torch.view_as_real(tensor)
        if not tensor.is_cpu:
            flat = tensor.detach().view(-1)
            return flat.view(torch.uint8) if self._is_truth else flat
        memory = host_view(tensor)
        return memory.view(np.uint8) if self._is_truth else memory

    def all_reduce(self, ops: CollectiveAllReduce, flat: Any, options: CommunicationOptions) -> None:
        """Replaces the values by the combination of those of all ranks."""
        if self.bitwise is not None:
            _write(flat, self._combined(ops, [_on_host(flat)] * _size(ops), options))
            return
        if self._divides:
            _write(flat, _integer_means(ops, [_on_host(flat)], options))
            return
        if self._is_small(flat):
            memory, reduce = self._bound_to(ops, flat, flat.shape, options)
            memory[...] = flat
            reduce()
            flat[...] = memory
        else:
            ops.reduce(self.name, flat, _place(flat), options, out=flat, weights=self.weights)

    def _is_small(self, flat: Any) -> bool:
        return self.weights is None and isinstance(flat, np.ndarray) and flat.nbytes <= BOUND_BYTES

    def _bound_to(
        self, ops: CollectiveAllReduce, flat: Flat, shape: tuple[int, ...], options: CommunicationOptions
    ) -> tuple[Flat, Callable[[], Any]]:
        """Returns memory of that shape for as many elements, and its bound in-place reduction.

        Ranks compare shapes, so calls of one size that mean different things are told apart by them.
        """
        key = shape, options.timeout_seconds
        known = self._bound.get(key)
        if known is None:
            memory = np.empty(shape, flat.dtype)
            if len(self._bound) >= MAX_BOUND:
                self._bound.clear()
            known = memory, ops.bind(self.name, memory, _place(memory), options, out=memory)
            self._bound[key] = known
        return known

    def batch(self, ops: CollectiveAllReduce, flats: Sequence[Any], options: CommunicationOptions) -> None:
        """Reduces several, which are sent together."""
        if self.bitwise is not None or self._divides or len(flats) == 1:
            for flat in flats:
                self.all_reduce(ops, flat, options)
            return
        pairs = [(flat, _place(flat)) for flat in flats]
        ops.batch_reduce(self.name, pairs, options, out=list(flats), weights=self.weights)

    def of_replicas(
        self, ops: CollectiveAllReduce, flats: Sequence[Any], options: CommunicationOptions
    ) -> Any:
        """Combines several values of this rank, and as many of each other one."""
        weights = None if self.weights is None else self.weights * len(flats)
        if self.bitwise is not None:
            flat = self.bitwise.reduce(np.stack([_on_host(each) for each in flats]))
            return _like(flats[0], self._combined(ops, [flat] * _size(ops), options))
        if self._divides:
            return _like(flats[0], _integer_means(ops, list(map(_on_host, flats)), options))
        return ops.reduce(self.name, PerReplica(list(flats)), _place(flats[0]), options, weights=weights)

    def scatter(
        self,
        ops: CollectiveAllReduce,
        whole: Any,
        sizes: Sequence[int],
        out: Any,
        options: CommunicationOptions,
    ) -> None:
        """Writes the combination of all ranks' parts for this rank; parts lie end to end."""
        if self.bitwise is not None:
            parts = np.split(_on_host(whole), np.cumsum(sizes)[:-1])
            _write(out, self._combined(ops, parts, options))
            return
        if self._divides:
            means, end = _integer_means(ops, [_on_host(whole)], options), sum(sizes[: _rank(ops) + 1])
            _write(out, means[end - sizes[_rank(ops)] : end])
            return
        if self._is_half_complex:
            sizes = [2 * length for length in sizes]
        uneven = None if len(set(sizes)) == 1 else sizes
        if uneven is None and self._is_small(whole):
            # To combine the parts of the others, too, is faster than to tell ranks apart.
            memory, reduce = self._bound_to(ops, whole, (len(sizes), sizes[0]), options)
            memory.reshape(-1)[...] = whole
            reduce()
            out[...] = memory[_rank(ops)]
            return
        ops.reduce_scatter(self.name, whole, options=options, sizes=uneven, out=out, weights=self.weights)

    def _combined(
        self, ops: CollectiveAllReduce, parts: Sequence[Flat], options: CommunicationOptions
    ) -> Flat:
        """Combines bitwise: each rank gets all ranks' parts of its share and combines them."""
        group = ops.group
        assert group is not None
        own = parts[group.rank]
        received = [np.empty_like(own) for _ in parts]
        what = f"{self.name} of {own.dtype} {[part.size for part in parts]}"
        HostCopies(group).exchange_arrays(
            [_bytes(each) for each in received], [_bytes(each) for each in parts], what, _seconds_of(options)
        )
        combine: Any = self.bitwise
        combined: Flat = combine.reduce(np.stack(received))
        return combined


def _integer_means(ops: CollectiveAllReduce, flats: Sequence[Flat], options: CommunicationOptions) -> Flat:
    """Computes means of integers, cut off towards zero as in C++; no sum on the way overflows.

    Quotients and remainders are summed apart.
    """
    number, dtype = len(flats) * _size(ops), flats[0].dtype
    wide = np.uint64 if dtype == np.uint64 else np.int64
    divided = sum(np.stack(np.divmod(flat.astype(wide), wide(number))) for flat in flats)
    means, rest = ops.reduce("sum", divided, "cpu:0", options)
    means = means + rest // wide(number)
    return np.where((means < 0) & (rest % wide(number) != 0), means + wide(1), means).astype(dtype)


def _seconds_of(options: CommunicationOptions) -> float | None:
    """Returns the deadline of a call in seconds; options hold a number or a timedelta."""
    seconds = options.timeout_seconds
    return seconds.total_seconds() if isinstance(seconds, timedelta) else seconds


def _size(ops: CollectiveAllReduce) -> int:
    assert ops.group is not None
    return ops.group.size


def _rank(ops: CollectiveAllReduce) -> int:
    assert ops.group is not None
    return ops.group.rank


def _place(flat: Any) -> Any:
    """Returns the destination of an in-place result."""
    return "cpu:0" if isinstance(flat, np.ndarray) else flat


def _on_host(flat: Any) -> Flat:
    return flat if isinstance(flat, np.ndarray) else flat.cpu().numpy()


def _like(target: Any, total: Flat) -> Any:
    """Returns the total where the target is."""
    return total if isinstance(target, np.ndarray) else torch.from_numpy(total).to(target.device)


def _write(target: Any, total: Flat) -> None:
    if isinstance(target, np.ndarray):
        np.copyto(target, total)
    else:
        target.copy_(torch.from_numpy(total))


def _refusal(kind: Any, dtype: torch.dtype) -> BaseException:
    """Makes the error for an operation that a dtype does not have."""
    name = str(kind).removeprefix("RedOpType.")
    needed = "non-integral dtype " if kind in _BITWISE else ""
    return named(
        ReduceOpError(
            f"Cannot use ReduceOp.{name} with {needed}{dtype}: expected SUM, PRODUCT, MIN, "
            "MAX, AVG or PREMUL_SUM for floats, SUM, PRODUCT, MIN, MAX, AVG, BAND, BOR or BXOR for integers, "
            "SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR for truth values"
        )
    )


def _bytes(flat: Flat) -> NDArray[np.uint8]:
    return flat.reshape(-1).view(np.uint8)


LOADING_BYTES = 256 << 10
"""The smallest reduction that is worth the second of CPU time that loading takes."""

LOADING_CALLS = 64
"""Number of smaller reductions that make loading worthwhile."""


COMPILED = "crossdevice.kernels.host.llvm.numba_pass"
"""Module that is imported once kernels are loaded."""


class LateKernels:
    """NumPy fallback for small arrays, with the same bits, until kernels have been loaded.

    It changes nothing in a process where kernels were chosen or loaded before, or cannot be had.
    """

    def __init__(self) -> None:
        self._calls_left = LOADING_CALLS
        self._thread: BackgroundThread | None = None
        self.is_settled = True
        """True if the choice of kernels is final."""

    def postpone(self) -> None:
        """Chooses NumPy for now, in a process that has not used kernels yet."""
        chosen = fused_pass.are_kernels_selected() or runtime.KERNELS.read()
        if chosen or COMPILED in sys.modules or importlib.util.find_spec("numba") is None:
            return
        fused_pass.select_kernels("numpy")
        self.is_settled = False

    def note_reduction(self, num_bytes: int) -> None:
        """Begins to load once a reduction is large, or there were many."""
        self._calls_left -= 1
        if self._thread is None and (num_bytes >= LOADING_BYTES or self._calls_left < 0):
            self._thread = BackgroundThread("crossdevice kernels")
            self._thread.submit(self._load)

    def _load(self) -> None:
        try:
            fused_pass.load_kernels(Recipe(ReduceOp.SUM, "accurate"), np.dtype(np.float32))
        finally:
            fused_pass.select_kernels(None)
            self.is_settled = True


late_kernels = LateKernels()
"""The late kernels of this process."""

"""Dispatch modes and tensor subclasses, which see a collective as the operator `c10d::*` that it stands for.

A process group that is written in Python is called directly, and not through these operators. Where a mode is
active (`CommDebugMode`, `FakeTensorMode`) or a tensor is of a subclass (an `AsyncCollectiveTensor`), the
call takes that way after all, with a mode beneath all others that makes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_map

num_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Returns the number of active modes in this thread."""

_OLDER_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""Names of the same methods in PyTorch 2.11."""

_PLAIN = torch.Tensor.__torch_dispatch__

dynamo: Any = torch._C._dynamo.eval_frame
_skip: Any = None
if hasattr(dynamo, "_FrameExecStrategy"):  # since PyTorch 2.7
    _skip = dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, dynamo._FrameAction.SKIP)


def seen_by_modes(method: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    """Makes a method of a process group visible to modes and tensor subclasses."""
    name = method.__name__
    if not hasattr(dist.ProcessGroup, name):
        name = _OLDER_NAMES[name]

    @functools.wraps(method)
    def call(group: Any, *args: Any, **named: Any) -> dist.Work:
        if num_modes() or (args and _is_of_subclass(args[0])):
            return _dispatched(group, name, method, args, named)
        return method(group, *args, **named)

    return never_compiled(call)


Function = TypeVar("Function", bound=Callable[..., Any])


def never_compiled(function: Function) -> Function:
    """Excludes a function, with all that it calls, from `torch.compile`."""
    # Not by `torch._disable_dynamo`, which would import Dynamo.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    if _skip is not None:  # a caller that Dynamo has broken off in would have it compile what it calls
        dynamo.set_code_exec_strategy(function.__code__, _skip)
    return function


@contextmanager
def without_modes() -> Iterator[None]:
    """Hides operations on tensors inside a collective from the modes of the program."""
    if num_modes():
        with _disable_current_modes():
            yield
    else:
        yield


def _is_of_subclass(tensors: Any) -> bool:
    while isinstance(tensors, (list, tuple)) and tensors:
        tensors = tensors[0]
    return isinstance(tensors, torch.Tensor) and type(tensors).__torch_dispatch__ is not _PLAIN


class _Beneath(TorchDispatchMode):
    """The innermost mode, which makes the collective after its operator has passed all other modes."""

    def __init__(self, make: Callable[..., dist.Work]) -> None:
        super().__init__()
        self._make = make
        self.work: dist.Work | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        if self.work is None:
            self.work = self._make()
        boxed = self.work.boxed()
        return boxed if len(func._schema.returns) == 1 else (args[0], boxed)


def _dispatched(
    group: Any, name: str, method: Callable[..., dist.Work], args: Any, named: dict[str, Any]
) -> dist.Work:
    args = tree_map(_waited_for, args)
    # A group without methods in Python calls the operators.
    operator = functools.partial(getattr(group.of_operators, name), *args, **named)
    is_fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    if is_fake or (args and _is_of_subclass(args[0])):
        found: dist.Work = operator()  # the mode or the subclass says what becomes of it
        return found
    if not num_modes():
        return method(group, *args, **named)
    beneath = _Beneath(functools.partial(method, group, *args, **named))
    modes = _get_current_dispatch_mode_stack()
    with _disable_current_modes(), _entered([beneath, *modes]):
        found = operator()
    return found if beneath.work is None else beneath.work


def _waited_for(value: Any) -> Any:
    """Returns the tensor in a functional collective's result."""
    return value.trigger_wait() if hasattr(type(value), "trigger_wait") else value


@contextmanager
def _entered(modes: list[Any]) -> Iterator[None]:
    for mode in modes:
        torch._C._push_on_torch_dispatch_stack(mode)
    try:
        yield
    finally:
        for _ in modes:
            torch._C._pop_torch_dispatch_stack(None)

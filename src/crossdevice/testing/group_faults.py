"""Faults of one rank of a group: what it sends, or shows in shared memory, is wrong or lost."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crossdevice.process_groups.group import ProcessGroup
from crossdevice.process_groups.group_call import GroupCall
from crossdevice.process_groups.protocol import Message
from crossdevice.process_groups.shared.shared_arrays import NOWHERE
from crossdevice.testing.fault import Fault, Injected, replaced


@contextlib.contextmanager
def in_group(group: ProcessGroup, fault: Fault) -> Iterator[Injected]:
    """Makes calls of this rank faulty."""
    call, make_call, calls = group.call, group.make_call, itertools.count()

    @contextlib.contextmanager
    def due_fault() -> Iterator[None]:
        with contextlib.ExitStack() as changes:
            if fault.is_due(next(calls)):
                fault.strike()
                changes.enter_context(_faulty_engine(group, fault))
                changes.enter_context(_faulty_memory(group, fault))
            yield

    @contextlib.contextmanager
    def faulty_call(*args: Any, **kwargs: Any) -> Iterator[GroupCall]:
        with due_fault(), call(*args, **kwargs) as made:
            yield made

    def faulty_make_call(*args: Any, **kwargs: Any) -> Any:
        with due_fault():
            return make_call(*args, **kwargs)

    with replaced(group, call=faulty_call, make_call=faulty_make_call):
        yield fault.injected


def _faulty_engine(group: ProcessGroup, fault: Fault) -> contextlib.AbstractContextManager[None]:
    engine: Any = group._engine
    names = [name for name in ("exchange", "begin") if hasattr(engine, name)]

    def faulty(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(sends: Sequence[Message], *rest: Any) -> Any:
            if fault.drop:
                return method([], *rest)
            changed = [each._replace(memory=_changed(each.memory, fault)) for each in sends]
            return method(changed, *rest)

        return call

    return replaced(engine, **{name: faulty(getattr(engine, name)) for name in names})


@contextlib.contextmanager
def _faulty_memory(group: ProcessGroup, fault: Fault) -> Iterator[None]:
    shared = group._memory
    if shared is None or not (fault.drop or fault.corrupt):
        yield
    elif fault.drop:
        with replaced(shared.steps, post=shared.steps.withhold, come=shared.steps.withhold):
            yield
    else:

        def corrupt(shown: NDArray[Any]) -> None:
            shown.view(np.uint8)[:] = _changed(shown, fault)

        # Arrays in shared memory are the caller's own, so what others get of them goes through a window.
        with replaced(shared, on_shown=corrupt), replaced(shared.arrays, place_of=lambda _: NOWHERE):
            yield


def _changed(memory: NDArray[Any], fault: Fault) -> NDArray[np.uint8]:
    sent = memory.reshape(-1).view(np.uint8)
    if fault.corrupt is None:
        return sent
    return np.asarray(fault.corrupt(sent.copy()), np.uint8).reshape(sent.shape)

"""Random numbers of replicas that are the same in every run, whatever the threads do.

PyTorch has one generator for the host and one for each GPU; NumPy (`np.random`) and Python (`random`) have
one each. A generator has no notion of threads, so replicas that share one run in turn, in replica order. A
switch, where replicas begin, meet and end, exchanges the state of PyTorch's generators: each replica's stream
is seeded with the caller's state and the replica's number. States of NumPy's and Python's take too long to
exchange; in turn and in order, replicas draw the same numbers from them every time as well.

Replicas on different GPUs run at once, each with a stream of its GPU's generator; the host's generators,
which they share, are left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from crossdevice.strategies.running import loaded_libraries
from crossdevice.strategies.running.rendezvous import ReplicaStopped
from crossdevice.values.device import Device


class RandomStreams:
    """Random streams of one run, and the order in which replicas draw from each generator."""

    def __init__(self, devices: Sequence[Device], first_replica: int) -> None:
        members: dict[Hashable, list[int]] = {}
        for replica, device in enumerate(devices):
            members.setdefault("host" if device.is_host else device, []).append(replica)
        self._changed = threading.Condition()
        self._turns: list[_Turn] = [None] * len(devices)  # type: ignore[list-item]
        for replicas in members.values():
            generators = _generators_of(devices[replicas[0]], is_alone=len(members) == 1)
            turn = _Turn(generators, replicas, first_replica, self._changed)
            for replica in replicas:
                self._turns[replica] = turn

    @contextlib.contextmanager
    def turn_of(self, replica: int) -> Iterator[None]:
        """Waits for this replica's turn to run the block; if the block raises, no further turns are given."""
        turn = self._turns[replica]
        turn.take(replica)
        try:
            yield
        finally:
            turn.let_go(replica)
        turn.pass_on(replica, is_done=True)

    @contextlib.contextmanager
    def between_turns(self, replica: int) -> Iterator[None]:
        """Gives up the turn inside the block, in which this replica waits; not taken back if it raises."""
        self._turns[replica].let_go(replica)
        self._turns[replica].pass_on(replica, is_done=False)
        yield
        self._turns[replica].take(replica)

    def stop(self) -> None:
        """Ends all turns: waiting replicas are unwound."""
        for turn in self._turns:
            turn.stop()

    def close(self) -> None:
        """Restores the caller's generators; those that replicas drew from have advanced by one number."""
        for turn in dict.fromkeys(self._turns):
            turn.close()


class _Turn:
    """Generators that some replicas share, and the queue of these replicas: the first of it may draw."""

    def __init__(
        self,
        generators: Sequence[Any],
        replicas: Sequence[int],
        first_replica: int,
        changed: threading.Condition,
    ) -> None:
        self._generators = generators
        self._changed = changed
        self._queue = deque(replicas)
        self._callers = [generator.get_state() for generator in generators]
        self._streams = {
            replica: [_seeded(generator, first_replica + replica) for generator in generators]
            for replica in replicas
        }
        self._holder: int | None = None
        self._is_used = False
        self._is_stopped = False

    def take(self, replica: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._queue[0] == replica)
            if self._is_stopped:
                raise ReplicaStopped
            self._holder = replica
        self._callers = self._exchange(self._streams[replica])

    def let_go(self, replica: int) -> None:
        """Restores the caller's streams, if they were this replica's."""
        with self._changed:
            if self._holder == replica:
                before, now = self._streams[replica], self._exchange(self._callers)
                self._is_used |= any(not old.equal(new) for old, new in zip(before, now, strict=True))
                self._streams[replica] = now
                self._holder = None

    def pass_on(self, replica: int, *, is_done: bool) -> None:
        with self._changed:
            self._queue.remove(replica)
            if not is_done:
                self._queue.append(replica)
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_stopped = True
            if self._holder is not None:  # a replica that is left behind, and may draw on
                self._holder = None
                self._exchange(self._callers)
                self._is_used = True
            if self._is_used:
                for generator in self._generators:
                    _advance(generator)

    def _exchange(self, states: Sequence[Any]) -> list[Any]:
        """Sets the states of all generators; returns the previous ones."""
        before = [generator.get_state() for generator in self._generators]
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
        return before


def _generators_of(device: Device, *, is_alone: bool) -> list[Any]:
    """Returns PyTorch's generators for a device; the host's too if all replicas are on one device."""
    torch = loaded_libraries.loaded_torch()
    if torch is None:
        return []
    found = [torch.default_generator] if device.is_host or is_alone else []
    if device.type == "cuda":
        torch.cuda.init()
        found.append(torch.cuda.default_generators[device.index])
    return found


def _seeded(generator: Any, replica: int) -> Any:
    """Returns the state of a replica's stream, derived from a generator's state and the replica's number."""
    state = generator.get_state().numpy().tobytes()
    digest = hashlib.blake2b(state, digest_size=8, salt=replica.to_bytes(8, "little")).digest()
    own = loaded_libraries.loaded_torch().Generator(generator.device)
    return own.manual_seed(int.from_bytes(digest, "little")).get_state()


def _advance(generator: Any) -> None:
    loaded_libraries.loaded_torch().empty((), device=generator.device).uniform_(generator=generator)

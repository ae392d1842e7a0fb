"""The interface of an engine between processes: exchange of bytes, and a board for notes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from numpy.typing import NDArray


class Message(NamedTuple):
    """Memory sent to, or received from, another rank: a contiguous host array, seen as its bytes."""

    peer: int
    memory: NDArray[Any]


class RankLostError(ConnectionError):
    """The connection to one rank has ended."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank


class GaveUpError(Exception):
    """Another rank will not come, or another thread has closed the group."""


class Waited(Protocol):
    """Something a rank waits for in a call: a background call of the engine, or a step in shared memory."""

    def wait(self, seconds: float) -> bool:
        """Waits for at most a number of seconds; returns whether it has ended."""

    def result(self) -> Any:
        """Raises the error of the exchange, if any."""


@runtime_checkable
class Contact(Protocol):
    """Source of awaited and lost ranks: an engine, or shared memory."""

    @property
    def awaited_ranks(self) -> Collection[int]:
        """The ranks with messages that may still come; empty if unknown."""

    def check_contact(self, silent: Collection[int]) -> None:
        """Raises RankLostError if a rank that is waited for is gone, as far as can be told."""


Begin: TypeAlias = Callable[[Sequence[Message], Sequence[Message], int], Waited]
"""Acts as `Engine.exchange` without waiting; waiting for the returned object advances the messages.

An engine that is asked how its messages are may have one, called `begin`; it may be asked by any thread.
"""

Started: TypeAlias = Callable[[float], None]
"""A collective that blocks, to be called with a timeout.

It is made in the thread that wrote its arrays, and so on the streams of that thread.
"""


GoneRanks: TypeAlias = Callable[[], Collection[int]]
"""Returns the ranks with ended connections, once this rank gives up.

Engines that can tell have it, as `gone_ranks`.
"""


@runtime_checkable
class SaysFarewell(Protocol):
    """Notes over the connections of an engine, for engines with a board that can be lost."""

    farewell: str
    """Last note of this rank, which the others get before it hangs up."""

    def farewells(self) -> Mapping[int, str]:
        """Returns the notes of ranks that have hung up; one with an ended connection and no note is gone."""


class DeviceCollectives(Protocol):
    """Collectives of an engine on PyTorch's tensors where they are; all are contiguous."""

    def all_reduce_of(self, tensor: Any, op: str) -> Started:
        """Runs an all-reduce in place, with a ReduceOp's name other than MEAN."""

    def all_to_all_of(self, output: Any, tensor: Any) -> Started:
        """Gives each rank one of equal parts; the output has those of all ranks in order."""

    def all_gather_of(self, output: Any, tensor: Any) -> Started:
        """Puts the tensors of all ranks, which have one length, end to end."""


class Engine(Protocol):
    """Exchange of bytes between the ranks of a group. Calls block; each is from one thread at a time."""

    name: str
    """Name as users know it: "gloo", "Open MPI"."""

    rank: int
    size: int

    board_keeper: int | None
    """The rank with the board of notes in its process; None if there is none, or it is unknown."""

    largest_tag: int
    """Tags are whole numbers from 0 to this one, at least 32767."""

    device_collectives: Mapping[str, DeviceCollectives]
    """Collectives by type of device, for PyTorch's tensors that need not go through the host's memory."""

    @property
    def awaited_ranks(self) -> Collection[int]:
        """The ranks that `exchange` may still be waiting for; empty if unknown."""

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int, timeout_seconds: float
    ) -> None:
        """Sends and receives all at once, and returns when all memory may be used again.

        Between two ranks, messages of one tag arrive in order; messages of another tag are never taken for
        them. An engine may come back late, or never: the caller does not rely on `timeout_seconds`.
        Raises RankLostError if it knows of a rank with an ended connection.
        """

    def post(self, note: str) -> None:
        """Puts this rank's note on the board in place of its last one, whatever other ranks are doing."""

    def notes(self) -> Mapping[int, str]:
        """Returns the latest note of every rank that has put one up."""

    def check_contact(self, silent: Collection[int]) -> None:
        """Raises RankLostError if a silent rank that `exchange` waits for is gone, as far as can be told.

        Asked now and then by another thread while an exchange takes long; must not block. Other ranks are
        left alone: what one sends to a rank that has just left may destroy what is still on its way from it.
        """

    def abandon(self) -> None:
        """Gives up unfinished messages after an error; called from any thread, and must not block."""

    def close(self) -> None:
        """Releases the engine's resources; other ranks need not take part."""

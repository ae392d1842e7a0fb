"""The interface of an engine between processes: exchange of bytes, and a board for notes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from numpy.typing import NDArray


class Message(NamedTuple):
    """Memory that goes to, or comes from, another rank: a contiguous host array, seen as its bytes."""

    peer: int
    memory: NDArray[Any]


class RankLostError(ConnectionError):
    """The connection to one rank has ended."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank


class GaveUpError(Exception):
    """Another rank has said that it will not come, or another thread has closed the group."""


class Waited(Protocol):
    """Something a rank waits for in a call: a background call of the engine, or a step in shared memory."""

    def wait(self, seconds: float) -> bool:
        """Waits for at most a number of seconds; returns whether it has ended."""

    def result(self) -> Any:
        """Raises what went wrong, if anything has."""


@runtime_checkable
class Contact(Protocol):
    """Source of who is waited for and who is gone: an engine, or shared memory."""

    @property
    def awaited_ranks(self) -> Collection[int]:
        """From whom something may still have to come; nobody if that cannot be told."""

    def check_contact(self, silent: Collection[int]) -> None:
        """Raises RankLostError if a rank that is waited for is gone, as far as can be told."""


Begin: TypeAlias = Callable[[Sequence[Message], Sequence[Message], int], Waited]
"""As `Engine.exchange`, but does not wait: whoever waits for what it returns makes the messages go on.

An engine that is asked how its messages are may have one, called `begin`; it may be asked by any thread.
"""

Started: TypeAlias = Callable[[float], None]
"""A collective that blocks, to be called with a timeout.

It is made in the thread, and so on the streams, of whoever wrote its arrays.
"""


GoneRanks: TypeAlias = Callable[[], Collection[int]]
"""The ranks whose connections have ended. An engine that knows has it, called `gone_ranks`."""


class DeviceCollectives(Protocol):
    """Collectives of an engine on PyTorch's tensors where they are; all are contiguous."""

    def all_reduce_of(self, tensor: Any, op: str) -> Started:
        """An all-reduce in place, with a ReduceOp's name but not MEAN."""

    def all_to_all_of(self, output: Any, tensor: Any) -> Started:
        """Gives each rank one of equal parts; the output has those of all ranks in order."""

    def all_gather_of(self, output: Any, tensor: Any) -> Started:
        """Puts the tensors of all ranks, which have one length, end to end."""


class Engine(Protocol):
    """Exchange of bytes between the ranks of a group. Calls block; each is from one thread at a time."""

    name: str
    """As users know it: "gloo", "Open MPI"."""

    rank: int
    size: int

    board_keeper: int | None
    """The rank in whose process the board of notes is; None if it is in none, or that is not known."""

    largest_tag: int
    """Tags are whole numbers from 0 to this one, at least 32767."""

    device_collectives: Mapping[str, DeviceCollectives]
    """By type of device, for PyTorch's tensors that need not go through the host's memory."""

    @property
    def awaited_ranks(self) -> Collection[int]:
        """From whom `exchange` may still be waiting for something; nobody if that cannot be told."""

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int, timeout_seconds: float
    ) -> None:
        """Sends and receives all at once, and returns when all memory may be used again.

        Between two ranks, messages of one tag arrive in order; messages of another tag are never taken for
        them. An engine may come back late, or never: the caller does not rely on `timeout_seconds`.
        Raises RankLostError if it knows whose connection has ended.
        """

    def post(self, note: str) -> None:
        """Puts this rank's note on the board in place of its last one, whatever other ranks are doing."""

    def notes(self) -> Mapping[int, str]:
        """The latest note of every rank that has put one up."""

    def check_contact(self, silent: Collection[int]) -> None:
        """Raises RankLostError if a silent rank that `exchange` waits for is gone, as far as can be told.

        Asked now and then by another thread while an exchange takes long; must not block. Other ranks are
        left alone: what one sends to a rank that has just left may destroy what is still on its way from it.
        """

    def abandon(self) -> None:
        """Told when an error has left something on its way; called from any thread, and must not block."""

    def close(self) -> None:
        """Gives up what belongs to the engine; other ranks need not take part."""

"""Rendezvous of ranks in a store of torch.distributed, with reasons if some are missing."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from crossdevice.errors import DeadlineError, OptionError, ProcessGroupError
from crossdevice.process_groups.background import TimedCalls
from crossdevice.process_groups.engines.torch_store import is_loopback, reason_of
from crossdevice.process_groups.notes.introduction import own_name
from crossdevice.values.disagreement import numbered

Answer = TypeVar("Answer")

logger = logging.getLogger("crossdevice")

SILENT_SECONDS = 10.0
"""Wait for ranks before that is said."""

ANSWER_SECONDS = 1.0
"""Minimum time for an answer of a store, even just before the deadline."""

WITHDRAWAL_SECONDS = 2.0
"""Time that a rank has after its deadline to report it."""

TELLING_SECONDS = 5.0
"""Time that the process that keeps the store stays after a refusal, for the others to read the reason."""

DOUBLE_SECONDS = 5.0
"""Time that a second rank 0 gives the first one to answer."""

MAX_COMERS = 256
"""Number of the last that came to a store that are read."""

COMPARING_SECONDS = 2.0
"""Time after which the ranks of a launch look for others waiting with another group size."""

SMALLEST_PAUSE_SECONDS, LARGEST_PAUSE_SECONDS = 0.001, 0.25


class Meeting:
    """The ranks that form one group: each comes, waits for the others, and learns their addresses.

    The n-th meeting of a rank is with the n-th of the others. A rank that waited in vain comes to the same
    one again when it tries again.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        name: str,
        deadline: TimedCalls,
        *,
        is_of_launch: bool = False,
        keeps_store: bool = False,
    ) -> None:
        """`is_of_launch` says that all processes of a launch come, so those of another size are wrong.

        `keeps_store` says that the store ends with this process.
        """
        self._whole = store
        self._rank = rank
        self._size = size
        self._deadline = deadline
        self._is_of_launch = is_of_launch
        self._keeps_store = keeps_store
        self._name = f"crossdevice/{name}"
        self._turns = f"{self._name}/{size}/turns of {rank}"
        self._told = f"{self._name}/told"
        self._told_before = 0
        self._turn = 0
        self._comer = 0
        self.store = store
        """Store that this group alone writes to, once `hold` has returned."""

    def hold(self, own_address: str | None) -> str | None:
        """Waits for all ranks, and returns the own address by which they can be reached."""
        try:
            self._come(own_address or "")
            self._wait_for_all()
            addresses = self._ask(self._addresses)
        except (DeadlineError, KeyboardInterrupt):
            self._withdraw()
            raise
        except TimeoutError:
            raise DeadlineError(
                f"the group of {self._size} was not formed in {self._deadline.seconds:.3g} seconds: the "
                f"store in which rank {self._rank} waits does not answer. Is the process that keeps it, most "
                "often rank 0, stopped?"
            ) from None
        except RuntimeError as error:
            raise ProcessGroupError(
                f"the store in which rank {self._rank} waited for the others of a group of {self._size} is "
                "gone: has the process that keeps it, most often rank 0, ended? "
                f"(torch.distributed: {reason_of(error)})"
            ) from None
        # A host's own name often leads back to itself only (127.0.1.1), where others cannot follow.
        elsewhere = next((address for address in addresses if address and not is_loopback(address)), None)
        return way_to(elsewhere) if own_address and is_loopback(own_address) and elsewhere else own_address

    def check_double(self) -> None:
        """Refuses this rank if another process of the same number waits here, and tells all."""
        try:
            self._come(None)  # who has an address is taken for the one that others wait for
            while self._deadline.seconds_left() > 0:
                if why := self._ask(self._why_double):
                    self._refuse(why)
                time.sleep(SMALLEST_PAUSE_SECONDS)
        except (RuntimeError, TimeoutError):
            return
        self._withdraw()

    def _ask(self, function: Callable[[], Answer]) -> Answer:
        answer: Answer = self._deadline.make(function, ANSWER_SECONDS)
        return answer

    def _store_of(self, turn: int) -> dist.Store:
        return dist.PrefixStore(f"{self._name}/{self._size}/{turn}", self._whole)

    def _come(self, address: str | None) -> None:
        def come() -> None:
            self._turn = self._whole.add(self._turns, 1)
            self.store = self._store_of(self._turn)
            self._comer = self._whole.add(f"{self._name}/comers", 1)
            self._whole.set(
                f"{self._name}/comer {self._comer}", json.dumps([self._rank, self._size, own_name()])
            )
            self._told_before = self._whole.add(self._told, 0)
            for what, text in (("who", own_name()), ("gave up", ""), ("note", ""), ("address", address)):
                if text is not None:
                    self.store.set(f"{what} of {self._rank}", text)

        self._ask(come)

    def _addresses(self) -> list[str]:
        """Reads the addresses of all ranks, and takes this one off the list of those that wait."""
        found = everyones(self.store, "address", self._size)
        self._whole.set(f"{self._name}/comer {self._comer}", "")
        return found

    def _wait_for_all(self) -> None:
        pause, say_so = SMALLEST_PAUSE_SECONDS, time.monotonic() + SILENT_SECONDS
        compare = time.monotonic() + COMPARING_SECONDS
        while not self._have_all_come():
            if self._is_of_launch and time.monotonic() > compare:
                compare = time.monotonic() + SILENT_SECONDS
                self._check_size()
            if self._deadline.seconds_left() < 0:
                raise DeadlineError(self._ask_anew(self._not_formed))
            if time.monotonic() > say_so:
                say_so = time.monotonic() + self._deadline.seconds
                missing = self._ask(self._missing)
                more = self._ask(self._of_other_sizes)
                logger.warning(
                    "waiting for %s to form a group of %d%s", numbered("rank", missing), self._size, more
                )
            time.sleep(pause)
            pause = min(2 * pause, LARGEST_PAUSE_SECONDS)

    def _have_all_come(self) -> bool:
        """Returns True if all ranks are there; raises if a rank has refused this meeting, or is twice there.

        One request asks for everything: each wakes a thread.
        """

        def look() -> tuple[bool, str]:
            # First: the keys of those that have left after a refusal would be taken for them.
            if self.store.check(["refused"]):
                return False, str(self.store.get("refused").decode())
            have_come = self.store.check(keys("address", self._size))
            return have_come, "" if have_come else self._why_double()

        have_come, why = self._ask(look)
        if why:
            self._refuse(why)
        return have_come

    def _why_double(self) -> str:
        """Names another process that says it is this rank, if any; the first of the two tells the second."""
        key = f"double of {self._rank}"
        if self.store.check([key]):
            other = str(self.store.get(key).decode())
        else:
            latest = self._whole.add(self._turns, 0)
            theirs = self._store_of(latest)
            if latest <= self._turn or not theirs.check([f"who of {self._rank}"]):
                return ""
            other = str(theirs.get(f"who of {self._rank}").decode())
            if other == own_name():
                return ""  # which forms two groups at once
            theirs.set(key, own_name())
        return (
            f"two processes call themselves rank {self._rank} of {self._size}: {own_name()} "
            f"and {other}. Each process needs a rank of its own (RANK)"
        )

    def _check_size(self) -> None:
        """Refuses a launch with processes that disagree on their number, and tells the others."""
        for rank, size, who in self._ask(self._comers_of_other_sizes):
            why = (
                f"ranks disagree about how many they are (WORLD_SIZE): rank {rank} ({who}) says {size}, and "
                f"rank {self._rank} ({own_name()}) says {self._size}"
            )

            def tell(rank: int = rank, size: int = size, why: str = why) -> None:
                place = f"{self._name}/{size}"
                turn = self._whole.add(f"{place}/turns of {rank}", 0)
                dist.PrefixStore(f"{place}/{turn}", self._whole).set("refused", why)

            self._ask(tell)
            self._refuse(why)

    def _refuse(self, why: str) -> NoReturn:
        def tell() -> None:
            self.store.set("refused", why)
            self._whole.set(f"{self._name}/comer {self._comer}", "")
            self._whole.add(self._told, 1)

        def num_told() -> int:
            return int(self._whole.add(self._told, 0)) - self._told_before

        self._ask(tell)
        end = time.monotonic() + (TELLING_SECONDS if self._keeps_store else 0.0)
        while time.monotonic() < end and self._ask(num_told) < self._size:
            time.sleep(SMALLEST_PAUSE_SECONDS)
        raise OptionError(why)

    def _withdraw(self) -> None:
        """Withdraws this rank: its next try meets the others' first one."""

        def withdraw() -> None:
            self.store.set(f"gave up of {self._rank}", "its deadline passed")
            self._whole.set(f"{self._name}/comer {self._comer}", "")
            self.store.delete_key(f"address of {self._rank}")
            self._whole.add(self._turns, -1)

        with contextlib.suppress(RuntimeError, TimeoutError):  # not every store can forget
            self._ask_anew(withdraw)

    def _ask_anew(self, function: Callable[[], Any]) -> Any:
        """Asks the store again after the deadline."""
        return TimedCalls(WITHDRAWAL_SECONDS).make(function)

    def _not_formed(self) -> str:
        missing = self._missing()
        gave_up = [rank for rank in missing if self._has_given_up(rank)]
        absent = [rank for rank in missing if rank not in gave_up]
        came = [rank for rank in range(self._size) if rank not in absent]
        parts = [f"{numbered('rank', absent)} did not come"] if absent else []
        parts.append(f"{numbered('rank', came)} came")
        if gave_up:
            has = "has" if len(gave_up) == 1 else "have"
            parts.append(f"{numbered('rank', gave_up)} {has} given up")
        return (
            f"the group of {self._size} was not formed in {self._deadline.seconds:.3g} seconds: "
            f"{'; '.join(parts)}{self._of_other_sizes()}{self._of_earlier()}. Are all processes started, and "
            "do they agree on their number and on the address?"
        )

    def _missing(self) -> list[int]:
        """Lists ranks that have not come to form the group."""
        return [rank for rank, key in enumerate(keys("address", self._size)) if not self.store.check([key])]

    def _has_given_up(self, rank: int) -> bool:
        key = f"gave up of {rank}"
        return bool(self.store.check([key]) and self.store.get(key))

    def _of_other_sizes(self) -> str:
        """Lists processes waiting in the same store for a group of another size, perhaps for this one."""
        return "".join(
            f"; rank {rank} ({who}) waits for a group of {size}"
            for rank, size, who in self._comers_of_other_sizes()
        )

    def _comers_of_other_sizes(self) -> list[tuple[int, int, str]]:
        found = []
        last = self._whole.add(f"{self._name}/comers", 0)
        for number in range(max(1, last - MAX_COMERS + 1), last + 1):
            key = f"{self._name}/comer {number}"
            text = self._whole.get(key) if self._whole.check([key]) else b""
            rank, size, who = json.loads(text) if text else (0, self._size, "")
            if size != self._size:
                found.append((rank, size, who))
        return found

    def _of_earlier(self) -> str:
        """Names another process that has been this rank before, and may still be."""
        key, earlier = f"who of {self._rank}", self._store_of(self._turn - 1)
        who = earlier.get(key).decode() if self._turn > 1 and earlier.check([key]) else own_name()
        return "" if who == own_name() else f"; another process, {who}, has been rank {self._rank} before"


def everyones(store: dist.Store, what: str, size: int) -> list[str]:
    """Reads the values of all ranks from a store, in one request where the store supports it."""
    names = keys(what, size)
    found = store.multi_get(names) if store.has_extended_api() else [store.get(name) for name in names]
    return [text.decode() for text in found]


def keys(what: str, size: int) -> list[str]:
    """Returns the keys of all ranks."""
    return [f"{what} of {rank}" for rank in range(size)]


def way_to(address: str | None) -> str | None:
    """Returns the own address that packets to another one leave from; sends nothing."""
    if address is None:
        return None
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as unsent:
            unsent.connect(target)
            return str(unsent.getsockname()[0])
    except OSError:
        return None

"""Putting up notes and reading those of others, in a thread that nobody waits for longer than a little."""

from __future__ import annotations

import math
import time

from crossdevice.process_groups.background import BackgroundCall, BackgroundThread
from crossdevice.process_groups.board import Note
from crossdevice.process_groups.protocol import Engine
from crossdevice.process_groups.signing import Signer
from crossdevice.process_groups.watch import GRACE_SECONDS, PATIENCE_SECONDS


class Noting:
    """The board of one group, as one rank reaches it through its engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = BackgroundThread(f"crossdevice notes of rank {engine.rank}")
        self._exchanged: BackgroundCall | None = None
        self.signer = Signer()
        self.due = time.monotonic() if getattr(engine, "sends_notes", False) else math.inf
        """When notes are read that nobody asks for: on engines that send them they pile up otherwise."""

    def exchange_notes(self, note: Note) -> dict[int, Note] | None:
        """Puts up this rank's note and reads all; None if the board cannot be reached."""

        def exchange() -> dict[int, str]:
            self._engine.post(self.signer.signed(note.written(), self._engine.rank))
            return dict(self._engine.notes())

        # The last exchange may not be done yet.
        exchanged = self._exchanged = self._exchanged or self._thread.submit(exchange)
        if not exchanged.wait(GRACE_SECONDS):
            return None
        self._exchanged = None
        try:
            found = {rank: self.signer.verified(text, rank) for rank, text in exchanged.result().items()}
            return {rank: Note.read(text) for rank, text in found.items() if text is not None}
        except Exception:  # the engine's own: the rank that keeps the board may be the one that is gone
            return None

    def leave(self, note: Note) -> None:
        """Puts up the last note of this rank."""
        text = self.signer.signed(note.written(), self._engine.rank)
        self._thread.submit(lambda: self._engine.post(text)).wait(GRACE_SECONDS)

    def read_unasked(self) -> None:
        """Has notes read, and says when the next ones are due: a rank puts up a few in a second."""
        self._thread.submit(self._engine.notes)
        self.due = time.monotonic() + PATIENCE_SECONDS

    def stop(self) -> None:
        """No more notes."""
        self._thread.stop()

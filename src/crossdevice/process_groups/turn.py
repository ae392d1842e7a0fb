"""A rank's place in the order of calls, taken even if its call is refused before ranks meet."""

from __future__ import annotations

import threading


class Turn(threading.local):
    """Whether the thread's call has begun; outside of what leads to one there is nothing to refuse."""

    has_begun = True

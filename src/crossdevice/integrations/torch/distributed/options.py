"""Settings of a group on the backend, by `pg_options` or by environment."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

from torch._C._distributed_c10d import Backend

from crossdevice import runtime
from crossdevice.errors import OptionError
from crossdevice.values.options import CommunicationOptions, Precision


class BackendOptions(Backend.Options):
    """Options of one group, for `init_process_group(..., pg_options=...)` and `new_group`.

    Args:
        precision: `"accurate"` adds in a wider type in the order of ranks and rounds once, `"exact"` rounds
            the true sum, so the order of ranks does not matter, `"fast"` adds in the tensors' own dtype.
            None: as CROSSDEVICE_PRECISION says, else `"accurate"`.
        timeout: the deadline of each collective; None: CROSSDEVICE_TIMEOUT_SECONDS, else the group's own.

    Raises:
        OptionError: the precision is unknown.

    >>> BackendOptions(precision="exact").precision
    'exact'
    """

    def __init__(self, precision: Precision | None = None, timeout: timedelta | None = None) -> None:
        super().__init__("crossdevice")
        chosen = runtime.PRECISION.read() if precision is None else precision
        self.communication = CommunicationOptions(precision=cast("Precision", chosen))
        self.deadline = _deadline_from_env() if timeout is None else timeout

    @property
    def precision(self) -> Precision:
        """The precision of sums, as given or from the environment."""
        return self.communication.precision


def read_options(given: Any) -> BackendOptions:
    """Returns the options, or those of the environment for None and for other backends' options."""
    return given if isinstance(given, BackendOptions) else BackendOptions()


def _deadline_from_env() -> timedelta | None:
    text = runtime.TIMEOUT_SECONDS.read()
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise OptionError(
            f"{runtime.TIMEOUT_SECONDS.variable} must be a number of seconds greater than 0; got {text!r}"
        )
    return timedelta(seconds=seconds)

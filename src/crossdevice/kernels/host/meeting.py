"""The entry to a compiled step of processes that share memory."""

from __future__ import annotations

from collections.abc import Callable

from crossdevice.kernels.host.fused_pass import selected_kernels


def compiled_meeting() -> Callable[..., int] | None:
    """Returns the function described in `llvm/meeting.py`; None where nothing is compiled."""
    if selected_kernels() != "numba":
        return None
    from crossdevice.kernels.host.llvm import meeting

    return meeting.compiled_meeting()

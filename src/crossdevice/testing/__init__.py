"""Tools for tests of programs that use crossdevice: fault injection, and ranks as threads or processes."""

from crossdevice.testing.fault_injection import Injected, faults
from crossdevice.testing.ranks import run_ranks

__all__ = ["Injected", "faults", "run_ranks"]

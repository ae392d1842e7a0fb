"""`crossdevice bench`: collectives measured as nccl-tests does, alone or beside other libraries."""

from crossdevice.cli.bench.command import add_arguments, run

__all__ = ["add_arguments", "run"]

"""Tells PyTorch of the backend "crossdevice" at `import torch`; imports crossdevice when that is first used.

PyTorch calls `register` by the entry point group `torch.backends`. It is a module of its own, since to import
anything of the package would import all of it.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Registers the backend, once, if this PyTorch has torch.distributed."""
    from torch import distributed

    if distributed.is_available() and "crossdevice" not in distributed.Backend.backend_list:
        distributed.Backend.register_backend(
            "crossdevice", _create, extended_api=True, devices=["cpu", "cuda"]
        )


def _create(options: Any, pg_options: Any) -> Any:
    from crossdevice.integrations.torch.distributed.process_group import create

    return create(options, pg_options)

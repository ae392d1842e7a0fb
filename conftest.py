"""Triton, where it is, is loaded before anything loads TensorFlow: in the other order it ends the process."""

import contextlib

with contextlib.suppress(ImportError):
    import triton  # noqa: F401

"""What all tests share: the order in which libraries are loaded, and garbage collections that stay short."""

import contextlib
import gc

# Before anything loads TensorFlow: in the other order it ends the process.
with contextlib.suppress(ImportError):
    import triton  # noqa: F401


def pytest_collection_finish() -> None:
    """Keeps the millions of objects of libraries and collected tests out of garbage collections."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Lets them go: some libraries complain about what is left when Python ends."""
    gc.unfreeze()

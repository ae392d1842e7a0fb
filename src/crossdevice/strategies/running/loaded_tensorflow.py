"""What TensorFlow knows that strategies need, asked only if the program has imported it already."""

from __future__ import annotations

import sys
from typing import Any

from crossdevice.errors import ContextError


def refuse_tracing(name: str) -> None:
    """Raises where TensorFlow builds a graph: it traces in one thread at a time, so replicas never meet."""
    tensorflow: Any = sys.modules.get("tensorflow")
    if tensorflow is not None and not tensorflow.executing_eagerly():
        raise ContextError(
            f"{name} was called inside a tf.function, where replicas would wait for each other for ever; "
            "call it outside, or give crossdevice.integrations.tensorflow.as_tensorflow(ops) to "
            "tf.distribute.MirroredStrategy"
        )

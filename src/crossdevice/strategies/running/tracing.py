"""Detection of TensorFlow's and JAX's tracing, only if the program has imported them already."""

from __future__ import annotations

import sys
from typing import Any

from crossdevice.errors import ContextError


def refuse_tracing(name: str) -> None:
    """Raises in a function that is traced: that happens in one thread at a time, so replicas never meet."""
    if _is_building_graph():
        raise ContextError(
            f"{name} was called inside a tf.function, where replicas would wait for each other for ever; "
            "call it outside, or give crossdevice.integrations.tensorflow.as_tensorflow(ops) to "
            "tf.distribute.MirroredStrategy"
        )
    # JAX has no public name for this; without it, tracers are refused once replicas have met.
    is_clean = getattr(sys.modules.get("jax._src.core"), "trace_state_clean", None)
    if is_clean is not None and not is_clean():
        raise ContextError(
            f"{name} was called inside jit, grad or another transformation of JAX, where replicas would wait "
            "for each other for ever; call it outside, or use jax.lax.psum(value, axis_name) there"
        )


def refuse_graph(array: Any, name: str) -> None:
    """Raises if a variable's tensor is used in a `tf.function`, which would go on using it when it is old."""
    if type(array).__module__.startswith("tensorflow.") and _is_building_graph():
        raise ContextError(
            f"variable {name!r} was used inside a tf.function, which would keep its present value for ever; "
            "give its value() to the function as an argument"
        )


def _is_building_graph() -> bool:
    is_eager = getattr(sys.modules.get("tensorflow"), "executing_eagerly", None)
    return is_eager is not None and not is_eager()

"""Variables: every synchronization, aggregation and write, in both contexts."""

from __future__ import annotations

import functools
import itertools
from typing import Any

SYNCHRONIZATIONS = ("AUTO", "ON_WRITE", "ON_READ")
AGGREGATIONS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
WRITES = ("assign", "assign_add", "assign_sub")
NUMBERS = {"integers": [3, 4], "floats": [1.5, 2.5], "complex": [1 + 2j, 0]}
WRONG_SHAPES = {"shorter": [1.0], "number": 1.0, "more axes": [[1.0, 2.0]]}


def two_replicas(d: Any) -> Any:
    return d.MirroredStrategy(["/cpu:0", "/cpu:1"])


def own_number(d: Any) -> int:
    return int(d.get_replica_context().replica_id_in_sync_group)


def made(d: Any, strategy: Any, value: Any, synchronization: str, aggregation: str, **more: Any) -> Any:
    with strategy.scope():
        return d.Variable(
            value,
            synchronization=d.VariableSynchronization[synchronization],
            aggregation=d.VariableAggregation[aggregation],
            **more,
        )


def write(synchronization: str, aggregation: str, method: str, place: str, d: Any) -> Any:
    strategy = two_replicas(d)
    initial = 10.0 if place == "number" else d.array([10.0, 20.0])
    variable = made(d, strategy, initial, synchronization, aggregation)
    if place == "cross":
        result = getattr(variable, method)(d.array([1.0, 2.0]))
    elif place == "replica":
        result = strategy.run(lambda: getattr(variable, method)(d.array([1.0 + own_number(d), 2.0])))
    else:
        result = strategy.run(lambda: getattr(variable, method)(3.0))
    return strategy.experimental_local_results(result), variable.values


def read(synchronization: str, aggregation: str, d: Any) -> Any:
    strategy = two_replicas(d)
    variable = made(d, strategy, d.array([10.0, 20.0]), synchronization, aggregation)
    strategy.run(lambda: variable.assign_add(d.array([1.0 + own_number(d), 2.0])))
    return variable.read_value(), variable + 1.0


def dtype_of_write(dtype: str, value: Any, d: Any) -> Any:
    strategy = two_replicas(d)
    return made(d, strategy, d.array([1, 2], dtype), "AUTO", "NONE").assign(value)


def integer_mean(synchronization: str, d: Any) -> Any:
    return made(d, two_replicas(d), 1, synchronization, "MEAN")


def properties(synchronization: str, d: Any) -> Any:
    variable = made(d, two_replicas(d), d.array([1.0]), synchronization, "SUM", name="w")
    return variable.trainable, variable.aggregation.name, variable.synchronization.name, list(variable.shape)


def made_in_replicas(d: Any) -> Any:
    strategy, kept = two_replicas(d), []

    def step() -> None:
        variable = d.Variable(1.0 + own_number(d), aggregation=d.VariableAggregation.SUM)
        kept.append(variable.assign_add(d.array(own_number(d) + 10.0)))

    with strategy.scope():
        strategy.run(step)
    return kept


def arguments(d: Any) -> Any:
    variable = d.Variable(initial_value=[1, 2], trainable=False, dtype="float64", shape=(2,), name="x")
    return variable, variable.trainable


def of_a_function(d: Any) -> Any:
    return d.Variable(lambda: d.array([1.0]))


def arithmetic(d: Any) -> Any:
    v = d.Variable(d.array([1.0, 4.0]))
    return [v + 1.0, 1.0 - v, v * v, v / 2.0, v**2.0, -v, abs(v), v < 2.0, v >= 4.0, v[1], v[:1], v // 3.0]


def update(group: bool, d: Any) -> Any:
    strategy = two_replicas(d)
    variable = made(d, strategy, d.array([1.0, 2.0]), "AUTO", "NONE")
    result = strategy.extended.update(
        variable, lambda v, g: v.assign(v * 0.5 + g), args=(d.array([1.0, 1.0]),), group=group
    )
    return result if not group else None, variable.values


def scope_kind(d: Any) -> Any:
    strategy = two_replicas(d)
    with strategy.scope():
        variable = d.Variable(1.0)
    outside = d.Variable(1.0)
    created = strategy.extended.variable_created_in_scope
    return variable, created(variable), created(outside)


def trainable_on_read(d: Any) -> Any:
    return made(d, two_replicas(d), 1.0, "ON_READ", "SUM", trainable=True)


def wrong_synchronization(d: Any) -> Any:
    with two_replicas(d).scope():
        return d.Variable(1.0, synchronization=d.VariableSynchronization.NONE)


def wrong_shape(method: str, value: Any, d: Any) -> Any:
    variable = made(d, two_replicas(d), d.array([1.0, 2.0]), "AUTO", "NONE")
    return getattr(variable, method)(value)


PROGRAMS = {
    **{
        "/".join(("write", *row)): functools.partial(write, *row)
        for row in itertools.product(SYNCHRONIZATIONS, AGGREGATIONS, WRITES, ("cross", "replica", "number"))
    },
    **{
        "/".join(("read", *row)): functools.partial(read, *row)
        for row in itertools.product(SYNCHRONIZATIONS, AGGREGATIONS)
    },
    **{
        f"dtype of a write/{dtype}/{kind}": functools.partial(dtype_of_write, dtype, value)
        for dtype, (kind, value) in itertools.product(("float32", "int32"), NUMBERS.items())
    },
    **{f"integer mean/{each}": functools.partial(integer_mean, each) for each in ("AUTO", "ON_READ")},
    **{f"properties/{each}": functools.partial(properties, each) for each in SYNCHRONIZATIONS},
    **{f"update/group {group}": functools.partial(update, group) for group in (True, False)},
    **{
        f"wrong shape/{method}/{kind}": functools.partial(wrong_shape, method, value)
        for method, (kind, value) in itertools.product(WRITES, WRONG_SHAPES.items())
    },
    "made in replicas": made_in_replicas,
    "arguments": arguments,
    "of a function": of_a_function,
    "arithmetic": arithmetic,
    "scope": scope_kind,
    "trainable on read": trainable_on_read,
    "wrong synchronization": wrong_synchronization,
}

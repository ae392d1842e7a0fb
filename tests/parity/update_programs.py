"""Programs around `extended.update`: what code sees inside of it, and what becomes of its results."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from parity.libraries import Program
from parity.variable_programs import AGGREGATIONS, made, own_number, two_replicas

STRATEGIES = ("mirrored", "one replica", "one device", "default")


def momentum(place: str, aggregation: str, replicas: int, d: Any) -> Any:
    """An optimizer, whose slot is a variable that the function of `update` captures."""
    strategy = d.MirroredStrategy([f"/cpu:{k}" for k in range(replicas)])
    variable = made(d, strategy, d.array([1.0, 1.0]), "AUTO", aggregation)
    slot = made(d, strategy, d.array([0.0, 0.0]), "AUTO", aggregation)

    def apply(v: Any, gradient: Any) -> Any:
        slot.assign(slot * 0.5 + gradient)
        v.assign_sub(slot * 0.25)
        return slot.read_value()

    gradient = d.array([1.0, 2.0])
    if place == "cross":
        results = [strategy.extended.update(variable, apply, args=(gradient,)) for _ in range(2)]
    else:

        def merge(strategy: Any, gradient: Any) -> Any:
            mean = strategy.extended.reduce_to("MEAN", gradient, variable)
            return strategy.extended.update(variable, apply, args=(mean,))

        def step() -> Any:
            context = d.get_replica_context()
            return context.merge_call(merge, args=(gradient * (own_number(d) + 1.0),))

        results = [strategy.run(step) for _ in range(2)]
    return results, variable.values, slot.values


def inside(synchronization: str, aggregation: str, what: str, d: Any) -> Any:
    strategy = two_replicas(d)
    variable = made(d, strategy, d.array([0.0, 0.0]), "AUTO", "NONE")
    other = made(d, strategy, d.array([4.0, 6.0]), synchronization, aggregation)
    if synchronization == "ON_READ":
        strategy.run(lambda: other.assign(d.array([1.0, 2.0]) * (own_number(d) + 1.0)))
    row = d.IndexedSlices(d.array([1.0]), d.array([1], "int64"), d.array([2], "int64"))
    call = {
        "read": lambda v: other.read_value(),
        "compute": lambda v: other * 2.0 + v,
        "assign": lambda v: other.assign(other + 1.0),
        "assign_add": lambda v: other.assign_add(d.array([1.0, 2.0])),
        "scatter_add": lambda v: other.scatter_add(row),
    }[what]
    return strategy.extended.update(variable, call, group=False), other.values


def values_inside(kind: str, d: Any) -> Any:
    strategy = two_replicas(d)
    variable = made(d, strategy, 1.0, "AUTO", "NONE")
    mirrored = d.mirrored([d.array([1.0]), d.array([2.0])])
    call = {
        "mirrored": lambda v: mirrored + 1.0,
        "a new variable": lambda v: d.Variable(d.array([3.0])),
        "run": lambda v: strategy.run(lambda: d.array([1.0]) * own_number(d)),
        "reduce": lambda v: strategy.reduce("SUM", d.per_replica(mirrored.values), axis=None),
        "update": lambda v: strategy.extended.update(variable, lambda w: w.assign_add(1.0)),
    }[kind]
    return strategy.extended.update(variable, call, group=False), variable.values


def strategy_of(kind: str, d: Any) -> Any:
    return {
        "mirrored": lambda: two_replicas(d),
        "one replica": lambda: d.MirroredStrategy(["/cpu:0"]),
        "one device": lambda: d.OneDeviceStrategy("/cpu:0"),
        "default": d.get_strategy,
    }[kind]()


def context_inside(call: str, kind: str, d: Any) -> Any:
    strategy = strategy_of(kind, d)
    seen: list[Any] = []

    def look(*_: Any) -> None:
        context = d.get_replica_context()
        seen.append(
            [context is None, d.in_cross_replica_context(), d.has_strategy(), d.get_strategy() is strategy]
        )

    with strategy.scope():
        variable = d.Variable(1.0)
    if call == "update":
        strategy.extended.update(variable, look)
    else:
        look()
        strategy.run(look)
    return seen


def results(structure: str, group: bool, kind: str, d: Any) -> Any:
    strategy = strategy_of(kind, d)
    with strategy.scope():
        variable = d.Variable(d.array([2.0]))
    call = {
        "array": lambda v: v + 1.0,
        "tuple": lambda v: (v + 1.0, v * 3.0),
        "dict": lambda v: {"a": v + 1.0, "b": [v * 3.0]},
        "mixed": lambda v: {"array": v + 1.0, "name": "same", "none": None},
        "assigned": lambda v: v.assign_add(d.array([1.0])),
    }[structure]
    if not group and structure == "mixed":
        call = lambda v: {"array": v + 1.0, "arrays": (v - 1.0,)}  # noqa: E731
    return strategy.extended.update(variable, call, group=group)


def alone(call: str, kind: str, d: Any) -> Any:
    """A PerReplica of one replica cannot make copies differ."""
    strategy = strategy_of(kind, d)
    with strategy.scope():
        variable = d.Variable(d.array([2.0]))
    own = d.per_replica([d.array([5.0])])
    if call == "update":
        return strategy.extended.update(variable, lambda v, x: v.assign(x), args=(own,))
    variable.assign(own)
    return variable.read_value()


PROGRAMS: dict[str, Program] = {
    **{
        f"momentum/{place}/{aggregation}/{replicas}": functools.partial(
            momentum, place, aggregation, replicas
        )
        for place, aggregation, replicas in itertools.product(("cross", "merge"), ("NONE", "MEAN"), (1, 2, 3))
    },
    **{
        "/".join(("inside", *row)): functools.partial(inside, *row)
        for row in itertools.product(
            ("AUTO", "ON_READ"), AGGREGATIONS, ("read", "compute", "assign", "assign_add", "scatter_add")
        )
    },
    **{
        f"values inside/{kind}": functools.partial(values_inside, kind)
        for kind in ("mirrored", "a new variable", "run", "reduce", "update")
    },
    **{
        f"context inside/{call}/{kind}": functools.partial(context_inside, call, kind)
        for call, kind in itertools.product(("update", "run"), STRATEGIES)
    },
    **{
        f"results/{structure}/group {group}/{kind}": functools.partial(results, structure, group, kind)
        for structure, group, kind in itertools.product(
            ("array", "tuple", "dict", "mixed", "assigned"), (True, False), STRATEGIES
        )
    },
    **{
        f"alone/{call}/one replica": functools.partial(alone, call, "one replica")
        for call in ("update", "assign")
    },
}

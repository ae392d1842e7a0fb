"""Variables: every synchronization, aggregation and write, in both contexts."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

SYNCHRONIZATIONS = ("AUTO", "ON_WRITE", "ON_READ")
AGGREGATIONS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
SCATTERS = ("add", "sub", "mul", "div", "min", "max", "update")
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


def update_to_a_structure(d: Any) -> Any:
    strategy = two_replicas(d)
    variable = made(d, strategy, d.array([2.0]), "AUTO", "NONE")
    return strategy.extended.update(variable, lambda v: {"a": v + 1.0, "b": [v * 2.0]}, group=False)


def scope_kind(d: Any) -> Any:
    strategy, other = two_replicas(d), two_replicas(d)
    with strategy.scope():
        variable = d.Variable(1.0)
    outside = d.Variable(1.0)
    results = [variable]
    for each in (strategy, other, d.get_strategy()):
        created = each.extended.variable_created_in_scope
        results.append([created(variable), created(variable.values[0]), created(outside)])
    return results


def is_a_variable(synchronization: str, d: Any) -> Any:
    variable = made(d, two_replicas(d), 1.0, synchronization, "SUM")
    values = (variable, type(variable), variable.values[0], variable.read_value(), 1.0)
    return [
        isinstance(each, d.Variable) or (isinstance(each, type) and issubclass(each, d.Variable))
        for each in values
    ]


def no_aggregation(d: Any) -> Any:
    with two_replicas(d).scope():
        variable = d.Variable(1.0, aggregation=None)
    return variable, variable.aggregation.name, d.Variable(1.0, aggregation=None).aggregation.name


def trainable_on_read(d: Any) -> Any:
    return made(d, two_replicas(d), 1.0, "ON_READ", "SUM", trainable=True)


def read_of_one_replica(aggregation: str, d: Any) -> Any:
    strategy = d.OneDeviceStrategy("/cpu:0")
    counter = made(d, strategy, 2.0, "ON_READ", aggregation)
    counter.assign_add(1.0)
    return counter.read_value(), counter + 1.0


def wrong_synchronization(d: Any) -> Any:
    with two_replicas(d).scope():
        return d.Variable(1.0, synchronization=d.VariableSynchronization.NONE)


def wrong_shape(method: str, value: Any, d: Any) -> Any:
    variable = made(d, two_replicas(d), d.array([1.0, 2.0]), "AUTO", "NONE")
    return getattr(variable, method)(value)


def settings_of_a_write(kind: str, method: str, read_value: bool, d: Any) -> Any:
    strategy, value = two_replicas(d), d.array([1.0, 2.0])
    variable = d.Variable(value) if kind == "plain" else made(d, strategy, value, kind, "SUM")
    are_none = []

    def write() -> None:
        delta = d.array([1.0, 2.0])
        written = getattr(variable, method)(delta, use_locking=True, name="x", read_value=read_value)
        are_none.append(written is None)

    if kind != "ON_READ":
        write()
    if kind != "plain":
        strategy.run(write)
    return are_none, variable


def keyword_of_a_write(kind: str, method: str, keyword: str, d: Any) -> Any:
    value = d.array([1.0, 2.0])
    variable = d.Variable(value) if kind == "plain" else made(d, two_replicas(d), value, "AUTO", "NONE")
    getattr(variable, method)(**{keyword: value})
    return variable


def rows(d: Any) -> Any:
    return d.IndexedSlices(
        d.array([[2.0], [4.0], [8.0]]), d.array([1, 0, 1], "int32"), d.array([3, 1], "int32")
    )


def scatter(kind: str, aggregation: str, method: str, place: str, d: Any) -> Any:
    strategy, value = two_replicas(d), d.array([[1.0], [3.0], [5.0]])
    variable = d.Variable(value) if kind == "plain" else made(d, strategy, value, kind, aggregation)

    def write() -> None:
        slices = rows(d)
        if method == "update":
            slices = d.IndexedSlices(slices.values[:2], slices.indices[:2], slices.dense_shape)
        getattr(variable, f"scatter_{method}")(slices, use_locking=False, name="x")

    strategy.run(write) if place == "replica" else write()
    return variable


def scatter_of_an_array(kind: str, d: Any) -> Any:
    value = d.array([[1.0], [3.0]])
    variable = d.Variable(value) if kind == "plain" else made(d, two_replicas(d), value, "AUTO", "NONE")
    return variable.scatter_add(value)


def sparse_write(kind: str, aggregation: str, method: str, d: Any) -> Any:
    value = d.array([[1.0], [3.0], [5.0]])
    variable = d.Variable(value) if kind == "plain" else made(d, two_replicas(d), value, kind, aggregation)
    getattr(variable, method)(rows(d))
    return variable


def sparse_write_without_a_shape(d: Any) -> Any:
    slices = d.IndexedSlices(d.array([[2.0]]), d.array([0], "int32"))
    return d.Variable(d.array([[1.0]])).assign(slices)


def scatter_by_numbers(indices: Any, d: Any) -> Any:
    variable = d.Variable(d.array([[1.0], [3.0]]))
    rows = d.array([5.0] if indices == 1 else [[5.0]])
    variable.scatter_add(d.IndexedSlices(rows, indices))
    return variable


def copied(synchronization: str, where: str, d: Any) -> Any:
    strategy, other = two_replicas(d), two_replicas(d)
    variable = made(d, strategy, d.array([1.0, 2.0]), synchronization, "SUM")
    if where == "outside":
        twin = copy.deepcopy(variable)
    else:
        with (strategy if where == "scope" else other).scope():
            twin = copy.deepcopy(variable)
    twin.assign(d.array([6.0, 8.0]))
    return variable, twin, twin.aggregation.name


def update_of_a_copy_each(synchronization: str, d: Any) -> Any:
    strategy = two_replicas(d)
    variable = made(d, strategy, d.array([1.0]), synchronization, "SUM")
    own = d.per_replica([d.array([5.0]), d.array([7.0])])
    strategy.extended.update(variable, lambda v, x: v.assign(x), args=(own,))
    return variable.values


def update_in_replicas(synchronization: str, d: Any) -> Any:
    strategy = two_replicas(d)
    variable = made(d, strategy, d.array([1.0]), synchronization, "SUM")

    def step() -> None:
        own = d.array([5.0 + own_number(d)])
        strategy.extended.update(variable, lambda v, x: v.assign_add(x), args=(own,))

    strategy.run(step)
    return variable.values


def own_names(d: Any) -> Any:
    def step() -> None:
        made_here.append(d.Variable(1.0 + own_number(d), name=f"foo_{own_number(d)}"))

    made_here: list[Any] = []
    two_replicas(d).run(step)
    return made_here, [variable.name.partition(":")[0] for variable in made_here[0].values]


def device_and_reference(d: Any) -> Any:
    strategy = two_replicas(d)
    variable, other = (made(d, strategy, d.array([1.0]), "AUTO", "NONE") for _ in range(2))
    plain = d.Variable(1.0)
    inside = strategy.run(lambda: d.full_name(variable.device))
    known = {variable.ref(): 1, plain.ref(): 2, other.ref(): 3}
    return (
        [d.full_name(each.device) for each in (variable, *variable.values, plain)],
        strategy.experimental_local_results(inside),
        [known[each.ref()] for each in (variable, plain, other)],
        variable.ref() == variable.ref(),
        variable.ref() == other.ref(),
        variable.ref().deref() is variable,
    )


def read_var(synchronization: str, d: Any) -> Any:
    strategy = two_replicas(d)
    variable = made(d, strategy, d.array([2.0]), synchronization, "SUM")
    return strategy.extended.read_var(variable)


def shape_of_slices(d: Any) -> Any:
    without = d.IndexedSlices(d.array([[2.0]]), d.array([1], "int32"))
    return list(rows(d).shape), getattr(without.shape, "rank", None)


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
    **{
        f"settings/{kind}/{method}/{read}": functools.partial(settings_of_a_write, kind, method, read)
        for kind, method, read in itertools.product(("plain", "AUTO", "ON_READ"), WRITES, (True, False))
    },
    **{
        f"keyword/{kind}/{method}/{keyword}": functools.partial(keyword_of_a_write, kind, method, keyword)
        for kind, method, keyword in itertools.product(("plain", "mirrored"), WRITES, ("value", "delta"))
    },
    **{
        f"scatter/plain/{method}": functools.partial(scatter, "plain", "NONE", method, "cross")
        for method in SCATTERS
    },
    **{
        f"scatter/{place}/{aggregation}/{method}": functools.partial(
            scatter, "AUTO", aggregation, method, place
        )
        for place, aggregation, method in itertools.product(("cross", "replica"), AGGREGATIONS, SCATTERS)
    },
    **{
        f"sparse write/{kind}/{method}": functools.partial(sparse_write, kind, aggregation, method)
        for (kind, aggregation), method in itertools.product(
            (("plain", "NONE"), ("AUTO", "NONE"), ("AUTO", "SUM"), ("ON_READ", "MEAN")), WRITES
        )
    },
    "sparse write without a shape": sparse_write_without_a_shape,
    **{f"scatter/by {each}": functools.partial(scatter_by_numbers, each) for each in (1, [1])},
    "scatter/on read": functools.partial(scatter, "ON_READ", "SUM", "add", "replica"),
    **{
        f"scatter/an array/{kind}": functools.partial(scatter_of_an_array, kind) for kind in ("plain", "AUTO")
    },
    **{
        f"copied/{synchronization}/{where}": functools.partial(copied, synchronization, where)
        for synchronization, where in itertools.product(("AUTO", "ON_READ"), ("outside", "scope", "another"))
    },
    **{
        f"update of a copy each/{each}": functools.partial(update_of_a_copy_each, each)
        for each in ("AUTO", "ON_READ")
    },
    **{
        f"update in replicas/{each}": functools.partial(update_in_replicas, each)
        for each in ("AUTO", "ON_READ")
    },
    "own names": own_names,
    "device and reference": device_and_reference,
    **{f"read_var/{each}": functools.partial(read_var, each) for each in SYNCHRONIZATIONS},
    "shape of slices": shape_of_slices,
    "made in replicas": made_in_replicas,
    "arguments": arguments,
    "of a function": of_a_function,
    "arithmetic": arithmetic,
    "update/to a structure": update_to_a_structure,
    "scope": scope_kind,
    **{f"is a variable/{each}": functools.partial(is_a_variable, each) for each in ("AUTO", "ON_READ")},
    "no aggregation": no_aggregation,
    "trainable on read": trainable_on_read,
    "wrong synchronization": wrong_synchronization,
    **{f"read of one replica/{each}": functools.partial(read_of_one_replica, each) for each in AGGREGATIONS},
}

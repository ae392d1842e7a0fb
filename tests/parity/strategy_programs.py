"""Strategies: running, meeting, reducing, gathering, datasets, and asking where one is."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from parity.variable_programs import own_number, two_replicas


def run(d: Any) -> Any:
    return two_replicas(d).run(lambda x: x * (own_number(d) + 1.0), args=(d.array([1.0, 2.0]),))


def run_of_components(d: Any) -> Any:
    value = d.per_replica([d.array([1.0]), d.array([2.0])])
    return two_replicas(d).run(lambda x, y: {"twice": x * 2.0, "y": y}, args=(value,), kwargs={"y": None})


def one_result(result: Any, d: Any) -> Any:
    return two_replicas(d).run(lambda: result)


def one_tensor(d: Any) -> Any:
    constant = d.array([2.0])
    return two_replicas(d).run(lambda: constant)


def one_replica(d: Any) -> Any:
    return d.MirroredStrategy(["/cpu:0"]).run(lambda: d.array([2.0]))


def wrong_arguments(d: Any) -> Any:
    return two_replicas(d).run(lambda x: x, args=3)


def nested_run(d: Any) -> Any:
    strategy = two_replicas(d)
    return strategy.run(lambda: strategy.run(lambda: 1))


def failing_replica(error: type[Exception], d: Any) -> Any:
    def step() -> None:
        if own_number(d):
            raise error("on purpose")

    return two_replicas(d).run(step)


def all_reduce(op: Any, structure: str, d: Any) -> Any:
    def step() -> Any:
        own = d.array([1.0 + own_number(d)])
        value = {"array": own, "list": [own, own * 2.0], "dict": {"a": own}}[structure]
        return d.get_replica_context().all_reduce(op, value)

    return two_replicas(d).run(step)


def all_reduce_of_a_constant(d: Any) -> Any:
    constant = d.array([2.0])
    return two_replicas(d).run(lambda: d.get_replica_context().all_reduce("SUM", constant))


def all_reduce_outside(d: Any) -> Any:
    context = d.get_replica_context()
    return [context.all_reduce("SUM", d.array([2.0])), context.num_replicas_in_sync]


def all_gather(axis: int, d: Any) -> Any:
    def step() -> Any:
        return d.get_replica_context().all_gather(d.array([[1.0 + own_number(d), 5.0]]), axis)

    return two_replicas(d).run(step)


def merge_call(d: Any) -> Any:
    def merge(strategy: Any, x: Any, name: str) -> Any:
        return strategy.reduce("SUM", x, axis=None) * float(name)

    def step() -> Any:
        own = d.array([1.0 + own_number(d)])
        return own + d.get_replica_context().merge_call(merge, args=(own,), kwargs={"name": "2.0"})

    return two_replicas(d).run(step)


def number_in_a_merge_call(d: Any) -> Any:
    kinds: list[str] = []
    two_replicas(d).run(
        lambda: d.get_replica_context().merge_call(
            lambda strategy, x: kinds.append(type(x).__name__), args=(2.0,)
        )
    )
    return kinds


def uneven_calls(d: Any) -> Any:
    def step() -> None:
        if own_number(d):
            d.get_replica_context().merge_call(lambda strategy: None)

    return two_replicas(d).run(step)


def reduce(op: str, axis: Any, d: Any) -> Any:
    value = d.per_replica([d.array([[1.0, 2.0]]), d.array([[3.0, 5.0]])])
    return two_replicas(d).reduce(op, value, axis=axis)


def reduce_uneven(op: str, d: Any) -> Any:
    value = d.per_replica([d.array([1.0]), d.array([2.0, 6.0])])
    return two_replicas(d).reduce(op, value, axis=0)


def gather(second: list[float], axis: int, d: Any) -> Any:
    return two_replicas(d).gather(d.per_replica([d.array([1.0]), d.array(second)]), axis=axis)


def gather_plain(d: Any) -> Any:
    return two_replicas(d).gather(d.array([1.0]), axis=0)


def reduce_to(op: Any, kind: str, where: Any, d: Any) -> Any:
    value = {
        "per replica": lambda: d.per_replica([d.array([1.0]), d.array([3.0])]),
        "mirrored": lambda: d.mirrored([d.array([1.0]), d.array([1.0])]),
        "array": lambda: d.array([1.0]),
        "structure": lambda: {"a": d.per_replica([d.array([1.0]), d.array([3.0])]), "b": None},
    }[kind]()
    return two_replicas(d).extended.reduce_to(op, value, where)


def batch_reduce_to(d: Any) -> Any:
    value = d.per_replica([d.array([1.0]), d.array([3.0])])
    return two_replicas(d).extended.batch_reduce_to("SUM", [(value, value), (value, value)])


def broadcast_to(value: Any, where: Any, d: Any) -> Any:
    tensor = d.array([1.0]) if value == "array" else value
    return two_replicas(d).extended.broadcast_to(tensor, d.placed(0, 1) if where == "both" else where)


def update_of_a_plain_variable(d: Any) -> Any:
    return two_replicas(d).extended.update(d.Variable(1.0), lambda v: v.assign(2.0))


def where_am_i(d: Any) -> Any:
    strategy = two_replicas(d)

    def answers() -> list[Any]:
        return [
            d.has_strategy(),
            d.in_cross_replica_context(),
            d.get_replica_context() is None,
            d.get_strategy() is strategy,
        ]

    with strategy.scope():
        inside = answers()
    seen = []
    strategy.run(lambda: seen.append(answers()))
    merged = []
    strategy.run(lambda: d.get_replica_context().merge_call(lambda _: merged.append(answers())))
    return answers(), inside, seen, merged


def counts(d: Any) -> Any:
    strategy = two_replicas(d)
    numbers: list[int] = []
    strategy.run(lambda: numbers.append(int(d.get_replica_context().num_replicas_in_sync)))
    return strategy.num_replicas_in_sync, numbers, len(strategy.extended.worker_devices)


def nested_scopes(same: bool, d: Any) -> Any:
    strategy = two_replicas(d)
    other = strategy if same else two_replicas(d)
    with strategy.scope(), other.scope():
        return d.has_strategy()


def set_strategy(d: Any) -> Any:
    strategy = two_replicas(d)
    d.experimental_set_strategy(strategy)
    inside = d.get_strategy() is strategy
    d.experimental_set_strategy(None)
    return inside, d.has_strategy()


def set_strategy_in_a_scope(d: Any) -> Any:
    strategy = two_replicas(d)
    with strategy.scope():
        d.experimental_set_strategy(strategy)


def dataset(number: int, size: int, replicas: int, d: Any) -> Any:
    strategy = d.MirroredStrategy([f"/cpu:{k}" for k in range(replicas)])
    rows = d.dataset(d.array([float(k) for k in range(number)]), size)
    return [
        strategy.experimental_local_results(batch) for batch in strategy.experimental_distribute_dataset(rows)
    ]


def dataset_from_a_function(d: Any) -> Any:
    def make(context: Any) -> Any:
        size = context.get_per_replica_batch_size(4)
        return d.dataset(d.array([float(k) for k in range(8)]), size)

    strategy = two_replicas(d)
    batches = strategy.distribute_datasets_from_function(make)
    return [strategy.experimental_local_results(batch) for batch in batches]


def uneven_share(d: Any) -> Any:
    def make(context: Any) -> Any:
        return d.dataset(d.array([1.0]), context.get_per_replica_batch_size(3))

    return list(two_replicas(d).distribute_datasets_from_function(make))


def values_from_a_function(d: Any) -> Any:
    return two_replicas(d).experimental_distribute_values_from_function(
        lambda context: d.array(
            [float(context.replica_id_in_sync_group), float(context.num_replicas_in_sync)]
        )
    )


def local_results(kind: str, d: Any) -> Any:
    value = {
        "per replica": d.per_replica([d.array([1.0]), d.array([2.0])]),
        "plain": 3.0,
        "names": {"a": ["x", ("y", "z")], "b": None},
        "nothing": [],
    }[kind]
    return two_replicas(d).experimental_local_results(value)


def inside_another(call: str, d: Any) -> Any:
    strategy, value = two_replicas(d), d.per_replica([d.array([1.0]), d.array([2.0])])
    with strategy.scope():
        variable = d.Variable(1.0)
    with two_replicas(d).scope():
        return {
            "reduce": lambda: strategy.reduce("SUM", value, axis=None),
            "gather": lambda: strategy.gather(value, axis=0),
            "reduce_to": lambda: strategy.extended.reduce_to("SUM", value, "/cpu:0"),
            "batch_reduce_to": lambda: strategy.extended.batch_reduce_to("SUM", [(value, "/cpu:0")]),
            "broadcast_to": lambda: strategy.extended.broadcast_to(d.array([1.0]), "/cpu:0"),
            "update": lambda: strategy.extended.update(variable, lambda v: v.assign(2.0)),
        }[call]()


def update_of_a_lone_copy(structure: str, d: Any) -> Any:
    strategy = d.OneDeviceStrategy("/cpu:0")
    with strategy.scope():
        variable = d.Variable(d.array([2.0]))
    compute = {"array": lambda v: v + 1.0, "dict": lambda v: {"a": v + 1.0}}[structure]
    return strategy.extended.update(variable, compute, group=False)


def counter_on_one_device(method: str, d: Any) -> Any:
    with d.OneDeviceStrategy("/cpu:0").scope():
        counter = d.Variable(
            2.0, synchronization=d.VariableSynchronization.ON_READ, aggregation=d.VariableAggregation.SUM
        )
        getattr(counter, method)(3.0)
        return counter.numpy().tolist(), counter.read_value()


def default_update_non_slot(d: Any) -> Any:
    extended = d.get_strategy().extended
    return extended.update_non_slot(d.array(1.0), lambda x: x + 1, args=(6,)), extended.update_non_slot(
        [], lambda: 7, group=False
    )


def duplicates(d: Any) -> Any:
    return d.MirroredStrategy(["/cpu:0", "/cpu:0"]).num_replicas_in_sync


def wrong_devices(devices: Any, d: Any) -> Any:
    return d.MirroredStrategy(devices).num_replicas_in_sync


def one_device(d: Any) -> Any:
    strategy = d.OneDeviceStrategy("/cpu:1")
    with strategy.scope():
        variable = d.Variable(d.array([1.0]))
    result = strategy.run(lambda x: x + 1.0, args=(d.array([2.0]),))
    variable.assign_add(d.array([2.0]))
    return (
        result,
        variable.read_value(),
        strategy.num_replicas_in_sync,
        strategy.reduce("SUM", d.array([5.0]), axis=None),
    )


def in_a_replica(call: str, d: Any) -> Any:
    strategy = two_replicas(d)
    value = d.array([1.0])
    calls = {
        "reduce_to": lambda: strategy.extended.reduce_to("MEAN", value, "/cpu:0"),
        "batch_reduce_to": lambda: strategy.extended.batch_reduce_to("MEAN", [(value, "/cpu:0")]),
        "broadcast_to": lambda: strategy.extended.broadcast_to(value, "/cpu:0"),
        "gather": lambda: strategy.gather(value, axis=0),
        "scope": lambda: strategy.scope().__enter__(),
    }
    return strategy.run(calls[call])


def default_strategy(call: str, d: Any) -> Any:
    strategy, value = d.get_strategy(), d.array([2.0])
    calls = {
        "run": lambda: strategy.run(lambda x: x + 1.0, args=(value,)),
        "reduce": lambda: strategy.reduce("SUM", value, axis=None),
        "reduce_to": lambda: strategy.extended.reduce_to("SUM", value, "/cpu:0"),
        "broadcast_to": lambda: strategy.extended.broadcast_to(value, "/cpu:0"),
        "merge_call": lambda: d.get_replica_context().merge_call(lambda s, x: x + 1.0, args=(value,)),
        "all_gather": lambda: d.get_replica_context().all_gather(value, 0),
        "num": lambda: strategy.num_replicas_in_sync,
        "local": lambda: strategy.experimental_local_results(value),
    }
    return calls[call]()


def run_in_a_merge_call(d: Any) -> Any:
    strategy = two_replicas(d)

    def merge(strategy: Any, x: Any) -> Any:
        total = strategy.reduce("SUM", x, axis=None)
        return strategy.run(lambda own, total: own * 10.0 + total + own_number(d), args=(x, total))

    return strategy.run(
        lambda: d.get_replica_context().merge_call(merge, args=(d.array([1.0 + own_number(d)]),))
    )


def default_scope(d: Any) -> Any:
    strategy = d.get_strategy()

    def answers() -> list[Any]:
        return [d.has_strategy(), d.in_cross_replica_context(), d.get_replica_context() is None]

    with strategy.scope() as entered, strategy.scope():
        inside, in_run = answers(), strategy.run(answers)
        variable = d.Variable(1.0)
    merged = d.get_replica_context().merge_call(lambda s: [*answers(), s.run(answers)])
    return inside, in_run, merged, entered is strategy, variable


def default_in_another(call: str, d: Any) -> Any:
    default = d.get_strategy()
    with two_replicas(d).scope():
        if call == "run":
            return default.run(lambda: 1)
        with default.scope():
            return 1


def another_in_default(call: str, d: Any) -> Any:
    strategy = two_replicas(d)
    with d.get_strategy().scope():
        if call == "run":
            return strategy.run(lambda: d.array([own_number(d) + 0.0]))
        with strategy.scope():
            return d.has_strategy()


def default_values(d: Any) -> Any:
    strategy = d.get_strategy()
    value = strategy.experimental_distribute_values_from_function(
        lambda context: d.array([context.replica_id_in_sync_group + 1.0, context.num_replicas_in_sync + 1.0])
    )
    return value, strategy.run(lambda x: x * 2.0, args=(value,)), strategy.reduce("SUM", value, axis=None)


def reduced_alike(kind: str, op: str, d: Any) -> Any:
    strategy = two_replicas(d)
    with strategy.scope():
        variable = d.Variable(d.array([4.0]), aggregation=d.VariableAggregation.MEAN)
    value = variable if kind == "variable" else d.mirrored([d.array([4.0])] * 2)
    return strategy.reduce(op, value, axis=None)


def slices_along_an_axis(op: str, replicas: int, d: Any) -> Any:
    strategy = d.MirroredStrategy([f"/cpu:{k}" for k in range(replicas)])
    value = strategy.run(
        lambda: d.IndexedSlices(d.array([[2.0], [3.0]]), d.array([1, 1], "int64"), d.array([3, 1], "int64"))
    )
    return strategy.reduce(op, value, axis=0)


def reduced_on_one_device(kind: str, op: str, d: Any) -> Any:
    strategy = d.OneDeviceStrategy("/cpu:0")
    with strategy.scope():
        variable = d.Variable(d.array([4.0]))
    value = {"variable": variable, "number": 3.0, "array": d.array([2.0]), "name": "name"}[kind]
    return strategy.reduce(op, value, axis=None)


def batch_reduced_alike(op: str, d: Any) -> Any:
    mirrored = d.mirrored([d.array([4.0])] * 2)
    return two_replicas(d).extended.batch_reduce_to(op, [(mirrored, "/cpu:0"), (mirrored, mirrored)])


def values_of_nothing(d: Any) -> Any:
    strategy = two_replicas(d)
    value = strategy.experimental_distribute_values_from_function(lambda context: None)
    return value, strategy.experimental_local_results(value)


def arithmetic_of_mirrored(d: Any) -> Any:
    m = d.mirrored_objects((7, 8))
    return [pow(m, 3, 10), m**2, 2**m, ~m, m & 3, 3 | m, m ^ 1, m // 2, m % 4, -m, abs(m), m < 8]


def value_of_one_device(d: Any) -> Any:
    strategy = d.OneDeviceStrategy("/cpu:1")
    return strategy.experimental_distribute_values_from_function(
        lambda context: d.array([context.replica_id_in_sync_group + 3.0, context.num_replicas_in_sync + 0.0])
    )


def scalars(call: str, number: int, replicas: int, d: Any) -> Any:
    strategy = d.MirroredStrategy([f"/cpu:{k}" for k in range(replicas)])
    numbers = d.scalars([float(k) for k in range(number)])
    if call == "from a function":
        batches = strategy.distribute_datasets_from_function(lambda context: numbers)
    else:
        batches = strategy.experimental_distribute_dataset(numbers)
    return [strategy.experimental_local_results(batch) for batch in batches]


def gather_slices(replicas: int, d: Any) -> Any:
    slices = d.IndexedSlices(d.array([[2.0]]), d.array([1], "int32"), d.array([3, 1], "int32"))
    strategy = d.MirroredStrategy([f"/cpu:{k}" for k in range(replicas)]) if replicas else d.get_strategy()
    return strategy.gather(slices, axis=0)


def names_of_devices(d: Any) -> Any:
    extended = two_replicas(d).extended
    return [
        "/job:localhost/replica:0/task:0/device:CPU:1" in extended.worker_devices,
        [d.full_name(device) for device in extended.parameter_devices],
        extended.worker_devices[0] == "/job:localhost/replica:0/task:0/device:CPU:0",
    ]


def attributes(kind: str, d: Any) -> Any:
    strategy = {
        "mirrored": lambda: two_replicas(d),
        "one device": lambda: d.OneDeviceStrategy("/cpu:0"),
    }[kind]()
    names = (
        "experimental_between_graph",
        "experimental_should_init",
        "should_checkpoint",
        "should_save_summary",
    )
    return strategy.cluster_resolver, [getattr(strategy.extended, name) for name in names]


PROGRAMS = {
    "run": run,
    "run of components": run_of_components,
    **{f"one result/{each!r}": functools.partial(one_result, each) for each in (None, "text", 3, 2.5, True)},
    "one tensor": one_tensor,
    "one replica": one_replica,
    "wrong arguments": wrong_arguments,
    "nested run": nested_run,
    **{
        f"failing replica/{error.__name__}": functools.partial(failing_replica, error)
        for error in (ValueError, TypeError, RuntimeError, IndexError)
    },
    **{
        f"all_reduce/{op}/{structure}": functools.partial(all_reduce, op, structure)
        for op, structure in itertools.product(("SUM", "mean"), ("array", "list", "dict"))
    },
    "all_reduce/mode": functools.partial(all_reduce, "mode", "array"),
    "all_reduce/None": functools.partial(all_reduce, None, "array"),
    "all_reduce/constant": all_reduce_of_a_constant,
    "all_reduce/outside": all_reduce_outside,
    **{f"all_gather/{axis}": functools.partial(all_gather, axis) for axis in (0, 1)},
    "merge_call": merge_call,
    "number in a merge_call": number_in_a_merge_call,
    "uneven calls": uneven_calls,
    **{
        f"reduce/{op}/{axis}": functools.partial(reduce, op, axis)
        for op, axis in itertools.product(("SUM", "MEAN"), (None, 0, 1, (0, 1), -1, 5, "x"))
    },
    **{f"reduce uneven/{op}": functools.partial(reduce_uneven, op) for op in ("SUM", "MEAN")},
    "gather/even": functools.partial(gather, [2.0], 0),
    "gather/uneven": functools.partial(gather, [2.0, 3.0], 0),
    "gather/wrong axis": functools.partial(gather, [2.0], 1),
    "gather/plain": gather_plain,
    **{
        f"reduce_to/{op}/{kind}": functools.partial(reduce_to, op, kind, "/cpu:0")
        for op, kind in itertools.product(("SUM", "mean"), ("per replica", "mirrored", "array", "structure"))
    },
    "reduce_to/mode": functools.partial(reduce_to, "mode", "per replica", "/cpu:0"),
    "reduce_to/a list": functools.partial(reduce_to, "SUM", "per replica", ["/cpu:0"]),
    "batch_reduce_to": batch_reduce_to,
    **{
        f"broadcast_to/{value}/{where}": functools.partial(broadcast_to, value, where)
        for value, where in itertools.product(("array", 3, 0.5), ("both", "/cpu:1"))
    },
    "broadcast_to/None": functools.partial(broadcast_to, "array", None),
    "update of a plain variable": update_of_a_plain_variable,
    "where am I": where_am_i,
    "counts": counts,
    **{f"nested scopes/same {same}": functools.partial(nested_scopes, same) for same in (True, False)},
    "set strategy": set_strategy,
    "set strategy in a scope": set_strategy_in_a_scope,
    "dataset/even": functools.partial(dataset, 8, 4, 2),
    "dataset/last batch is short": functools.partial(dataset, 6, 4, 2),
    "dataset/uneven": functools.partial(dataset, 4, 4, 3),
    "dataset from a function": dataset_from_a_function,
    "uneven share": uneven_share,
    "values from a function": values_from_a_function,
    **{
        f"local results/{kind}": functools.partial(local_results, kind)
        for kind in ("per replica", "plain", "names", "nothing")
    },
    **{
        f"inside another/{call}": functools.partial(inside_another, call)
        for call in ("reduce", "gather", "reduce_to", "batch_reduce_to", "broadcast_to", "update")
    },
    **{
        f"update of a lone copy/{structure}": functools.partial(update_of_a_lone_copy, structure)
        for structure in ("array", "dict")
    },
    **{
        f"counter on one device/{method}": functools.partial(counter_on_one_device, method)
        for method in ("assign", "assign_add", "assign_sub")
    },
    "default update_non_slot": default_update_non_slot,
    "duplicates": duplicates,
    **{
        f"wrong devices/{each!r}": functools.partial(wrong_devices, each)
        for each in (["nowhere"], ["/cpu:0:1"])
    },
    "one device": one_device,
    "run in a merge_call": run_in_a_merge_call,
    "default scope": default_scope,
    **{
        f"default in another/{call}": functools.partial(default_in_another, call) for call in ("run", "scope")
    },
    **{
        f"another in default/{call}": functools.partial(another_in_default, call) for call in ("run", "scope")
    },
    "default values": default_values,
    **{
        f"scalars/{call}/{number} for {replicas}": functools.partial(scalars, call, number, replicas)
        for call, (number, replicas) in itertools.product(
            ("from a function", "dataset"), ((3, 1), (4, 2), (6, 3), (4, 3))
        )
    },
    **{f"gather slices/{replicas}": functools.partial(gather_slices, replicas) for replicas in (0, 1, 2)},
    **{
        f"reduce alike/{kind}/{op}": functools.partial(reduced_alike, kind, op)
        for kind, op in itertools.product(("mirrored", "variable"), ("SUM", "MEAN"))
    },
    "value of one device": value_of_one_device,
    **{
        f"slices along an axis/{op}/{replicas}": functools.partial(slices_along_an_axis, op, replicas)
        for op, replicas in itertools.product(("SUM", "MEAN"), (1, 2))
    },
    **{
        f"reduced on one device/{kind}/{op}": functools.partial(reduced_on_one_device, kind, op)
        for kind, op in itertools.product(("variable", "number", "array", "name"), ("SUM", "MEAN"))
    },
    **{f"batch reduced alike/{op}": functools.partial(batch_reduced_alike, op) for op in ("SUM", "MEAN")},
    "values of nothing": values_of_nothing,
    "arithmetic of mirrored": arithmetic_of_mirrored,
    "names of devices": names_of_devices,
    **{f"attributes/{kind}": functools.partial(attributes, kind) for kind in ("mirrored", "one device")},
    **{
        f"in a replica/{call}": functools.partial(in_a_replica, call)
        for call in ("reduce_to", "batch_reduce_to", "broadcast_to", "gather", "scope")
    },
    **{
        f"default strategy/{call}": functools.partial(default_strategy, call)
        for call in ("run", "reduce", "reduce_to", "broadcast_to", "merge_call", "all_gather", "num", "local")
    },
}

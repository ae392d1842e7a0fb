"""What a strategy computes, whichever process holds which replica: each law returns arrays to compare."""

from __future__ import annotations

import numpy as np

import crossdevice as cd

SUM, MEAN = cd.VariableAggregation.SUM, cd.VariableAggregation.MEAN
FIRST = cd.VariableAggregation.ONLY_FIRST_REPLICA
ON_READ = cd.VariableSynchronization.ON_READ


def numbers(replica, size=1000, dtype=np.float32):
    """Numbers whose sum depends on the order in which they are added in their own dtype."""
    generator = np.random.default_rng(replica)
    return (generator.normal(size=size) * 10.0 ** generator.integers(-6, 6, size)).astype(dtype)


def replica_id():
    return cd.get_replica_context().replica_id_in_sync_group


def bits(value):
    return [(array.dtype, array.shape, array.tobytes()) for array in map(np.asarray, value)]


def local(strategy, value):
    return [np.asarray(part) for part in strategy.experimental_local_results(value)]


def all_reduced(strategy):
    """In replica functions: arrays and trees, sums and means."""

    def step():
        context, own = cd.get_replica_context(), numbers(replica_id())
        tree = {"w": own, "b": own[:3].astype(np.float16)}
        total = context.all_reduce("sum", tree)
        return total["w"], total["b"], context.all_reduce("mean", own), context.all_reduce("max", own)

    return [part for result in strategy.run(step) for part in local(strategy, result)[:1]]


def gathered_by_replicas(strategy):
    def step():
        return cd.get_replica_context().all_gather(numbers(replica_id(), replica_id() + 1), axis=0)

    return local(strategy, strategy.run(step))[:1]


def reduced_over_replicas(strategy):
    value = strategy.run(lambda: numbers(replica_id()))
    return [strategy.reduce(op, value, axis=None) for op in ("sum", "mean", "min", "max", "prod")]


def reduced_along_axes(strategy):
    value = strategy.run(lambda: numbers(replica_id(), (replica_id() + 1, 5)))
    one_each = strategy.run(lambda: np.float32(replica_id()) * np.ones(3, np.float32))
    return [
        *(strategy.reduce(op, value, axis=0) for op in ("sum", "mean", "min", "max", "prod")),
        strategy.reduce("mean", value, axis=(0, 1)),
        strategy.reduce("sum", one_each, axis=0),
        strategy.reduce("mean", strategy.run(lambda: np.arange(replica_id())), axis=0),
    ]


def reduced_along_an_axis_that_most_replicas_have_nothing_of(strategy):
    value = strategy.run(lambda: numbers(replica_id(), (3 if replica_id() == 6 else 0, 4)))
    few = strategy.run(lambda: np.arange(3 if replica_id() == 6 else 0, dtype=np.int16) + np.int16(2))
    nothing = strategy.run(lambda: np.zeros((0, 2), np.float32))
    return [
        *(strategy.reduce(op, few, axis=0) for op in ("sum", "mean", "min", "max", "prod")),
        *(strategy.reduce(op, value, axis=0) for op in ("sum", "mean", "min", "max", "prod")),
        strategy.reduce("sum", nothing, axis=0),
        strategy.reduce("mean", nothing, axis=0),
    ]


def gathered(strategy):
    return [strategy.gather(strategy.run(lambda: numbers(replica_id(), (replica_id(), 2))), axis=0)]


def written_to_mirrored_variables(strategy):
    with strategy.scope():
        summed = strategy.create_variable(np.zeros(50, np.float32), aggregation=SUM)
        averaged = strategy.create_variable(np.zeros(50, np.float32), aggregation=MEAN)
        first = strategy.create_variable(np.zeros(50, np.float32), aggregation=FIRST)

    def step():
        for _ in range(2):
            summed.assign_add(numbers(replica_id(), 50))
            averaged.assign_sub(numbers(replica_id(), 50))
            first.assign(numbers(replica_id() + 5, 50))

    strategy.run(step)
    summed.assign_add(np.ones(50, np.float32))
    for variable in (summed, averaged, first):
        assert len({copy.value().tobytes() for copy in variable.values}) == 1
    return [variable.read_value() for variable in (summed, averaged, first)]


def rows_written_to_mirrored_variables(strategy):
    with strategy.scope():
        summed = strategy.create_variable(np.zeros((6, 2), np.float32), aggregation=SUM)
        first = strategy.create_variable(np.zeros((6, 2), np.float32), aggregation=FIRST)

    def step():
        number = replica_id()
        rows = cd.IndexedSlices(numbers(number, (number % 3 + 1, 2)), np.arange(number % 3 + 1), (6, 2))
        summed.scatter_add(rows)
        first.scatter_update(rows)

    strategy.run(step)
    return [summed.read_value(), first.read_value()]


def written_to_variables_that_synchronize_on_reading(strategy):
    variables = [
        strategy.create_variable(np.zeros(20, np.float32), synchronization=ON_READ, aggregation=aggregation)
        for aggregation in (SUM, MEAN, FIRST)
    ]

    def step():
        for variable in variables:
            variable.assign_add(numbers(replica_id(), 20))

    strategy.run(step)
    read = [variable.read_value() for variable in variables]
    variables[0].assign(np.full(20, 16.0, np.float32))
    return [*read, variables[0].read_value()]


def merged(strategy):
    def merge(strategy, value):
        assert isinstance(value, cd.PerReplica)
        return strategy.extended.reduce_to("sum", value, value)

    return local(
        strategy,
        strategy.run(lambda: cd.get_replica_context().merge_call(merge, args=(numbers(replica_id()),))),
    )[:1]


def reduced_by_extended(strategy):
    value = strategy.run(lambda: numbers(replica_id()))
    other = strategy.run(lambda: numbers(replica_id() + 1, 7))
    variable = strategy.create_variable(np.zeros(7, np.float32))
    totals = strategy.extended.batch_reduce_to("mean", [(value, "cpu:0"), (other, variable)])
    strategy.extended.update(variable, lambda copy, total: copy.assign(total), args=(totals[1],))
    same = strategy.extended.broadcast_to(np.float32([1, 2]), variable)
    return [totals[0], variable.read_value(), local(strategy, same)[0]]


def trained(strategy):
    """A linear model by gradient descent on batches that do not divide evenly."""
    data = numbers(1, (101, 4)) / 1e5, numbers(2, 101) / 1e5
    weights = strategy.create_variable(np.zeros(4, np.float32))

    def step(x, y, count):
        error = x @ weights.value() - y
        gradient = cd.get_replica_context().all_reduce("sum", x.T @ error / np.float32(count))
        weights.assign_sub(np.float32(0.1) * gradient)
        return error**2

    losses = []
    for (x, y), count in zip(
        strategy.experimental_distribute_dataset(data, batch_size=13), [13] * 7 + [10], strict=True
    ):
        losses.append(strategy.reduce("mean", strategy.run(step, args=(x, y, count)), axis=0))
    return [weights.read_value(), *losses]


LAWS = {
    law.__name__: law
    for law in (
        all_reduced,
        gathered_by_replicas,
        reduced_over_replicas,
        reduced_along_axes,
        reduced_along_an_axis_that_most_replicas_have_nothing_of,
        gathered,
        written_to_mirrored_variables,
        rows_written_to_mirrored_variables,
        written_to_variables_that_synchronize_on_reading,
        merged,
        reduced_by_extended,
        trained,
    )
}

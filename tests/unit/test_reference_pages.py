"""Every class, method, argument and default of the reference pages is there, and raises what they say."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import crossdevice as cd
from conformance.rows import ALGORITHM_ROWS
from crossdevice.integrations import legacy

REQUIRED = inspect.Parameter.empty

TODAY = {
    "reduce": {
        "reduce_op": REQUIRED,
        "per_replica_value": REQUIRED,
        "destinations": REQUIRED,
        "options": None,
    },
    "batch_reduce": {"reduce_op": REQUIRED, "value_destination_pairs": REQUIRED, "options": None},
    "broadcast": {"tensor": REQUIRED, "destinations": REQUIRED},
}
HOOKS = {
    "reduce_implementation": {
        "reduce_op": REQUIRED,
        "per_replica_value": REQUIRED,
        "destinations": REQUIRED,
        "options": REQUIRED,
    },
    "batch_reduce_implementation": {
        "reduce_op": REQUIRED,
        "value_destination_pairs": REQUIRED,
        "options": REQUIRED,
    },
    "broadcast_implementation": {"tensor": REQUIRED, "destinations": REQUIRED},
}
WITH_HINTS = {
    "reduce": {
        "reduce_op": REQUIRED,
        "per_replica_value": REQUIRED,
        "destinations": REQUIRED,
        "experimental_hints": None,
    },
    "batch_reduce": {"reduce_op": REQUIRED, "value_destination_pairs": REQUIRED, "experimental_hints": None},
    "broadcast": TODAY["broadcast"],
}
TOWERS = {
    "reduce": {"aggregation": REQUIRED, "per_device_value": REQUIRED, "destinations": REQUIRED},
    "batch_reduce": {"aggregation": REQUIRED, "value_destination_pairs": REQUIRED},
    "broadcast": {"tensor": REQUIRED, "destinations": REQUIRED},
}
PAGES = {
    cd.CrossDeviceOps: {"__init__": {}, **TODAY, **HOOKS},
    cd.ReductionToOneDevice: {"__init__": {"reduce_to_device": None, "accumulation_fn": None}, **TODAY},
    cd.HierarchicalCopyAllReduce: {"__init__": {"num_packs": 1}, **WITH_HINTS},
    cd.AllReduceCrossDeviceOps: {
        "__init__": {
            "all_reduce_alg": "nccl",
            "num_packs": 1,
            "agg_small_grads_max_bytes": 0,
            "agg_small_grads_max_group": 10,
        },
        **TODAY,
    },
    legacy.CrossTowerOps: {"__init__": {}, **TOWERS},
}
METHODS = [(page, method) for page, methods in PAGES.items() for method in methods]


@pytest.mark.parametrize(("page", "method"), METHODS, ids=lambda each: getattr(each, "__name__", each))
def test_arguments_have_the_names_order_and_defaults_of_the_page(page, method):
    signature = inspect.signature(page) if method == "__init__" else inspect.signature(getattr(page, method))
    found = {name: parameter for name, parameter in signature.parameters.items() if name != "self"}
    expected = PAGES[page][method]
    assert {name: found[name].default for name in expected} == expected
    # `experimental_hints` is a keyword: fourth comes `options`, which takes what it took.
    positional = [name for name in expected if name != "experimental_hints"]
    assert list(found)[: len(positional)] == positional
    # What is ours comes after, has a default and is a keyword.
    for name in list(found)[len(positional) :]:
        assert found[name].default is not REQUIRED


@pytest.mark.parametrize("page", [page for page in PAGES if page is not legacy.CrossTowerOps])
def test_every_page_is_a_public_cross_device_ops(page):
    assert issubclass(page, cd.CrossDeviceOps)
    assert getattr(cd, page.__name__) is page


def hints_positions(ops, value):
    hints = legacy.CollectiveHints(bytes_per_pack=8)
    return [
        lambda: ops.reduce("mean", value, "cpu:0", hints),
        lambda: ops.reduce("mean", value, "cpu:0", experimental_hints=hints),
        lambda: ops.reduce("mean", value, "cpu:0", options=hints),
        lambda: ops.batch_reduce("mean", [(value, "cpu:0")], hints)[0],
        lambda: ops.batch_reduce("mean", [(value, "cpu:0")], experimental_hints=hints)[0],
        lambda: ops.batch_reduce("mean", [(value, "cpu:0")], options=hints)[0],
    ]


def test_hints_are_taken_as_fourth_argument_and_by_both_names():
    value = cd.PerReplica([np.float32([1]), np.float32([3])])
    for row in ALGORITHM_ROWS:
        for call in hints_positions(row.make(), value):
            assert call().tolist() == [2]


def test_arguments_work_by_name():
    value = cd.PerReplica([np.float32([1]), np.float32([3])])
    for row in ALGORITHM_ROWS:
        ops = row.make()
        total = ops.reduce(
            reduce_op=cd.ReduceOp.SUM, per_replica_value=value, destinations=value, options=None
        )
        assert [component.tolist() for component in total.values] == [[4], [4]]
        pairs = [(value, "cpu:1")]
        (mean,) = ops.batch_reduce(reduce_op=cd.ReduceOp.MEAN, value_destination_pairs=pairs, options=None)
        assert mean.tolist() == [2]
        assert ops.broadcast(tensor=value.values[0], destinations="cpu:1").tolist() == [1]


def test_hooks_are_called_with_checked_arguments_and_options_that_are_never_none():
    calls = []

    class Own(cd.CrossDeviceOps):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            calls.append((reduce_op, type(per_replica_value), destinations, type(options)))
            return sum(per_replica_value.values)

        def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
            calls.append((reduce_op, [type(v) for v, _ in value_destination_pairs], type(options)))
            return [sum(value.values) for value, _ in value_destination_pairs]

        def broadcast_implementation(self, tensor, destinations):
            calls.append((tensor, destinations))
            return "copied"

    ops, value = Own(), cd.PerReplica([np.float32([1]), np.float32([3])])
    assert ops.reduce("sum", value, "cpu:0").tolist() == [4]
    assert ops.batch_reduce("mean", [(value, "cpu:0"), (value, "cpu:1")])[1].tolist() == [4]
    assert ops.broadcast(1.5, "cpu:0") == "copied"
    assert calls == [
        (cd.ReduceOp.SUM, cd.PerReplica, "cpu:0", cd.CommunicationOptions),
        (cd.ReduceOp.MEAN, [cd.PerReplica, cd.PerReplica], cd.CommunicationOptions),
        (1.5, "cpu:0"),
    ]


def test_only_reduce_implementation_is_enough_for_batches_and_lone_values():
    class Own(cd.CrossDeviceOps):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            return sum(per_replica_value.values)

    value = cd.PerReplica([np.float32([1]), np.float32([3])])
    assert [r.tolist() for r in Own().batch_reduce("sum", [(value, "cpu:0")] * 2)] == [[4], [4]]
    assert Own().reduce("sum", np.float32([5]), "cpu:0").tolist() == [5]


def test_the_base_class_broadcasts_and_copies_lone_values_but_has_no_sum():
    ops, value = cd.CrossDeviceOps(), cd.PerReplica([1.0, 2.0])
    assert ops.broadcast(2.5, "cpu:1") == 2.5
    assert ops.reduce("sum", cd.PerReplica([2.5]), cd.PerReplica([0.0])) == 2.5
    with pytest.raises(NotImplementedError, match="overrides neither plan_sum nor reduce_implementation"):
        ops.reduce("sum", value, value)
    with pytest.raises(NotImplementedError):
        ops.batch_reduce("sum", [(value, value)])


def test_values_that_cannot_be_converted_are_value_errors():
    for row in ALGORITHM_ROWS:
        for value in (None, object(), "text", cd.PerReplica([object(), object()]), cd.PerReplica([])):
            with pytest.raises(ValueError, match="expected"):
                row.make().reduce("sum", value, "cpu:0")


def test_destinations_that_say_no_device_are_value_errors():
    for row in ALGORITHM_ROWS:
        for target in (None, 3, ["cpu:0"], ("cpu:0",), {"a": "cpu:0"}, "", object()):
            with pytest.raises(ValueError, match="expected a DistributedValues"):
                row.make().reduce("sum", cd.PerReplica([1.0]), target)


def test_pairs_that_are_no_tuples_of_value_and_destinations_are_value_errors():
    value = cd.PerReplica([1.0, 2.0])
    for row in ALGORITHM_ROWS:
        for pairs in (None, 3, value, [value], [[value, "cpu:0"]], [(value,)], [(value, "cpu:0", None)]):
            with pytest.raises(ValueError, match="expected an iterable of"):
                row.make().batch_reduce("sum", pairs)


def test_a_negative_number_of_packs_is_a_value_error():
    for make in (cd.HierarchicalCopyAllReduce, cd.NcclAllReduce, cd.RingAllReduce):
        with pytest.raises(ValueError, match="num_packs must be 0 or more, got -1"):
            make(num_packs=-1)
        make(num_packs=0)


def test_without_a_device_to_reduce_on_the_first_destination_is_the_one():
    value = cd.PerReplica([1.0, 2.0, 3.0])
    target = cd.PerReplica([0.0, 0.0], ["cpu:7", "cpu:2"])
    assert "add" in cd.ReductionToOneDevice().explain(value, target)
    assert "on cpu:7" in _line_with("add", cd.ReductionToOneDevice().explain(value, target))
    chosen = cd.ReductionToOneDevice(reduce_to_device="/cpu:1")
    assert "on cpu:1" in _line_with("add", chosen.explain(value, target))


def _line_with(word, text):
    return next(line for line in text.splitlines() if f"= {word} " in line)


def test_an_accumulation_function_gets_a_tuple_on_the_device_of_the_work():
    seen = []

    def largest(components):
        seen.append(components)
        return max(float(component) for component in components)

    ops = cd.ReductionToOneDevice(accumulation_fn=largest)
    value = cd.PerReplica([1.0, 5.0, 3.0])
    assert ops.reduce("sum", value, "cpu:0") == 5
    assert ops.reduce("mean", value, "cpu:0") == np.float32(5) / np.float32(3)
    assert [type(components) for components in seen] == [tuple, tuple]
    slices = cd.IndexedSlices(np.ones((1, 2)), np.array([0]), (3, 2))
    ops.reduce("sum", cd.PerReplica([slices, slices]), "cpu:0")
    assert len(seen) == 2
    with pytest.raises(TypeError, match="callable"):
        cd.ReductionToOneDevice(accumulation_fn=3)


def test_packing_goes_by_number_then_by_small_values_then_not_at_all():
    values = {
        str(k): cd.PerReplica([np.zeros(size, np.float32), np.ones(size, np.float32)])
        for k, size in enumerate((2, 2, 100))
    }
    batch = cd.PerReplica([{k: v.values[r] for k, v in values.items()} for r in range(2)])

    def packs(*arguments):
        ops = cd.AllReduceCrossDeviceOps("hierarchical_copy", *arguments)
        text = ops.explain(batch, batch, cd.CommunicationOptions(lowering="off"))
        return sum(line.startswith("pack ") for line in text.splitlines())

    assert packs(4, 64, 10) == 4
    assert packs(0, 64, 10) == 2
    assert packs(0, 0, 10) == packs(0, 64, 0) == 3


def test_hooks_called_directly_convert_the_operation_and_do_without_options():
    value = cd.PerReplica([np.float32([1]), np.float32([3])])
    for row in ALGORITHM_ROWS:
        if row.name == "users_own":
            continue
        ops = row.make()
        for op in ("mean", cd.ReduceOp.MEAN):
            assert ops.reduce_implementation(op, value, "cpu:0", None).tolist() == [2]
            assert ops.batch_reduce_implementation(op, [(value, "cpu:0")], None)[0].tolist() == [2]
        for pairs in (None, 3, [value], [(value,)]):
            with pytest.raises(ValueError, match="expected an iterable of"):
                ops.batch_reduce_implementation("sum", pairs, None)
        with pytest.raises(ValueError, match="not a reduce operation"):
            ops.reduce_implementation("mode", value, "cpu:0", None)


def test_an_accumulation_function_stands_for_no_operation_but_the_sum_and_the_mean():
    ops, value = cd.ReductionToOneDevice(accumulation_fn=sum), cd.PerReplica([np.float32([1])] * 2)
    for op in ("min", "max", "prod"):
        for call in (
            lambda op=op: ops.reduce(op, value, "cpu:0"),
            lambda op=op: ops.batch_reduce(op, [(value, "cpu:0")]),
            lambda op=op: ops.bind(op, value, "cpu:0"),
        ):
            with pytest.raises(ValueError, match="with an accumulation_fn"):
                call()


def test_the_example_of_the_page_on_hints_runs():
    hints = legacy.CollectiveHints(bytes_per_pack=50 * 1024 * 1024)
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    variable = strategy.create_variable([1.0])

    def step(gradient):
        total = cd.get_replica_context().all_reduce("sum", [gradient], experimental_hints=hints)[0]
        variable.assign_sub(total)

    strategy.run(step, args=(cd.PerReplica([np.float32([1]), np.float32([3])]),))
    assert variable.numpy().tolist() == [-3]

"""A nested structure is accepted wherever a value is, inside or outside of the distributed values."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

import crossdevice as cd
from conformance.rows import INSTALLED_ROWS, each_algorithm, each_backend, each_option, placed

OPTIONS = list(each_option())


class Layer(NamedTuple):
    kernel: Any
    bias: Any


def tree(backend, factor):
    """A structure of every kind of node, with None and empty nodes in it."""
    make = backend.make
    return {
        "layer": Layer(make(np.float32([[1, 2], [3, 4]]) * factor), make(np.float64([5]) * factor)),
        "list": [make(np.int32(6) * factor), (make(np.float32([7]) * factor), None)],
        "nothing": {},
        "ordered": OrderedDict(b=make(np.zeros((0, 3), np.float32)), a=make(np.float32([8]) * factor)),
    }


def leaves(backend, structure):
    """The arrays of such a structure, as plain lists."""
    return [
        backend.lists(array)
        for array in (
            structure["layer"].kernel,
            structure["layer"].bias,
            structure["list"][0],
            structure["list"][1][0],
            structure["ordered"]["b"],
            structure["ordered"]["a"],
        )
    ]


def check_structure(structure):
    assert list(structure) == ["layer", "list", "nothing", "ordered"]
    assert type(structure["layer"]) is Layer
    assert type(structure["list"]) is list
    assert type(structure["list"][1]) is tuple
    assert structure["list"][1][1] is None
    assert structure["nothing"] == {}
    assert type(structure["ordered"]) is OrderedDict
    assert list(structure["ordered"]) == ["b", "a"]


def distributed_tree(backend, factors):
    """The same structure outside of the distributed values."""
    trees = [tree(backend, factor) for factor in factors]
    per = lambda pick: cd.PerReplica([pick(each) for each in trees])  # noqa: E731 - a table of one-liners
    return {
        "layer": Layer(per(lambda t: t["layer"].kernel), per(lambda t: t["layer"].bias)),
        "list": [per(lambda t: t["list"][0]), (per(lambda t: t["list"][1][0]), None)],
        "nothing": {},
        "ordered": OrderedDict(b=per(lambda t: t["ordered"]["b"]), a=per(lambda t: t["ordered"]["a"])),
    }


def component(structure, number):
    """One component of every distributed value in the structure."""
    at = lambda value: value.values[number]  # noqa: E731 - as above
    return {
        "layer": Layer(at(structure["layer"].kernel), at(structure["layer"].bias)),
        "list": [at(structure["list"][0]), (at(structure["list"][1][0]), None)],
        "nothing": {},
        "ordered": OrderedDict(b=at(structure["ordered"]["b"]), a=at(structure["ordered"]["a"])),
    }


@each_backend("nested structures")
@each_algorithm("nested structures")
def test_a_per_replica_of_structures_becomes_a_mirrored_of_structures(row, backend):
    ops = row.make()
    for options in OPTIONS:
        value = cd.PerReplica([tree(backend, 1), tree(backend, 2), tree(backend, 4)])
        result = ops.reduce("sum", value, value, options)
        assert type(result) is cd.Mirrored
        assert result.devices == value.devices
        for each in result.values:
            check_structure(each)
            assert leaves(backend, each) == leaves(backend, tree(backend, 7))
        bare = ops.reduce("sum", value, "cpu:5", options)
        check_structure(bare)
        assert leaves(backend, bare) == leaves(backend, tree(backend, 7))


@each_backend("nested structures")
@each_algorithm("nested structures")
def test_a_structure_of_per_replicas_becomes_a_structure_of_mirrored(row, backend):
    ops = row.make()
    for options in OPTIONS:
        value = distributed_tree(backend, (1, 2, 4))
        for target in (value, placed("cpu:0", "cpu:1", "cpu:2")):
            result = ops.reduce("sum", value, target, options)
            check_structure(result)
            assert type(result["layer"].kernel) is cd.Mirrored
            for number in range(3):
                assert leaves(backend, component(result, number)) == leaves(backend, tree(backend, 7))
        bare = ops.reduce("sum", value, "cpu:5", options)
        check_structure(bare)
        assert leaves(backend, bare) == leaves(backend, tree(backend, 7))


@each_backend("nested structures")
@each_algorithm("nested structures")
def test_structures_of_both_kinds_share_a_batch_with_plain_values(row, backend):
    ops = row.make()
    for options in OPTIONS:
        inside = cd.PerReplica([tree(backend, 1), tree(backend, 2)])
        outside = distributed_tree(backend, (1, 2))
        plain = backend.per_replica([np.float32([1]), np.float32([2])])
        results = ops.batch_reduce("sum", [(inside, inside), (plain, "cpu:0"), (outside, outside)], options)
        assert leaves(backend, results[0].values[1]) == leaves(backend, tree(backend, 3))
        assert backend.lists(results[1]) == [3]
        assert leaves(backend, component(results[2], 1)) == leaves(backend, tree(backend, 3))


@each_backend("out")
@each_algorithm("out")
def test_structures_are_reduced_into_out_and_in_place(row, backend):
    ops = row.make()
    for options in OPTIONS:
        value = cd.PerReplica([tree(backend, 1), tree(backend, 2)])
        kernels = [each["layer"].kernel for each in value.values]
        result = ops.reduce("sum", value, value, options, out=value)
        for number, each in enumerate(result.values):
            assert each["layer"].kernel is kernels[number]
            assert (
                leaves(backend, each)
                == leaves(backend, value.values[number])
                == leaves(backend, tree(backend, 3))
            )
        value, out = cd.PerReplica([tree(backend, 1), tree(backend, 2)]), tree(backend, 0)
        result = ops.reduce("sum", value, "cpu:0", options, out=out)
        assert result["ordered"]["a"] is out["ordered"]["a"]
        assert leaves(backend, out) == leaves(backend, tree(backend, 3))
        assert leaves(backend, value.values[0]) == leaves(backend, tree(backend, 1))


@each_backend("out")
@each_algorithm("out")
def test_structures_of_per_replicas_are_reduced_into_out_and_in_place(row, backend):
    ops = row.make()
    for options in OPTIONS:
        value = distributed_tree(backend, (1, 2))
        result = ops.reduce("sum", value, value, options, out=value)
        assert result["layer"].kernel.values[1] is value["layer"].kernel.values[1]
        assert (
            leaves(backend, component(value, 0))
            == leaves(backend, component(value, 1))
            == leaves(backend, tree(backend, 3))
        )
        value, out = distributed_tree(backend, (1, 2)), distributed_tree(backend, (0, 0))
        result = ops.batch_reduce("sum", [(value, value)], options, out=[out])[0]
        assert result["layer"].bias.values[0] is out["layer"].bias.values[0]
        assert (
            leaves(backend, component(out, 0))
            == leaves(backend, component(out, 1))
            == leaves(backend, tree(backend, 3))
        )
        assert leaves(backend, component(value, 1)) == leaves(backend, tree(backend, 2))


@each_backend("nested structures")
@each_algorithm("nested structures")
def test_structures_are_broadcast_and_gathered(row, backend):
    ops = row.make()
    source = tree(backend, 2)
    result = ops.broadcast(source, placed("cpu:0", "cpu:3"))
    assert type(result) is cd.Mirrored
    for each in result.values:
        check_structure(each)
        assert leaves(backend, each) == leaves(backend, source)
        assert backend.keeps_apart([each["layer"].kernel], [source["layer"].kernel])
    value = cd.PerReplica([{"a": backend.make(np.float32([k])), "b": None} for k in range(3)])
    gathered = ops.gather(value, value)
    assert [(backend.lists(each["a"]), each["b"]) for each in gathered.values] == [([0, 1, 2], None)] * 3
    parts = [backend.per_replica([np.float32([k]) for k in range(3)])]
    assert [backend.lists(each) for each in ops.gather(parts, "cpu:1")] == [[0, 1, 2]]


@each_backend("out")
@each_algorithm("out")
def test_structures_are_broadcast_into_out(row, backend):
    source, out = tree(backend, 2), [tree(backend, 0), tree(backend, 0)]
    row.make().broadcast(source, placed("cpu:0", "cpu:3"), out=out)
    assert leaves(backend, out[0]) == leaves(backend, out[1]) == leaves(backend, source)


def test_functions_take_lists_of_structures():
    for backend in INSTALLED_ROWS:
        for each in cd.all_reduce([tree(backend, 1), tree(backend, 2)]):
            check_structure(each)
            assert leaves(backend, each) == leaves(backend, tree(backend, 3))
        (alone,) = cd.all_reduce([tree(backend, 1)])
        assert leaves(backend, alone) == leaves(backend, tree(backend, 1))
        for each in cd.reduce([tree(backend, 1), tree(backend, 2)], "sum", ["cpu:1", "cpu:0"]):
            assert leaves(backend, each) == leaves(backend, tree(backend, 3))
        for each in cd.broadcast(tree(backend, 5), ["cpu:1", "cpu:0"]):
            assert leaves(backend, each) == leaves(backend, tree(backend, 5))


def test_structures_of_both_kinds_are_explained():
    for backend in INSTALLED_ROWS:
        inside = cd.PerReplica([tree(backend, 1), tree(backend, 2)])
        outside = distributed_tree(backend, (1, 2))
        for value in (inside, outside):
            assert "SUM of 2 replicas" in cd.RingAllReduce().explain(value, value)

"""A nested structure is accepted wherever a value is, inside or outside of the distributed values."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

import crossdevice as cd
from conformance.rows import BACKEND_ROWS, each_algorithm, each_backend, each_option, placed

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


def leaves(structure):
    """The arrays of such a structure, as plain lists."""
    return [
        array.tolist()
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
    for options in OPTIONS:
        value = cd.PerReplica([tree(backend, 1), tree(backend, 2), tree(backend, 4)])
        result = row.make().reduce("sum", value, value, options)
        assert type(result) is cd.Mirrored
        assert result.devices == value.devices
        for each in result.values:
            check_structure(each)
            assert leaves(each) == leaves(tree(backend, 7))
        bare = row.make().reduce("sum", value, "cpu:5", options)
        check_structure(bare)
        assert leaves(bare) == leaves(tree(backend, 7))


@each_backend("nested structures")
@each_algorithm("nested structures")
def test_a_structure_of_per_replicas_becomes_a_structure_of_mirrored(row, backend):
    for options in OPTIONS:
        value = distributed_tree(backend, (1, 2, 4))
        for target in (value, placed("cpu:0", "cpu:1", "cpu:2")):
            result = row.make().reduce("sum", value, target, options)
            check_structure(result)
            assert type(result["layer"].kernel) is cd.Mirrored
            for number in range(3):
                assert leaves(component(result, number)) == leaves(tree(backend, 7))
        bare = row.make().reduce("sum", value, "cpu:5", options)
        check_structure(bare)
        assert leaves(bare) == leaves(tree(backend, 7))


@each_backend("nested structures")
@each_algorithm("nested structures")
def test_structures_of_both_kinds_share_a_batch_with_plain_values(row, backend):
    for options in OPTIONS:
        inside = cd.PerReplica([tree(backend, 1), tree(backend, 2)])
        outside = distributed_tree(backend, (1, 2))
        plain = backend.per_replica([np.float32([1]), np.float32([2])])
        results = row.make().batch_reduce(
            "sum", [(inside, inside), (plain, "cpu:0"), (outside, outside)], options
        )
        assert leaves(results[0].values[1]) == leaves(tree(backend, 3))
        assert results[1].tolist() == [3]
        assert leaves(component(results[2], 1)) == leaves(tree(backend, 3))


@each_backend("nested structures")
@each_algorithm("nested structures")
def test_structures_are_reduced_into_out_and_in_place(row, backend):
    for options in OPTIONS:
        value = cd.PerReplica([tree(backend, 1), tree(backend, 2)])
        kernels = [each["layer"].kernel for each in value.values]
        result = row.make().reduce("sum", value, value, options, out=value)
        for number, each in enumerate(result.values):
            assert each["layer"].kernel is kernels[number]
            assert leaves(each) == leaves(value.values[number]) == leaves(tree(backend, 3))
        value, out = cd.PerReplica([tree(backend, 1), tree(backend, 2)]), tree(backend, 0)
        result = row.make().reduce("sum", value, "cpu:0", options, out=out)
        assert result["ordered"]["a"] is out["ordered"]["a"]
        assert leaves(out) == leaves(tree(backend, 3))
        assert leaves(value.values[0]) == leaves(tree(backend, 1))


@each_backend("nested structures")
@each_algorithm("nested structures")
def test_structures_of_per_replicas_are_reduced_into_out_and_in_place(row, backend):
    for options in OPTIONS:
        value = distributed_tree(backend, (1, 2))
        result = row.make().reduce("sum", value, value, options, out=value)
        assert result["layer"].kernel.values[1] is value["layer"].kernel.values[1]
        assert leaves(component(value, 0)) == leaves(component(value, 1)) == leaves(tree(backend, 3))
        value, out = distributed_tree(backend, (1, 2)), distributed_tree(backend, (0, 0))
        result = row.make().batch_reduce("sum", [(value, value)], options, out=[out])[0]
        assert result["layer"].bias.values[0] is out["layer"].bias.values[0]
        assert leaves(component(out, 0)) == leaves(component(out, 1)) == leaves(tree(backend, 3))
        assert leaves(component(value, 1)) == leaves(tree(backend, 2))


@each_backend("nested structures")
@each_algorithm("nested structures")
def test_structures_are_broadcast_and_gathered(row, backend):
    source = tree(backend, 2)
    result = row.make().broadcast(source, placed("cpu:0", "cpu:3"))
    assert type(result) is cd.Mirrored
    for each in result.values:
        check_structure(each)
        assert leaves(each) == leaves(source)
        assert not np.shares_memory(*(backend.memory(t["layer"].kernel) for t in (each, source)))
    out = [tree(backend, 0), tree(backend, 0)]
    row.make().broadcast(source, placed("cpu:0", "cpu:3"), out=out)
    assert leaves(out[0]) == leaves(out[1]) == leaves(source)
    value = cd.PerReplica([{"a": backend.make(np.float32([k])), "b": None} for k in range(3)])
    gathered = row.make().gather(value, value)
    assert [(each["a"].tolist(), each["b"]) for each in gathered.values] == [([0, 1, 2], None)] * 3
    parts = [backend.per_replica([np.float32([k]) for k in range(3)])]
    assert [each.tolist() for each in row.make().gather(parts, "cpu:1")] == [[0, 1, 2]]


def test_functions_take_lists_of_structures():
    for backend in BACKEND_ROWS:
        for each in cd.all_reduce([tree(backend, 1), tree(backend, 2)]):
            check_structure(each)
            assert leaves(each) == leaves(tree(backend, 3))
        (alone,) = cd.all_reduce([tree(backend, 1)])
        assert leaves(alone) == leaves(tree(backend, 1))
        for each in cd.reduce([tree(backend, 1), tree(backend, 2)], "sum", ["cpu:1", "cpu:0"]):
            assert leaves(each) == leaves(tree(backend, 3))
        for each in cd.broadcast(tree(backend, 5), ["cpu:1", "cpu:0"]):
            assert leaves(each) == leaves(tree(backend, 5))


def test_structures_of_both_kinds_are_explained():
    for backend in BACKEND_ROWS:
        inside = cd.PerReplica([tree(backend, 1), tree(backend, 2)])
        outside = distributed_tree(backend, (1, 2))
        for value in (inside, outside):
            assert "SUM of 2 replicas" in cd.RingAllReduce().explain(value, value)

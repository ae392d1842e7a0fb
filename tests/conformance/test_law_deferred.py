"""Bound and started calls of every collective give what plain ones give; known calls give it again."""

from __future__ import annotations

import gc
import itertools
import weakref

import numpy as np
import pytest

import crossdevice as cd
from conformance.rows import NUMPY, components_of, each_algorithm, each_backend, placed, wild_arrays
from crossdevice.errors import BoundError, MismatchError, OptionError, OutError, ReduceOpError

CALLS = {
    "reduce": lambda calls, value, **more: calls.reduce("sum", value, "cpu:0", **more),
    "reduce to all": lambda calls, value, **more: calls.reduce("mean", value, value, **more),
    "reduce, weighted": lambda calls, value, **more: calls.reduce(
        "mean", value, value, weights=[1, 2, 0.5], **more
    ),
    "broadcast": lambda calls, value, **more: calls.broadcast(value.values[1], value, **more),
    "gather": lambda calls, value, **more: calls.gather(value, "cpu:0", **more),
    "gather along the last axis": lambda calls, value, **more: calls.gather(
        value, placed("cpu:4", "cpu:1"), -1, **more
    ),
    "all_gather": lambda calls, value, **more: calls.all_gather(value, **more),
    "reduce_scatter": lambda calls, value, **more: calls.reduce_scatter("sum", value, **more),
    "reduce_scatter, weighted": lambda calls, value, **more: calls.reduce_scatter(
        "sum", value, 1, sizes=[1, 0, 3], weights=[1, 2, 0.5], **more
    ),
    "all_to_all": lambda calls, value, **more: calls.all_to_all(value, **more),
    "all_to_all of given sizes": lambda calls, value, **more: calls.all_to_all(
        value, 1, sizes=[[1, 0, 3], [2, 1, 1], [0, 0, 4]], **more
    ),
}
"""Calls by the methods of an algorithm, of `ops.bound` or of `ops.started`, of three (5, 4) arrays."""

NEEDS_SUMS = ("reduce, weighted", "reduce_scatter, weighted")
"""Calls that an overridden `reduce_implementation` refuses."""


def arrays(seed, shape=(5, 4)):
    return [array.reshape(shape) for array in wild_arrays("float32", 3, int(np.prod(shape)), seed)]


def refill(value, backend, seed):
    """Other numbers in the same memory."""
    for array, other in zip(value.values, arrays(seed), strict=True):
        backend.memory(array)[...] = other


def bits(result, backend):
    devices = result.devices if isinstance(result, cd.DistributedValues) else None
    return type(result), devices, [backend.bits(component) for component in components_of(result)]


def filled_like(result, backend):
    """Memory for a result, with other numbers in it."""
    components = [backend.make(np.full_like(backend.memory(each), 7)) for each in components_of(result)]
    return type(result)(components) if isinstance(result, cd.DistributedValues) else components[0]


@each_algorithm("deferred")
@pytest.mark.parametrize("call", CALLS)
def test_every_algorithm_binds_and_starts_every_call(row, call):
    ops, make, value = row.make(), CALLS[call], NUMPY.per_replica(arrays(1))
    if row.name == "users_own" and call in NEEDS_SUMS:
        pytest.skip("it takes no weights")
    bound = make(ops.bound, value)
    for seed in (1, 2, 3):
        refill(value, NUMPY, seed)
        right = bits(make(ops, value), NUMPY)
        assert bits(bound(), NUMPY) == right
        assert bits(bound.start().wait(), NUMPY) == right
        assert bits(make(ops.started, value).wait(), NUMPY) == right


@each_backend("deferred")
@pytest.mark.parametrize("call", CALLS)
def test_results_of_bound_calls_are_in_memory_that_they_own(backend, call):
    ops, value = cd.DirectAllReduce(), backend.per_replica(arrays(1))
    bound = CALLS[call](ops.bound, value)
    first, right = bound(), bits(CALLS[call](ops, value), backend)
    assert bits(first, backend) == right
    assert backend.keeps_apart(components_of(first), value.values)
    if not backend.is_immutable:
        refill(value, backend, 2)
        assert bound() is first
        assert bits(first, backend) == bits(CALLS[call](ops, value), backend) != right


@each_backend("out")
@pytest.mark.parametrize("call", CALLS)
def test_results_go_to_out_in_known_bound_and_started_calls(backend, call):
    ops, value, make = cd.DirectAllReduce(), backend.per_replica(arrays(1)), CALLS[call]
    out = filled_like(make(ops, value), backend)
    bound = make(ops.bound, value, out=out)
    ways = (
        lambda: make(ops, value, out=out),
        lambda: make(ops, value, out=out),
        bound,
        lambda: bound.start().wait(),
        lambda: make(ops.started, value, out=out).wait(),
    )
    for seed, way in enumerate(ways):
        refill(value, backend, seed)
        result = way()
        assert bits(result, backend) == bits(make(ops, value), backend)
        for made, given in zip(components_of(result), components_of(out), strict=True):
            assert made is given


@each_algorithm("deferred")
@pytest.mark.parametrize("call", CALLS)
def test_the_second_call_of_a_signature_is_known(row, call):
    ops, make, value = row.make(), CALLS[call], NUMPY.per_replica(arrays(1))
    if row.name == "users_own":
        pytest.skip("calls of hooks are made in full")
    for seed in (1, 2):
        refill(value, NUMPY, seed)
        assert bits(make(ops, value), NUMPY) == bits(make(row.make(), value), NUMPY)
    assert ops._runner.known_calls.hits == 1
    make(ops, NUMPY.per_replica(arrays(3, (4, 4)) if "given" not in call else arrays(3, (6, 4))))
    assert ops._runner.known_calls.hits == 1, "other lengths are another call"


@pytest.mark.parametrize("call", CALLS)
def test_trees_are_known_bound_and_started_too(call):
    ops, make = cd.DirectAllReduce(), CALLS[call]
    value = cd.PerReplica(
        [{"w": one, "b": [other, None]} for one, other in zip(arrays(1), arrays(2, (3, 4)), strict=True)]
    )
    plain, known = make(ops, value), make(ops, value)
    assert ops._runner.known_calls.hits == 1
    right = cd.fingerprint(plain)
    for found in (known, make(ops.bound, value)(), make(ops.started, value).wait()):
        assert type(found) is type(plain)
        assert cd.fingerprint(found) == right
    parts = {"w": cd.PerReplica(arrays(1)), "b": cd.PerReplica(arrays(2))}
    if call != "broadcast":
        around, bound = make(ops, parts), make(ops.bound, parts)()
        assert cd.fingerprint(bound) == cd.fingerprint(around) == cd.fingerprint(make(ops, parts))
        assert set(bound) == {"w", "b"}


@pytest.mark.parametrize(("call", "library"), [*itertools.product(CALLS, ("numpy", "torch"))])
def test_an_array_that_moved_is_noticed(call, library):
    if library == "numpy":
        value = cd.PerReplica([np.ones((5, 4), np.float32) for _ in range(3)])
    else:
        torch = pytest.importorskip("torch")
        value = cd.PerReplica([torch.ones(5, 4) for _ in range(3)])
    bound = CALLS[call](cd.DirectAllReduce().bound, value)
    bound()
    if library == "numpy":
        value.values[1].resize((500, 400), refcheck=False)
    else:
        value.values[1].set_(torch.ones(5, 4))
    with pytest.raises(BoundError, match="another address or shape"):
        bound()


def test_large_copies_that_are_bound_take_one_pass():
    ops = cd.DirectAllReduce()
    value = cd.PerReplica([np.full(1 << 17, replica, np.float32) for replica in range(3)])
    for call in ("broadcast", "gather", "all_gather", "all_to_all"):
        plain, bound = CALLS[call](ops, value), CALLS[call](ops.bound, value)
        for _ in range(2):
            assert bits(bound(), NUMPY) == bits(plain, NUMPY) == bits(CALLS[call](ops, value), NUMPY)


def test_what_is_read_may_be_written_where_it_is_gathered():
    whole = np.arange(6, dtype=np.float32)
    value = cd.PerReplica([whole[3:], whole[:3]])
    ops = cd.DirectAllReduce()
    for _ in range(2):
        ops.gather(value, "cpu:0", out=whole)
    assert whole.tolist() == [0, 1, 2, 3, 4, 5], "twice"
    bound = ops.bound.gather(value, "cpu:0", out=whole)
    assert bound().tolist() == [3, 4, 5, 0, 1, 2]
    assert bound().tolist() == [0, 1, 2, 3, 4, 5]
    a, b = np.float32([1, 2]), np.float32([3, 4])
    tree = {"a": cd.PerReplica([a, a.copy()]), "b": cd.PerReplica([b, b.copy()])}
    swapped = {"a": cd.PerReplica([b, np.empty_like(b)]), "b": cd.PerReplica([a, np.empty_like(a)])}
    result = ops.all_to_all(tree, out=swapped)
    assert result["a"].values[0].tolist() == [1, 1]
    assert result["b"].values[0].tolist() == [3, 3]


@pytest.mark.parametrize("form", ["bound", "started"])
def test_mistakes_are_said_at_once(form):
    calls, value = getattr(cd.DirectAllReduce(), form), cd.PerReplica([np.ones(2), np.ones(3)])
    with pytest.raises(MismatchError, match="replica 1"):
        calls.reduce("sum", value, "cpu:0")
    with pytest.raises(OutError, match=r"expected \(5,\)"):
        calls.gather(value, "cpu:0", out=np.ones(4))
    with pytest.raises(TypeError, match="axis must be an integer"):
        calls.gather(value, "cpu:0", 0.5)
    with pytest.raises(TypeError, match="reduce_op"):
        calls.reduce(per_replica_value=value, destinations="cpu:0")


@pytest.mark.parametrize("call", CALLS)
def test_known_calls_keep_no_arrays(call):
    ops, value = cd.DirectAllReduce(), NUMPY.per_replica(arrays(1))
    for _ in range(2):
        result = CALLS[call](ops, value)
    assert ops._runner.known_calls.hits == 1
    kept = [weakref.ref(array) for array in (*value.values, *components_of(result))]
    del value, result
    gc.collect()
    assert [array() for array in kept] == [None] * len(kept)


@pytest.mark.parametrize("name", ["reduce", "reduce_scatter"])
def test_a_reduction_without_an_operation_is_refused(name):
    arguments = [None, cd.PerReplica([np.ones(2), np.ones(2)]), *(["cpu:0"] if name == "reduce" else [])]
    ops = cd.DirectAllReduce()
    for calls in (ops, ops.bound, ops.started):
        with pytest.raises(ReduceOpError, match="None"):
            getattr(calls, name)(*arguments)


def test_arguments_that_only_look_like_known_ones_are_refused():
    ops, value = cd.DirectAllReduce(), cd.PerReplica([np.ones(2), np.ones(2)])
    for _ in range(2):
        ops.gather(value, "cpu:0", 0)
        ops.reduce_scatter("sum", value, sizes=[0, 2])
    with pytest.raises(TypeError, match="axis must be an integer"):
        ops.gather(value, "cpu:0", 0.0)
    with pytest.raises(OptionError, match="sizes must be lengths"):
        ops.reduce_scatter("sum", value, sizes=[0.0, 2.0])

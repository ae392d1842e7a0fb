"""Reductions that are bound to their arrays: the bits of a plain call, in the same memory each time."""

from __future__ import annotations

import concurrent.futures
import gc
import itertools
import os
import pickle
import subprocess
import sys
import weakref

import numpy as np
import pytest

import crossdevice as cd
from conformance import array_libraries
from conformance.rows import ALGORITHM_ROWS
from crossdevice.errors import BoundError, ContextError, OutError, ShapeMismatchError
from crossdevice.kernels.host.fused_pass import select_kernels
from crossdevice.process_groups.engines.thread_engine import run_ranks
from crossdevice.values.options import LOWERINGS, PRECISIONS
from crossdevice.values.replica_scope import replica_scope

torch = pytest.importorskip("torch")

LIBRARIES = {"numpy": np.array, "torch": lambda array: torch.from_numpy(np.array(array))}
SHAPES = ((3,), (2, 5), (), (0, 2), (1000,))


@pytest.fixture(params=LIBRARIES)
def make(request):
    return LIBRARIES[request.param]


@pytest.fixture(params=["numba", "numpy"])
def kernels(request):
    select_kernels(request.param)
    yield request.param
    select_kernels(None)


def batch(make, seed=0, count=3, shapes=SHAPES):
    random = np.random.default_rng(seed)
    return [
        cd.PerReplica([make(random.standard_normal(shape).astype(np.float32)) for _ in range(count)])
        for shape in shapes
    ]


def to_itself(values):
    return [(value, value) for value in values]


def bits(results):
    return [[np.asarray(array).tobytes() for array in result.values] for result in results]


def refill(values, others):
    for value, other in zip(values, others, strict=True):
        for array, source in zip(value.values, other.values, strict=True):
            array[...] = source


@pytest.mark.parametrize("row", ALGORITHM_ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_bound_batch_has_the_bits_of_plain_calls_however_often(make, row, precision):
    ops = row.make()
    for lowering in LOWERINGS:
        options = cd.CommunicationOptions(precision=precision, lowering=lowering)
        values = batch(make)
        bound = ops.bind("mean", to_itself(values), options=options)
        for seed in range(3):
            refill(values, batch(make, seed))
            assert bits(bound()) == bits(ops.batch_reduce("mean", to_itself(values), options))


@pytest.mark.usefixtures("kernels")
def test_in_place_and_into_other_memory(make):
    ops = cd.RingAllReduce()
    for seed in range(3):
        values = batch(make)
        bound = ops.bind("sum", to_itself(values), out=values)
        refill(values, batch(make, seed))
        expected = bits(ops.batch_reduce("sum", to_itself(values)))
        results = bound()
        assert bits(results) == bits(values) == expected
        assert all(
            a is b
            for r, v in zip(results, values, strict=True)
            for a, b in zip(r.values, v.values, strict=True)
        )


def test_results_are_the_same_objects_in_every_call(make):
    values = batch(make)
    bound = cd.DirectAllReduce().bind("sum", to_itself(values))
    first = bound()
    refill(values, batch(make, 1))
    second = bound()
    assert all(a is b for a, b in zip(first, second, strict=True))
    assert bits(first) == bits(cd.DirectAllReduce().batch_reduce("sum", to_itself(values)))


def test_one_value_gives_one_result_and_structures_stay(make):
    value = batch(make)[0]
    assert isinstance(cd.DirectAllReduce().bind("sum", value, value)(), cd.Mirrored)
    alone = cd.DirectAllReduce().bind("sum", value, "cpu:1")()
    assert np.asarray(alone).shape == (3,)
    tree = cd.PerReplica([{"a": make(np.float32([k])), "b": [make(np.float32([k, k]))]} for k in range(3)])
    result = cd.DirectAllReduce().bind("sum", tree, "cpu:0")()
    assert [np.asarray(result["a"]).tolist(), np.asarray(result["b"][0]).tolist()] == [[3], [3, 3]]
    result = cd.DirectAllReduce().bind("sum", {"x": value}, value)()
    assert bits([result["x"]]) == bits([cd.DirectAllReduce().reduce("sum", value, value)])


def test_arrays_with_gaps_are_read_anew(make):
    whole = [make(np.zeros((6, 4), np.float32)) for _ in range(2)]
    value = cd.PerReplica([array[::2, 1:3] for array in whole])
    bound = cd.DirectAllReduce().bind("sum", value, value)
    for number in (1, 2):
        for array in whole:
            array[...] = number
        assert np.asarray(bound().values[1]).tolist() == [[2 * number] * 2] * 3


def test_mistakes_are_said_when_it_is_bound(make):
    ops = cd.DirectAllReduce()
    value = cd.PerReplica([make(np.ones(3, np.float32)), make(np.ones(4, np.float32))])
    with pytest.raises(ShapeMismatchError, match="replica 1"):
        ops.bind("sum", value, value)
    value = batch(make)[0]
    with pytest.raises(OutError, match="2 components; expected 3"):
        ops.bind("sum", value, value, out=value.values[:2])
    with replica_scope(1), pytest.raises(ContextError, match="bind was called inside replica 1"):
        ops.bind("sum", value, value)


def test_it_keeps_its_arrays_alive_and_lets_them_go(make):
    array = make(np.float32([1]))
    gone = weakref.ref(array)
    bound = cd.DirectAllReduce().bind("sum", cd.PerReplica([array, make(np.float32([2]))]), "cpu:0")
    del array
    gc.collect()
    assert np.asarray(bound()).tolist() == [3]
    assert gone() is not None
    del bound
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("kernels")
def test_an_array_that_was_resized_is_noticed():
    arrays = [np.ones(1000, np.float32) for _ in range(3)]
    value = cd.PerReplica(arrays)
    bound = cd.DirectAllReduce().bind("sum", value, value, out=value)
    bound()
    for size in (10, 10_000_000):
        arrays[1].resize(size, refcheck=False)
        with pytest.raises(BoundError, match=r"replica 1 \(cpu:1\) of value 0 has another address or shape"):
            bound()
    assert arrays[0].tolist() == [3] * 1000


@pytest.mark.usefixtures("kernels")
def test_an_array_of_another_shape_is_noticed():
    arrays = [np.ones((2, 6), np.float32) for _ in range(2)]
    bound = cd.DirectAllReduce().bind("sum", cd.PerReplica(arrays), "cpu:0")
    bound()
    arrays[0].resize((3, 4), refcheck=False)
    with pytest.raises(BoundError, match="replica 0"):
        bound()


def test_a_tensor_that_was_given_other_memory_is_noticed():
    tensors = [torch.ones(3) for _ in range(2)]
    bound = cd.DirectAllReduce().bind("sum", cd.PerReplica(tensors), "cpu:0")
    bound()
    tensors[1].set_(torch.full((3,), 9.0))
    with pytest.raises(BoundError, match=r"replica 1 \(cpu:1\) of value 0"):
        bound()


def test_tensors_know_that_they_were_written_to():
    value = batch(LIBRARIES["torch"])[0]
    bound = cd.DirectAllReduce().bind("sum", value, value, out=value)
    before = [tensor._version for tensor in value.values]
    bound()
    assert [tensor._version for tensor in value.values] == [version + 1 for version in before]


def test_threads_take_turns():
    values = batch(np.array, shapes=((200_000,), (7,)))
    expected = bits(cd.DirectAllReduce().batch_reduce("sum", to_itself(values)))
    bound = cd.DirectAllReduce().bind("sum", to_itself(values))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for results in pool.map(lambda _: bound(), range(64)):
            assert bits(results) == expected


def test_a_call_inside_itself_is_refused_and_the_next_one_works():
    value = cd.PerReplica([np.float32([1]), np.float32([2])])
    answers = []

    def difference(arrays):
        if not answers:
            with pytest.raises(ContextError, match="while it runs in this very thread"):
                answers.append(bound())
            answers.append("refused")
        return arrays[1] - arrays[0]

    bound = cd.ReductionToOneDevice(accumulation_fn=difference).bind("sum", value, "cpu:0")
    assert bound() == [1]
    assert answers == ["refused"]
    assert bound() == [1]


class Product(cd.CrossDeviceOps):
    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        return self.broadcast_implementation(np.prod(per_replica_value.values, axis=0), destinations)


FORKS_DURING_A_CALL = """
import os, signal, threading
import numpy as np
import crossdevice as cd

reached, go_on = threading.Event(), threading.Event()

class Waiting(cd.CrossDeviceOps):
    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        reached.set()
        go_on.wait(60)
        return cd.DirectAllReduce().reduce(reduce_op, per_replica_value, destinations, options)

cd.reduce([np.ones(2), np.ones(2)])  # so that the child has no kernel to compile
bound = Waiting().bind("sum", cd.PerReplica([np.ones(2), np.ones(2)]), "cpu:0")
thread = threading.Thread(target=bound)
thread.start()
assert reached.wait(60)
child = os.fork()
if child == 0:
    signal.alarm(60)  # ends the process, should it hang
    go_on.set()
    os._exit(0 if bound().tolist() == [2.0, 2.0] else 1)
go_on.set()
thread.join()
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_process_forked_during_a_call_of_another_thread_can_call_it_too():
    # In a process of its own: other libraries that tests have loaded here do not bear a fork.
    ended = subprocess.run([sys.executable, "-c", FORKS_DURING_A_CALL], check=False)
    assert ended.returncode == 0


def test_hooks_functions_and_sparse_rows_are_run_in_full():
    value = cd.PerReplica([np.float32([2]), np.float32([3])])
    bound = Product().bind("sum", value, "cpu:0")
    assert bound() == [6]
    value.values[0][:] = 5
    assert bound() == [15]
    bound = cd.ReductionToOneDevice(accumulation_fn=lambda arrays: arrays[1] - arrays[0]).bind(
        "sum", value, "cpu:0"
    )
    assert bound() == [-2]
    slices = cd.IndexedSlices(np.ones((1, 2), np.float32), np.array([1]), (3, 2))
    assert cd.DirectAllReduce().bind("sum", cd.PerReplica([slices, slices]), "cpu:0")().indices.tolist() == [
        1,
        1,
    ]


@pytest.mark.more("JAX")
def test_libraries_whose_arrays_cannot_be_written_to_get_new_results():
    pytest.importorskip("jax")
    value = cd.PerReplica([array_libraries.jax_array(np.ones(3, np.float32), k) for k in range(2)])
    bound = cd.DirectAllReduce().bind("sum", value, value)
    first, second = bound(), bound()
    assert first is not second
    assert first.values[0].tolist() == second.values[1].tolist() == [2, 2, 2]


def test_between_processes_all_make_the_same_call():
    def program(group):
        value = cd.PerReplica([np.float32([group.rank]), np.float32([1])])
        bound = cd.CollectiveAllReduce(group=group).bind("sum", value, value)
        numbers = []
        for _ in range(3):
            numbers.append(float(bound().values[1][0]))
            value.values[0][:] += 1
        return numbers

    assert run_ranks(3, program) == [[6, 9, 12]] * 3


def test_plain_functions_and_strategies_bind_too():
    lists = [[np.float32([1, 2])], [np.float32([3, 4])]]
    bound = cd.bind(lists, "mean")
    assert [part[0].tolist() for part in bound()] == [[2, 3]] * 2
    arrays = [part[0] for part in lists]
    assert cd.bind(arrays, "max", "cpu:0")().tolist() == [3, 4]
    assert [part.tolist() for part in cd.bind(arrays, "sum", ["cpu:4", "cpu:2"])()] == [[4, 6]] * 2
    in_place = cd.bind(arrays, "sum", out=arrays)
    assert in_place()[0] is arrays[0]
    strategy = cd.MirroredStrategy(["cpu:0", "cpu:1"])
    value = cd.PerReplica([np.float32([1]), np.float32([2])])
    assert strategy.extended.bind("sum", value, value)().values[1] == [3]
    assert [result.tolist() for result in strategy.extended.bind("sum", [(value, "cpu:0")])()] == [[3]]


def test_batches_may_mix_libraries_and_destinations():
    mixed = [*batch(np.array, shapes=((3,),)), *batch(LIBRARIES["torch"], shapes=((4,),))]
    pairs = list(zip(mixed, ("cpu:0", mixed[1]), strict=True))
    bound = cd.DirectAllReduce().bind("sum", pairs)
    for seed in range(2):
        refill(
            mixed, [*batch(np.array, seed, shapes=((3,),)), *batch(LIBRARIES["torch"], seed, shapes=((4,),))]
        )
        plain = cd.DirectAllReduce().batch_reduce("sum", pairs)
        flat = itertools.chain.from_iterable
        found, right = (
            list(flat([r.values if isinstance(r, cd.Mirrored) else (r,) for r in results]))
            for results in (bound(), plain)
        )
        assert [np.asarray(a).tobytes() for a in found] == [np.asarray(a).tobytes() for a in right]


@pytest.mark.usefixtures("kernels")
def test_memory_that_has_become_read_only_is_not_written():
    arrays = [np.float32([1, 2]), np.float32([3, 4])]
    out, in_place = np.zeros(2, np.float32), cd.PerReplica(arrays)
    bound = cd.bind(arrays, "sum", "cpu:0", out=out)
    itself = cd.DirectAllReduce().bind("sum", in_place, in_place, out=in_place)
    arrays[1].setflags(write=False)
    assert bound().tolist() == [4, 6]  # an input
    with pytest.raises(BoundError, match=r"replica 1 .* has become read-only"):
        itself()
    assert arrays[0].tolist() == [1, 2]
    out.setflags(write=False)
    with pytest.raises(BoundError, match=r"out.0. .* has become read-only; bind again"):
        bound()
    out.setflags(write=True)
    assert bound().tolist() == [4, 6]


def test_a_bound_reduction_that_cannot_be_pickled_says_what_to_do():
    bound = cd.bind([np.ones(2), np.ones(2)])
    with pytest.raises(BoundError, match=r"cannot be pickled or copied.*pickle its arrays"):
        pickle.dumps(bound)


def test_scalars_of_numpy_are_bound_beside_arrays():
    trees = [{"w": np.full(2, number, np.float32), "b": np.float32(number)} for number in (1, 2)]
    bound = cd.bind(trees, "sum", "cpu:0")
    trees[0]["w"] += 4
    assert {name: array.tolist() for name, array in bound().items()} == {"w": [7.0, 7.0], "b": 3.0}

    def program(group):
        bound = cd.CollectiveAllReduce(group=group).bind("sum", trees[group.rank], "cpu:0")
        return [float(bound()["b"]) for _ in range(2)]

    assert run_ranks(2, program) == [[3.0, 3.0]] * 2

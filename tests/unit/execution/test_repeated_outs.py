"""Calls with `out` that are made again: memory is checked each time, as in a first call."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

import crossdevice as cd
from crossdevice.backends.registry import backend_named
from crossdevice.errors import ContextError, OutError
from crossdevice.values.replica_scope import replica_scope

torch = pytest.importorskip("torch")
torch_backend = pytest.importorskip("crossdevice.backends.torch_backend")

LIBRARIES = {"numpy": np.array, "torch": lambda array: torch.from_numpy(np.array(array))}
SHAPES = ((3,), (2, 5), (), (0, 2), (7,))
SUMS = [[3.0] * int(np.prod(shape)) for shape in SHAPES]
OPTIONS = [cd.CommunicationOptions(precision=precision) for precision in ("accurate", "fast")]


@pytest.fixture(params=LIBRARIES)
def make(request):
    return LIBRARIES[request.param]


def batch(make, start=1, shapes=SHAPES, dtype=np.float32):
    """Two replicas of each shape: full of `start`, and of one more."""
    return [cd.PerReplica([make(np.full(shape, start + k, dtype)) for k in range(2)]) for shape in shapes]


def empty(make, shapes=SHAPES):
    return [tuple(make(np.full(shape, 9, np.float32)) for _ in range(2)) for shape in shapes]


def to_itself(values):
    return [(value, value) for value in values]


def numbers(array):
    return np.asarray(array).reshape(-1).tolist()


def components(result):
    return result.values if isinstance(result, cd.Mirrored) else (result,)


def check_written(results, outs):
    for result, out, right in zip(results, outs, SUMS, strict=True):
        for component, target in zip(components(result), out, strict=True):
            assert component is target
            assert numbers(component) == right


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.precision)
def test_in_place_has_the_bits_of_new_memory_however_often(make, options):
    random = np.random.default_rng(3)
    ops = cd.RingAllReduce()
    for _ in range(4):
        arrays = [[random.standard_normal(shape).astype(np.float32) for _ in range(3)] for shape in SHAPES]
        values = [cd.PerReplica(map(make, column)) for column in arrays]
        new = ops.batch_reduce("mean", to_itself(values), options)
        results = ops.batch_reduce("mean", to_itself(values), options, out=values)
        for value, result, other in zip(values, results, new, strict=True):
            for component, own, right in zip(result.values, value.values, other.values, strict=True):
                assert component is own
                assert np.asarray(component).tobytes() == np.asarray(right).tobytes()


@pytest.mark.parametrize("wrap", [list, tuple, cd.PerReplica, cd.Mirrored])
def test_memory_may_be_given_in_any_container(make, wrap):
    ops, values, outs = cd.DirectAllReduce(), batch(make), empty(make)
    for _ in range(3):
        check_written(ops.batch_reduce("sum", to_itself(values), out=list(map(wrap, outs))), outs)


def test_in_place_may_be_asked_for_in_any_container(make):
    ops = cd.DirectAllReduce()
    for _ in range(3):
        values = batch(make)
        outs = [list(value.values) for value in values]
        check_written(ops.batch_reduce("sum", to_itself(values), out=outs), outs)


def test_some_pairs_may_have_an_out_and_some_not(make):
    ops = cd.DirectAllReduce()
    for _ in range(3):
        values, new = batch(make), empty(make)
        outs = [values[0], None, new[2], None, [values[4].values[1], new[4][0]]]
        results = ops.batch_reduce("sum", to_itself(values), out=outs)
        check_written(results, [tuple(components(result)) for result in results])
        assert results[0].values[1] is values[0].values[1]
        assert results[2].values[1] is new[2][1]
        assert results[4].values[0] is values[4].values[1]
        assert [numbers(array)[:1] for array in (*values[1].values, values[4].values[0])] == [[1], [2], [1]]


def test_one_destination_takes_a_bare_array_one_of_the_inputs_included(make):
    ops = cd.DirectAllReduce()
    for _ in range(3):
        values, new = batch(make), empty(make)
        outs = [
            new[number][0] if number % 2 else value.values[number % 2] for number, value in enumerate(values)
        ]
        results = ops.batch_reduce("sum", [(value, "cpu:1") for value in values], out=outs)
        check_written(results, [(out,) for out in outs])


def test_given_and_not_given_take_turns(make):
    ops, outs = cd.DirectAllReduce(), empty(make)
    for turn in range(9):
        values = batch(make)
        out = (outs, None, values)[turn % 3]
        results = ops.batch_reduce("sum", to_itself(values), out=out)
        written = {0: outs, 2: [value.values for value in values]}
        check_written(results, written.get(turn % 3, [components(result) for result in results]))


def test_a_list_of_nothing_is_no_out(make):
    ops, values = cd.DirectAllReduce(), batch(make)
    for _ in range(3):
        results = ops.batch_reduce("sum", to_itself(values), out=[None] * len(values))
        check_written(results, [components(result) for result in results])


def test_an_out_that_is_the_same_memory_as_an_input_by_another_object_is_in_place(make):
    ops = cd.DirectAllReduce()
    for _ in range(3):
        values = batch(make, shapes=((3,), (2, 5)))
        outs = [[array[:] for array in value.values] for value in values]
        results = ops.batch_reduce("sum", to_itself(values), out=outs)
        assert [numbers(array) for value in values for array in value.values] == [[3.0] * 3] * 2 + [
            [3.0] * 10
        ] * 2
        assert results[1].values[1] is outs[1][1]


def made_known(make, shapes=SHAPES):
    """An object that knows a batch with `out`, its values, and its outputs."""
    ops, values, outs = cd.DirectAllReduce(), batch(make, shapes=shapes), empty(make, shapes)
    for _ in range(3):
        ops.batch_reduce("sum", to_itself(values), out=outs)
    return ops, values, outs


def check_refused_as_at_first(ops, values, outs, message):
    """With the words of an object that knows nothing, and before anything was written."""
    arrays = [array for value in values for array in value.values]
    arrays += [array for out in outs for array in out if hasattr(array, "dtype")]
    before = [numbers(array) for array in arrays]
    errors = []
    for asked in (cd.DirectAllReduce(), ops, ops):
        with pytest.raises(OutError, match=message) as caught:
            asked.batch_reduce("sum", to_itself(values), out=outs)
        errors.append(str(caught.value))
    assert len(set(errors)) == 1
    assert [numbers(array) for array in arrays] == before


REPLACEMENTS = {
    "dtype": (lambda make, out: (out[0], make(np.zeros((2, 5)))), "has dtype float64"),
    "shape": (lambda make, out: (out[0], make(np.zeros((5, 2), np.float32))), r"has shape \(5, 2\)"),
    "strides": (lambda make, out: (make(np.zeros((5, 2), np.float32)).T, out[1]), "not contiguous"),
    "number": (lambda make, out: out[:1], "1 component; expected 2"),
    "more": (lambda make, out: (*out, make(np.zeros((2, 5), np.float32))), "3 components; expected 2"),
    "a list": (lambda make, out: (out[0], [[0.0] * 5] * 2), "is a list; expected an array"),
    "nothing": (lambda make, out: (out[0], None), "is a NoneType; expected an array"),
    "twice": (lambda make, out: (out[0], out[0]), r"out\[0\] and out\[1\] overlap"),
}


@pytest.mark.parametrize("change", REPLACEMENTS)
def test_an_out_of_another_kind_is_refused_as_at_first(make, change):
    ops, values, outs = made_known(make)
    replace, message = REPLACEMENTS[change]
    outs[1] = replace(make, outs[1])
    check_refused_as_at_first(ops, values, outs, message)


def test_arrays_of_another_library_are_refused_as_at_first():
    for make, other in (LIBRARIES.values(), reversed(LIBRARIES.values())):
        ops, values, outs = made_known(make)
        outs[1] = (outs[1][0], other(np.zeros((2, 5), np.float32)))
        check_refused_as_at_first(ops, values, outs, "expected an array of")


def test_a_list_of_another_length_is_refused(make):
    ops, values, outs = made_known(make)
    with pytest.raises(OutError, match="4 entries; expected a list of one for each of 5 pairs"):
        ops.batch_reduce("sum", to_itself(values), out=outs[:4])


def test_an_out_that_has_become_read_only_is_refused_as_at_first():
    ops, values, outs = made_known(np.array)
    outs[1][1].flags.writeable = False
    check_refused_as_at_first(ops, values, outs, r"out\[1\] \(cpu:1\) is read-only")
    outs[1][1].flags.writeable = True
    check_written(ops.batch_reduce("sum", to_itself(values), out=outs), outs)


def test_an_input_that_has_become_read_only_is_not_reduced_in_place():
    ops, values = cd.DirectAllReduce(), batch(np.array)
    for _ in range(3):
        ops.batch_reduce("max", to_itself(values), out=values)
    values[4].values[0].flags.writeable = False
    with pytest.raises(OutError, match=r"out\[0\] \(cpu:0\) is read-only"):
        ops.batch_reduce("max", to_itself(values), out=values)


def test_byte_order_counts():
    ops, values, outs = made_known(np.array)
    outs[4] = (outs[4][0], outs[4][1].astype(">f4"))
    check_refused_as_at_first(ops, values, outs, r"\(cpu:1\) is not native")


def test_views_as_conjugates_count():
    shapes = ((3,), (4,))
    ops, values = cd.DirectAllReduce(), batch(LIBRARIES["torch"], shapes=shapes, dtype=np.complex64)
    outs = [tuple(torch.zeros(shape, dtype=torch.complex64) for _ in range(2)) for shape in shapes]
    for _ in range(3):
        ops.batch_reduce("sum", to_itself(values), out=outs)
    outs[0] = (outs[0][0], outs[0][1].conj())
    with pytest.raises(OutError, match=r"out\[1\] \(cpu:1\) is a view that conjugates or negates; copy"):
        ops.batch_reduce("sum", to_itself(values), out=outs)


def test_outs_that_have_come_to_overlap_each_other_are_refused_as_at_first(make):
    ops, values, outs = made_known(make)
    memory = make(np.zeros(12, np.float32))
    outs[0], outs[4] = (outs[0][0], memory[:3]), (memory[2:9], outs[4][1])
    check_refused_as_at_first(ops, values, outs, r"out\[1\] and out\[0\] overlap in memory")


def test_an_out_that_has_come_to_overlap_an_input_of_its_own_is_refused_as_at_first(make):
    ops, values, outs = made_known(make)
    memory = make(np.ones(12, np.float32))
    values[4] = cd.PerReplica([memory[:7], values[4].values[1]])
    outs[4] = (outs[4][0], memory[3:10])
    check_refused_as_at_first(ops, values, outs, r"out\[1\] overlaps replica 0 in memory without being it")


def test_an_out_that_has_come_to_be_an_input_of_another_value_is_refused_as_at_first(make):
    shapes = ((3,), (3,), (2,))
    ops, values, outs = made_known(make, shapes)
    outs[0] = (outs[0][0], values[1].values[0])
    check_refused_as_at_first(ops, values, outs, r"out\[1\] overlaps replica 0 in memory without being it")


def test_an_input_that_has_come_to_be_an_out_of_another_value_is_refused_as_at_first(make):
    shapes = ((3,), (3,), (2,))
    ops, values, outs = made_known(make, shapes)
    values[2] = cd.PerReplica([outs[1][1][:2], values[2].values[1]])
    check_refused_as_at_first(ops, values, outs, r"out\[1\] overlaps replica 0 in memory without being it")


def test_an_input_without_an_out_is_compared_too(make):
    ops, values, new = cd.DirectAllReduce(), batch(make), empty(make)
    for _ in range(3):
        ops.batch_reduce("sum", to_itself(values), out=[None, *new[1:]])
    new[4] = (new[4][0], make(np.zeros(8, np.float32))[1:])
    values[0] = cd.PerReplica([values[0].values[0], new[4][1][2:5]])
    with pytest.raises(OutError, match=r"out\[1\] overlaps replica 1 in memory"):
        ops.batch_reduce("sum", to_itself(values), out=[None, *new[1:]])


def test_strides_of_inputs_count(make):
    """From the same first element, an array with gaps reaches further."""
    memory = make(np.ones(12, np.float32))
    near, far = memory[:3], memory[0:9:4]
    values, outs = batch(make, shapes=((3,), (3,))), empty(make, ((3,), (3,)))
    ops = cd.DirectAllReduce()
    outs[1] = (memory[5:8], outs[1][1])
    for _ in range(3):
        values[0] = cd.PerReplica([near, values[0].values[1]])
        ops.batch_reduce("sum", to_itself(values), out=outs)
    values[0] = cd.PerReplica([far, values[0].values[1]])
    check_refused_as_at_first(ops, values, outs, r"out\[0\] overlaps replica 0 in memory")


def test_a_tensor_that_was_moved_or_resized_is_seen():
    ops, values, outs = made_known(LIBRARIES["torch"])
    outs[4][0].set_(torch.full((7,), 9.0))
    check_written(ops.batch_reduce("sum", to_itself(values), out=outs), outs)
    outs[4][0].set_(outs[4][1])
    check_refused_as_at_first(ops, values, outs, r"out\[0\] and out\[1\] overlap")
    outs[4][0].set_(torch.zeros(7))
    outs[4][0].resize_(6)
    check_refused_as_at_first(ops, values, outs, r"has shape \(6,\); expected \(7,\)")


def test_an_array_that_was_reshaped_is_seen():
    ops, values, outs = made_known(np.array)
    outs[1] = (outs[1][0], outs[1][1].view())
    outs[1][1].shape = (5, 2)
    check_refused_as_at_first(ops, values, outs, r"has shape \(5, 2\); expected \(2, 5\)")


def test_in_place_no_more_is_noticed(make):
    """Values and outputs that were the same objects may be swapped for others that only look so."""
    ops = cd.DirectAllReduce()
    for _ in range(3):
        values = batch(make)
        ops.batch_reduce("sum", to_itself(values), out=[list(value.values) for value in values])
    values = batch(make)
    outs = [list(value.values) for value in values]
    outs[0], outs[4] = list(reversed(outs[0])), [outs[4][0], make(np.zeros(7, np.float32))]
    check_written(ops.batch_reduce("sum", to_itself(values), out=outs), outs)
    assert numbers(values[4].values[1]) == [2.0] * 7


def test_a_known_batch_is_refused_in_a_replica_before_its_memory_is_looked_at(make):
    ops, values, outs = made_known(make)
    outs[4] = (outs[4][0], values[0].values[0])
    with replica_scope(1), pytest.raises(ContextError, match="batch_reduce was called inside replica 1"):
        ops.batch_reduce("sum", to_itself(values), out=outs)


def test_outputs_are_not_kept(make):
    ops, values, outs = made_known(make)
    gone = [weakref.ref(array) for out in outs for array in out]
    del outs
    assert [reference() for reference in gone] == [None] * len(gone)
    others = empty(make)
    check_written(ops.batch_reduce("sum", to_itself(values), out=others), others)


@pytest.mark.parametrize("takes_lists", [True, False], ids=["at once", "one by one"])
def test_tensors_know_that_they_were_written_to(monkeypatch, takes_lists):
    increment = torch.autograd.graph.increment_version

    def of_one(tensor):
        if not isinstance(tensor, torch.Tensor):
            raise RuntimeError("increment_version expect a Tensor as input")
        increment(tensor)

    if not takes_lists:
        monkeypatch.setattr(torch.autograd.graph, "increment_version", of_one)
    ops, values, outs = made_known(LIBRARIES["torch"])
    before = [array._version for out in outs for array in out]
    ops.batch_reduce("sum", to_itself(values), out=outs)
    assert [array._version for out in outs for array in out] == [version + 1 for version in before]


def test_one_value_is_written_and_refused_in_the_same_way(make):
    ops, out = cd.DirectAllReduce(), empty(make, ((3,),))[0]
    for _ in range(4):
        (value,) = batch(make, shapes=((3,),))
        check = ops.reduce("sum", value, value, out=out)
        assert check.values[1] is out[1]
        assert numbers(out[1]) == [3.0] * 3
        ops.reduce("sum", value, value, out=value)
        assert [numbers(array) for array in value.values] == [[3.0] * 3] * 2
    for _ in range(3):
        ops.reduce("sum", value, value, out=out)
    for wrong in ((out[0], out[0]), (out[0], make(np.zeros(3))), (out[0], value.values[1][:2]), out[:1]):
        messages = []
        for asked in (cd.DirectAllReduce(), ops):
            with pytest.raises(OutError) as caught:
                asked.reduce("sum", value, value, out=wrong)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


def test_one_array_that_has_become_read_only_is_refused_as_at_first():
    (value,), options = batch(np.array, shapes=((3,),)), cd.CommunicationOptions(precision="fast")
    for ops in (cd.DirectAllReduce(), cd.RingAllReduce()):
        for _ in range(3):
            ops.reduce("max", value, value, options, out=value)
        value.values[1].flags.writeable = False
        with pytest.raises(OutError, match=r"out\[1\] \(cpu:1\) is read-only"):
            ops.reduce("max", value, value, options, out=value)
        value.values[1].flags.writeable = True


def test_addresses_of_tensors_are_those_of_first_elements():
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    found = backend_named("torch").addresses_of([whole, whole[1:], whole[:, 2:], whole.T, whole[3, 5:]])
    start = whole.data_ptr()
    assert found == [start, start + 24, start + 8, start, start + 92]

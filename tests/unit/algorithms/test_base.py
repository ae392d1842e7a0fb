"""Facts about CrossDeviceOps itself: hooks, memory of earlier calls, explanations."""

import pickle

import array_api_strict
import numpy as np
import pytest

from crossdevice import (
    AllReduceCrossDeviceOps,
    CollectiveAllReduce,
    CommunicationOptions,
    CrossDeviceOps,
    DirectAllReduce,
    Mirrored,
    PerReplica,
    ReduceOp,
    ReductionToOneDevice,
    RingAllReduce,
)
from crossdevice.errors import ContextError, CrossDeviceError, MismatchError, OptionError
from crossdevice.values.replica_scope import replica_scope


class Product(CrossDeviceOps):
    """Brings its own arithmetic, and nothing else; does not even call the base's constructor."""

    def __init__(self):
        self.seen = []

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        self.seen.append((reduce_op, type(per_replica_value), options))
        product = np.prod(np.stack(per_replica_value.values), axis=0)
        return self.broadcast_implementation(product, destinations)


def values(*numbers):
    return PerReplica([np.float32([number]) for number in numbers])


def test_a_subclass_with_its_own_reduce_implementation_works_wherever_a_built_in_does():
    ops = Product()
    value = values(2, 3, 4)
    assert [part.tolist() for part in ops.reduce("sum", value, value).values] == [[24]] * 3
    assert ops.batch_reduce("sum", [(value, "cpu:0"), (values(5, 6), "cpu:1")]) == [[24], [30]]
    tree = PerReplica([{"a": np.float32([2]), "b": [np.float32([3])]}] * 2)
    assert ops.reduce("sum", tree, "cpu:0") == {"a": [4], "b": [[9]]}
    assert ops.reduce("sum", {"x": value}, value)["x"].values[2] == [24]
    out = [np.zeros(1, np.float32) for _ in range(3)]
    ops.reduce("sum", value, value, out=out)
    assert [part.tolist() for part in out] == [[24]] * 3
    assert ops.gather(value, "cpu:0").tolist() == [2, 3, 4]
    assert ops.seen[0] == (ReduceOp.SUM, PerReplica, CommunicationOptions())


def test_a_lone_replica_that_stays_where_it_is_needs_no_hook():
    ops = Product()
    assert ops.reduce("mean", PerReplica([np.int32([3])]), "cpu:0").dtype == np.float64
    assert ops.seen == []


def test_a_subclass_may_override_the_batch_alone():
    class Counting(CrossDeviceOps):
        def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
            number = len(value_destination_pairs)
            return [np.float32([number])] * number

    assert Counting().batch_reduce("sum", [(values(1, 2), "cpu:0")] * 3) == [3, 3, 3]
    assert Counting().reduce("sum", values(1, 2), "cpu:0") == 1, "a batch of one"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda pairs: [1.0] * (len(pairs) - 1), "returned 1 result for 2 values; expected one for each"),
        (lambda pairs: [1.0] * (len(pairs) + 1), "returned 3 results for 2 values; expected one for each"),
        (lambda _: None, "returned None for 2 values; expected a list with one result for each"),
        (lambda _: np.ones(2), "returned an ndarray for 2 values; expected a list"),
        (lambda pairs: [None] * len(pairs), "returned None for a value; expected the result on .*cpu:0"),
        (
            lambda pairs: [value for value, _ in pairs],
            "returned a result with 2 components for 1 destination .*cpu:0.*; expected one for each",
        ),
    ],
    ids=["too few", "too many", "None", "an array", "a list of None", "too many components"],
)
def test_results_of_a_hook_for_batches_are_counted(answer, message):
    class Odd(CrossDeviceOps):
        def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
            return answer(value_destination_pairs)

    with pytest.raises(MismatchError, match=f"Odd.batch_reduce_implementation {message}"):
        Odd().batch_reduce("sum", [(values(1, 2), "cpu:0")] * 2)
    tree = PerReplica([{"a": np.float32([2]), "b": np.float32([3])}] * 2)
    with pytest.raises(MismatchError, match=f"Odd.batch_reduce_implementation {message}"):
        Odd().reduce("sum", tree, "cpu:0")


def test_results_of_a_hook_for_one_value_or_a_broadcast_are_counted():
    class Odd(CrossDeviceOps):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            return None if destinations == "cpu:0" else 1.0

        def broadcast_implementation(self, tensor, destinations):
            return None

    for call in (Odd().reduce, lambda op, *pair: Odd().batch_reduce(op, [pair])):
        with pytest.raises(MismatchError, match=r"Odd\.reduce_implementation returned None for a value"):
            call("sum", values(1, 2), "cpu:0")
        with pytest.raises(MismatchError, match="with 1 component for 2 destinations"):
            call("sum", values(1, 2), values(1, 2))
    with pytest.raises(MismatchError, match=r"Odd\.broadcast_implementation returned None"):
        Odd().broadcast(1.0, "cpu:0")


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (np.float32([1, 2]), r"an array of numpy, float32 \(2,\)"),
        (np.float32(1), r"an array of numpy, float32 \(\)"),
        (np.float64([1]), r"an array of numpy, float64 \(1,\)"),
        (array_api_strict.ones(1, dtype=array_api_strict.float32), "an array of array_api_strict, float32"),
        ([1.0], "a list"),
        (1.0, "a float"),
    ],
    ids=["longer", "a scalar", "wider", "another library", "a list", "a number"],
)
def test_results_of_a_hook_have_library_dtype_and_shape_of_the_value(answer, found):
    class Odd(CrossDeviceOps):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            second = answer if destinations == "cpu:0" else Mirrored([np.float32([3]), answer])
            return np.float32([3]) if per_replica_value.values[0] == 7 else second

    message = rf"Odd\.reduce_implementation returned for cpu:{{}} {found}.*; expected an array of numpy, "
    with pytest.raises(MismatchError, match=message.format(0) + r"float32 \(1,\)"):
        Odd().reduce("sum", values(1, 2), "cpu:0")
    with pytest.raises(MismatchError, match=message.format(1)):
        Odd().batch_reduce("sum", [(values(7, 8), "cpu:0"), (values(1, 2), values(1, 2))])
    tree = PerReplica([{"a": np.float32([7]), "b": np.float32([1])}] * 2)
    with pytest.raises(MismatchError, match=r"returned for cpu:0 .* at value\['b'\]; expected"):
        Odd().reduce("sum", tree, "cpu:0")


def test_a_mean_of_integers_by_a_hook_is_one_of_floats():
    class Odd(CrossDeviceOps):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            return sum(per_replica_value.values)

    whole = PerReplica([np.int32([1]), np.int32([2])])
    assert Odd().reduce("sum", whole, "cpu:0") == [3]
    with pytest.raises(MismatchError, match=r"numpy, int32 \(1,\); expected an array of numpy, float64"):
        Odd().reduce("mean", whole, "cpu:0")


def test_a_subclass_may_call_the_bases_implementation():
    class Doubling(RingAllReduce):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            result = super().reduce_implementation(reduce_op, per_replica_value, destinations, options)
            return result * 2

    assert Doubling().reduce("sum", values(1, 2), "cpu:0") == [6]


def test_the_base_class_broadcasts_gathers_and_copies_lone_values_but_has_no_algorithm():
    ops = CrossDeviceOps()
    assert ops.broadcast(2.0, values(0, 0)).values[1] == 2
    assert ops.reduce("sum", 2.0, "cpu:0") == 2
    assert ops.gather(values(1, 2), "cpu:0").tolist() == [1, 2]
    for options in (None, CommunicationOptions(precision="fast"), CommunicationOptions(lowering="off")):
        with pytest.raises(NotImplementedError, match="overrides neither plan_sum nor reduce") as raised:
            ops.reduce("sum", values(1, 2), "cpu:0", options)
        assert isinstance(raised.value, CrossDeviceError)
        assert "expected plan_sum, which returns a buffer" in str(raised.value)


@pytest.mark.parametrize("lowering", ["auto", "off"])
def test_the_second_call_gives_the_bits_of_the_first_and_has_memory_of_its_own(lowering):
    ops, value = DirectAllReduce(), values(1, 2)
    options = CommunicationOptions(lowering=lowering)
    first = ops.reduce("mean", value, value, options)
    second = ops.reduce("mean", PerReplica([part.copy() for part in value.values]), value, options)
    assert [part.tolist() for part in first.values + second.values] == [[1.5]] * 4
    first.values[0][:] = 7
    assert second.values[0] == [1.5]


def test_a_remembered_call_is_refused_in_a_replica_too():
    ops, value = DirectAllReduce(), values(1, 2)
    ops.reduce("sum", value, value)
    with replica_scope(1), pytest.raises(ContextError, match="reduce was called inside replica 1"):
        ops.reduce("sum", value, value)


def test_a_remembered_call_still_notices_other_shapes():
    ops = DirectAllReduce()
    ops.reduce("sum", values(1, 2), "cpu:0")
    with pytest.raises(ValueError, match=r"replica 1 \(cpu:1\) has shape \(2,\)"):
        ops.reduce("sum", PerReplica([np.float32([1]), np.float32([1, 2])]), "cpu:0")


def test_settings_changed_later_count():
    ops, value = ReductionToOneDevice(), values(1, 2)
    assert ops.reduce("sum", value, "cpu:0") == [3]
    ops.accumulation_fn = lambda arrays: arrays[0]
    assert ops.reduce("sum", value, "cpu:0") == [1]
    ops.accumulation_fn = None
    assert ops.reduce("sum", value, "cpu:0") == [3]


def test_shared_results_are_one_read_only_array():
    value = values(1, 2, 3)
    shared = RingAllReduce().reduce("sum", value, value, CommunicationOptions(share_results=True))
    first, *others = shared.values
    assert first == [6]
    assert all(np.shares_memory(first, other) for other in others)
    assert not np.shares_memory(first, value.values[0])
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 1


def test_a_shared_broadcast_copies_nothing():
    source = np.float32([1, 2])
    copies = DirectAllReduce().broadcast(
        source, values(0, 0), options=CommunicationOptions(share_results=True)
    )
    assert all(np.shares_memory(source, copy) for copy in copies.values)
    with pytest.raises(ValueError, match="read-only"):
        copies.values[0][0] = 7
    assert source.flags.writeable


def test_explain_says_what_would_happen():
    text = RingAllReduce(num_packs=2).explain(
        PerReplica([{"a": np.zeros(3), "b": np.zeros(5)}] * 2), "cpu:0", CommunicationOptions(lowering="off")
    )
    first, second, *_ = text.splitlines()
    assert first == "RingAllReduce: SUM of 2 replicas, precision accurate"
    assert second.startswith("pack 0 (2 values of float64): ")
    assert "pack 1" in text
    assert "fused" not in text


class Rotated(CrossDeviceOps):
    """Each destination sums in an order of its own."""

    def plan_sum(self, build, destinations):
        turned = [build.inputs[turn:] + build.inputs[:turn] for turn in range(len(destinations))]
        return [build.add(inputs, at=device) for inputs, device in zip(turned, destinations, strict=True)]


def test_in_place_is_right_even_if_destinations_are_summed_in_different_orders():
    value = values(1, 10, 100)
    Rotated().reduce("sum", value, value, CommunicationOptions(precision="fast"), out=value)
    assert [part.tolist() for part in value.values] == [[111]] * 3


def test_objects_can_be_pickled_and_found_again_after_calls():
    ops, value = RingAllReduce(), values(1, 2)
    ops.reduce("sum", value, value, out=value)
    again = pickle.loads(pickle.dumps(ops))
    assert again.reduce("sum", values(1, 2), "cpu:0") == [3]
    device, options = pickle.loads(pickle.dumps((value.devices[1], CommunicationOptions(precision="fast"))))
    assert device in {value.devices[1]}
    assert options in {CommunicationOptions(precision="fast")}


def test_out_that_changed_its_memory_is_looked_at_again():
    ops, value = DirectAllReduce(), values(1, 2)
    out = [np.zeros(1, np.float32), np.zeros(1, np.float32)]
    for _ in range(2):
        ops.reduce("sum", value, value, out=out)
    out[1].resize((4,), refcheck=False)
    with pytest.raises(ValueError, match=r"out\[1\] \(cpu:1\) has shape \(4,\)"):
        ops.reduce("sum", value, value, out=out)


def test_the_number_of_packs_can_be_read_and_set():
    value = PerReplica([np.ones(8, np.float32)] * 2)
    for ops in (RingAllReduce(num_packs=np.int64(2)), AllReduceCrossDeviceOps("tree", num_packs=2)):
        ops.reduce("sum", value, value)
        assert ops.num_packs == 2
        ops.num_packs = np.int32(4)
        assert ops.num_packs == 4
        text = ops.explain(value, value, CommunicationOptions(lowering="off"))
        assert sum(line.startswith("pack ") for line in text.splitlines()) == 4
        with pytest.raises(OptionError, match="num_packs must be 0 or more"):
            ops.num_packs = -1
        assert ops.num_packs == 4


@pytest.mark.parametrize(
    ("ops", "text"),
    [
        (RingAllReduce(), "RingAllReduce()"),
        (RingAllReduce(num_packs=3), "RingAllReduce(num_packs=3)"),
        (ReductionToOneDevice("cpu:2"), "ReductionToOneDevice(reduce_to_device=Device('cpu:2'))"),
        (
            AllReduceCrossDeviceOps("ring", 0, 64, 3),
            "AllReduceCrossDeviceOps(all_reduce_alg='ring', num_packs=0, agg_small_grads_max_bytes=64, "
            "agg_small_grads_max_group=3)",
        ),
        (CollectiveAllReduce(), "CollectiveAllReduce()"),
        (CrossDeviceOps(), "CrossDeviceOps()"),
    ],
)
def test_an_algorithm_shows_the_settings_that_are_not_the_defaults(ops, text):
    assert repr(ops) == text

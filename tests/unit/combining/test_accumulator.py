"""Trees added one by one: the same bits as all at once, in the memory of one, from any thread."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import pickle
import threading
import weakref
from collections import OrderedDict
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import crossdevice as cd
from crossdevice.combining import accumulator as accumulator_module
from crossdevice.errors import (
    ContextError,
    ConversionError,
    DtypeMismatchError,
    FileError,
    LibraryMismatchError,
    OptionError,
    ShapeMismatchError,
    StructureMismatchError,
)

WEIGHTS = [20, 50, 35, 80, 10]


def f32(*numbers):
    return np.array(numbers, np.float32)


def models(number=5):
    random = np.random.default_rng(0)
    return [
        {
            "layer": [random.standard_normal((3, 4)).astype(np.float32), random.standard_normal(2)],
            "half": random.standard_normal(5).astype(np.float16),
            "brain": random.standard_normal(70).astype(ml_dtypes.bfloat16),
            "wave": (random.standard_normal(3) + 1j * random.standard_normal(3)).astype(np.complex64),
        }
        for _ in range(number)
    ]


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in cd.values.nesting.flatten(tree)[0]]


def accumulated(trees, weights=None, **settings):
    total = cd.Accumulator(**settings)
    for tree, weight in zip(trees, weights or [1] * len(trees), strict=True):
        total.add(tree, weight)
    return total


@pytest.mark.parametrize("max_pending", [1, 3])
@pytest.mark.parametrize("precision", ["accurate", "exact"])
def test_it_has_the_bits_of_all_at_once(precision, max_pending):
    trees, options = models(), cd.CommunicationOptions(precision=precision)
    total = accumulated(trees, precision=precision, max_pending=max_pending)
    assert bits(total.mean()) == bits(cd.reduce(trees, "mean", options=options))
    assert bits(total.sum()) == bits(cd.reduce(trees, "sum", options=options))
    assert total.count == 5
    weighted = accumulated(trees, WEIGHTS, precision=precision, max_pending=max_pending)
    assert bits(weighted.mean()) == bits(cd.reduce(trees, "mean", options=options, weights=WEIGHTS))


def test_exact_means_do_not_depend_on_the_order_nor_on_who_added_what():
    trees = models()
    right = bits(accumulated(trees, WEIGHTS, precision="exact").mean())
    for order in itertools.islice(itertools.permutations(range(5)), 0, 120, 17):
        parts = [
            accumulated([trees[k] for k in some], [WEIGHTS[k] for k in some], precision="exact")
            for some in (order[:2], order[2:])
        ]
        parts[0].merge(parts[1])
        assert bits(parts[0].mean()) == right
        assert parts[0].count == 5


@pytest.mark.parametrize("precision", ["accurate", "exact"])
def test_merging_keeps_infinities(precision):
    corners = [1.0, -0.0, np.inf, -np.inf, np.nan, 1.7e308]
    for first, second in itertools.product(corners, repeat=2):
        whole = accumulated([np.float64([first]), np.float64([second])], precision=precision)
        parts = [accumulated([np.float64([each])], precision=precision) for each in (first, second)]
        parts[0].merge(parts[1])
        assert bits(parts[0].sum()) == bits(whole.sum()), (first, second)


def test_clients_may_arrive_in_threads():
    trees = models()
    total = cd.Accumulator("exact", max_pending=2)
    threads = [threading.Thread(target=total.add, args=pair) for pair in zip(trees, WEIGHTS, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bits(total.mean()) == bits(accumulated(trees, WEIGHTS, precision="exact").mean())


def test_arrays_may_change_once_they_were_added():
    array = f32(1, 2)
    total = cd.Accumulator()
    total.add(array)
    array[:] = 5
    total.add(array)
    assert total.mean().tolist() == [3, 3.5]
    assert total.sum().tolist() == [6, 7], "a result leaves the sums as they are"


def test_it_holds_one_model_however_many_were_added():
    total, arrays = cd.Accumulator(), []
    for number in range(20):
        array = np.full(100, number, np.float32)
        arrays.append(weakref.ref(array))
        total.add({"a": array, "b": array.astype(np.float64)})
    del array
    assert all(array() is None for array in arrays)
    held = [part for leaf in total._totals.values() for part in leaf.running.parts]
    assert sum(part.nbytes for part in held) == 100 * 8 + 100 * 2 * 8


def test_each_leaf_counts_the_weights_of_those_that_had_it():
    total = cd.Accumulator(partial=True)
    total.add({"a": f32(1), "deep": {"b": f32(4)}}, 3)
    total.add({"a": f32(5)}, 1)
    total.add({"deep": {"c": f32(7)}}, 2)
    mean = total.mean()
    assert mean == {"a": f32(2), "deep": {"b": f32(4), "c": f32(7)}}
    with pytest.raises(
        StructureMismatchError, match=r"tree 3 has another structure at tree\['deep'\]\['b'\]"
    ):
        total.add({"deep": {"b": [f32(1)]}})
    assert total.count == 3


@pytest.mark.parametrize(
    ("tree", "error", "message"),
    [
        ({"a": f32(1)}, StructureMismatchError, r"tree 1 lacks tree\['b'\], unlike .* partial=True"),
        ({"a": f32(1), "b": f32(1), "c": f32(1)}, StructureMismatchError, r"tree 1 has tree\['c'\]"),
        (OrderedDict(a=f32(1), b=f32(1)), StructureMismatchError, "other containers: .*OrderedDict"),
        (
            {"a": f32(1, 2), "b": f32(1)},
            ShapeMismatchError,
            r"tree 1 has shape \(2,\) at tree\['a'\]; .* \(1,\)",
        ),
        ({"a": f32(1), "b": np.ones(1)}, DtypeMismatchError, r"dtype float64 at tree\['b'\]; .* float32"),
        ({"a": f32(1), "b": "text"}, ConversionError, r"a str at tree\['b'\]"),
        ({"a": f32(1), "b": np.array(["text"])}, ConversionError, r"tree\['b'\] has dtype"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_path_and_leaves_everything_as_it_was(tree, error, message):
    total = accumulated([{"a": f32(1), "b": f32(2)}])
    with pytest.raises(error, match=message):
        total.add(tree)
    assert total.count == 1
    total.add({"a": f32(3), "b": f32(4)})
    assert total.mean() == {"a": f32(2), "b": f32(3)}


def test_bad_settings_and_weights_are_refused():
    for settings in (
        {"precision": "fast"},
        {"integers": "median"},
        {"max_pending": 0},
        {"max_pending": True},
    ):
        with pytest.raises(OptionError, match=next(iter(settings))):
            cd.Accumulator(**settings)
    total = cd.Accumulator()
    for weight in (float("nan"), float("inf"), "3", None, 1j, True, np.ones(2)):
        with pytest.raises(OptionError, match=r"^weight is"):
            total.add(f32(1), weight)
    for weight, shown in (
        (10**400, "1000.*\\.\\.\\."),
        (10**5000, "an int of too many digits"),
        (np.ones(99), "array"),
    ):
        with pytest.raises(OptionError, match=f"^weight is {shown}") as refused:
            total.add(f32(1), weight)
        assert len(str(refused.value)) < 150
    with pytest.raises(ContextError, match="nothing has been added"):
        total.mean()
    total.add(f32(1), 0)
    with pytest.raises(OptionError, match="add up to 0"):
        total.mean()
    with pytest.raises(OptionError, match="itself"):
        total.merge(total)
    with pytest.raises(OptionError, match="merge takes another Accumulator, got dict"):
        total.merge({"w": f32(1)})
    with pytest.raises(OptionError, match="precision='exact'; this one has 'accurate'"):
        total.merge(cd.Accumulator("exact"))
    with pytest.raises(ConversionError, match="2 replicas"):
        total.add(cd.PerReplica([f32(1), f32(2)]))


def test_integers_follow_the_policy():
    trees = [{"steps": np.int64(number), "on": np.array([True, number > 5])} for number in (4, 7, 7)]
    for policy, steps, on in (
        ("mean", 6, [True, True]),
        ("first", 4, [True, False]),
        ("max", 7, [True, True]),
    ):
        total = accumulated(trees, integers=policy)
        assert total.mean()["steps"] == steps
        assert total.mean()["steps"].dtype == np.int64
        assert total.mean()["on"].tolist() == on
        other = accumulated(trees[:1], integers=policy)
        other.merge(accumulated(trees[1:], integers=policy))
        assert bits(other.mean()) == bits(total.mean())


def test_sums_of_integers_end_where_their_dtype_does():
    models = [{"a": np.int8([100, -100, 7]), "b": np.uint16([9, 65000, 0])}] * 3
    assert accumulated(models).sum()["a"].tolist() == [127, -128, 21]
    assert accumulated(models, [-1, 0, 0]).sum()["b"].tolist() == [0, 0, 0]
    assert accumulated(models).sum()["b"].tolist() == [27, 65535, 0]


def test_weights_that_float64_cannot_add_up_are_added_up():
    weights = [1e17, 1.0, 1.0, 1.0]
    total = accumulated([f32(1), f32(1), f32(1), f32(1)], weights, precision="exact")
    assert total.mean().tolist() == [1.0]
    assert total._totals[""].weight == sum(map(Fraction, weights))


def test_a_saved_accumulator_goes_on(tmp_path):
    trees = [
        {**tree, "n": np.int32(k), "huge": np.array([1e300, np.inf][k % 2 :][:1])}
        for k, tree in enumerate(models())
    ]
    for precision, integers in (("accurate", "mean"), ("exact", "max")):
        settings = {"precision": precision, "integers": integers, "max_pending": 2}
        half = accumulated(trees[:3], WEIGHTS[:3], **settings)
        half.save(tmp_path / "half.npz")
        again = cd.Accumulator.load(tmp_path / "half.npz")
        assert again.count == 3
        for total in (half, again):
            for tree, weight in zip(trees[3:], WEIGHTS[3:], strict=True):
                total.add(tree, weight)
        assert bits(again.mean()) == bits(half.mean())
        assert again.mean().keys() == half.mean().keys()
    assert [path.name for path in tmp_path.iterdir()] == ["half.npz"]


@pytest.mark.parametrize(
    "copied",
    [lambda total: pickle.loads(pickle.dumps(total)), copy.copy, copy.deepcopy],
    ids=["pickle", "copy", "deep"],
)
def test_copies_go_on_by_themselves(copied):
    trees = models(3)
    total = accumulated(trees[:2], precision="exact", max_pending=3)
    other = copied(total)
    other.add(trees[2])
    assert bits(other.mean()) == bits(accumulated(trees, precision="exact").mean())
    assert bits(total.mean()) == bits(accumulated(trees[:2], precision="exact").mean())
    assert (total.count, other.count) == (2, 3)


@pytest.mark.parametrize("name", ["total", "total.npz", "total.npy"])
def test_any_name_will_do_for_a_saved_accumulator(name, tmp_path):
    accumulated([f32(1)]).save(tmp_path / name)
    assert cd.Accumulator.load(tmp_path / name).mean() == f32(1)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_files_that_are_no_accumulators_are_refused(tmp_path):
    np.savez(tmp_path / "other.npz", a=np.ones(2))
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 and no more")
    for name in ("other.npz", "broken.npz", "missing.npz"):
        with pytest.raises(FileError, match=name):
            cd.Accumulator.load(tmp_path / name)
    with pytest.raises(ConversionError, match="key"):
        accumulated([{1.5: f32(1)}]).save(tmp_path / "float_key.npz")
    with pytest.raises(FileError, match="no_folder"):
        accumulated([f32(1)]).save(tmp_path / "no_folder" / "a.npz")


def test_no_accumulator_takes_the_place_of_a_device_or_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(FileError, match="not a regular file"):
        accumulated([f32(1)]).save(tmp_path / "pipe.npz")
    assert (tmp_path / "pipe.npz").is_fifo()


def test_an_interrupted_add_is_never_taken_for_a_whole_one(monkeypatch):
    total = accumulated([{"a": f32(1), "b": f32(2)}])

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(total._totals["tree['b']"], "enter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        total.add({"a": f32(1), "b": f32(2)})
    for call in (total.mean, lambda: total.add({"a": f32(1), "b": f32(2)})):
        with pytest.raises(ContextError, match="interrupted"):
            call()


@pytest.mark.parametrize("interrupted", ["add_all", "results_of"])
def test_an_interrupted_mean_leaves_a_complete_accumulator_as_it_was(interrupted, monkeypatch):
    total = accumulated([{"a": f32(1), "b": f32(2)}])

    def interrupts(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(accumulator_module, interrupted, interrupts)
        with contextlib.suppress(KeyboardInterrupt):
            total.mean()
    total.add({"a": f32(3), "b": f32(4)})
    assert bits(total.mean()) == bits({"a": f32(2), "b": f32(3)})


def test_tensors_come_back_as_tensors():
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(torch.bfloat16)
    states = []
    for number in range(3):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(number)
        module[1].num_batches_tracked += 5
        states.append({name: tensor.clone() for name, tensor in module.state_dict().items()})
    total = accumulated(states, [1, 2, 3])
    mean = total.mean()
    module.load_state_dict(mean)
    assert mean["0.weight"].dtype == torch.bfloat16
    assert mean["1.num_batches_tracked"].dtype == torch.int64
    assert mean["1.num_batches_tracked"] == round((5 + 20 + 45) / 6)
    right = sum(w * state["0.weight"].double() for w, state in zip((1, 2, 3), states, strict=True)) / 6
    assert (mean["0.weight"].double() - right).abs().max() <= right.abs().max() * 2**-8
    with pytest.raises(LibraryMismatchError, match="an array of numpy"):
        total.add({name: np.asarray(tensor.float()) for name, tensor in states[0].items()})


def test_plain_numbers_count_as_arrays():
    assert float(accumulated([1.0, 2.0, 6.0]).mean()) == 3.0


def test_a_saved_accumulator_keeps_all_parts_of_sums_that_have_more_than_usual(tmp_path):
    random = np.random.default_rng(6)
    arrays = [
        (random.standard_normal(20_000) * 2.0 ** random.integers(-120, 120, 20_000)).astype(np.float32)
        for _ in range(5)
    ]
    total = cd.Accumulator("exact")
    for array in arrays[:4]:
        total.add({"w": array})
    total.save(tmp_path / "sums.npz")
    loaded = cd.Accumulator.load(tmp_path / "sums.npz")
    for each in (total, loaded):
        each.add({"w": arrays[4]})
    assert total.mean()["w"].tobytes() == loaded.mean()["w"].tobytes()
    with np.load(tmp_path / "sums.npz") as held:
        assert "0/2" in held.files

"""FedAvg in Flower's own loop and messages: weighted, order-free, bfloat16 included, without copies."""

from __future__ import annotations

import io
import itertools
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from conformance.oracle import rounded
from crossdevice.errors import ConversionError, OptionError

pytest.importorskip("flwr", reason="flwr is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, strategy
from flwr.supercore.task_identity import TaskIdentity

from crossdevice.integrations.flower import (
    FedAvg,
    FedMedian,
    FedTrimmedAvg,
    arrays_of,
    record_of,
    state_dict_of,
)

pytestmark = pytest.mark.more("Flower")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
EXAMPLES = {1: 20, 2: 50, 3: 35, 4: 80, 5: 10}
"""By node."""


@pytest.fixture(autouse=True)
def _in_a_server(monkeypatch):
    """Messages name the process that sends them; Flower sets this when it starts a ServerApp."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class InMemoryGrid(Grid):
    """Nodes that are functions: messages are answered at once, in an order of one's own."""

    def __init__(self, train, order=tuple(EXAMPLES)):
        self.train, self.order = train, order

    def set_run(self, run): ...

    @property
    def run(self): ...

    def create_message(self, *arguments, **keywords): ...

    def push_messages(self, messages): ...

    def pull_messages(self, message_ids): ...

    def get_node_ids(self):
        return list(EXAMPLES)

    def send_and_receive(self, messages, *, timeout=None):
        by_node = {message.metadata.dst_node_id: message for message in messages}
        return [self.answered(node, by_node[node]) for node in self.order if node in by_node]

    def answered(self, node, message):
        if message.metadata.message_type == "evaluate":
            return Message(
                RecordDict({"m": MetricRecord({"loss": 1.0, "num-examples": 1})}), reply_to=message
            )
        arrays, loss = self.train(node, arrays_of(message.content["arrays"]))
        metrics = MetricRecord({"loss": loss, "num-examples": EXAMPLES[node]})
        return Message(RecordDict({"arrays": record_of(arrays), "metrics": metrics}), reply_to=message)


def trained(node, arrays):
    """What a client makes of a model."""
    random = np.random.default_rng([node, int(arrays["steps"][0])])
    return {
        name: array + 1
        if array.dtype.kind == "i"
        else (array + random.standard_normal(array.shape)).astype(array.dtype)
        for name, array in arrays.items()
    }, float(node)


def initial():
    return record_of(
        {
            "weight": np.zeros((4, 3), np.float32),
            "brain": np.zeros(33, BFLOAT16),
            "steps": np.zeros(1, np.int64),
            "scalar": np.zeros((), np.float64),
        }
    )


def bits(record):
    return {name: array.tobytes() for name, array in arrays_of(record).items()}


def test_a_federation_has_the_true_mean_in_any_order_of_clients():
    results = [
        FedAvg().start(InMemoryGrid(trained, order), initial(), num_rounds=3)
        for order in itertools.islice(itertools.permutations(EXAMPLES), 0, 120, 41)
    ]
    assert all(bits(result.arrays) == bits(results[0].arrays) for result in results)
    assert arrays_of(results[0].arrays)["steps"].tolist() == [3]
    assert arrays_of(results[0].arrays)["steps"].dtype == np.int64
    assert arrays_of(results[0].arrays)["brain"].dtype == BFLOAT16
    (losses,) = {round(result.train_metrics_clientapp[1]["loss"], 9) for result in results}
    assert losses == pytest.approx(sum(n * k for n, k in EXAMPLES.items()) / sum(EXAMPLES.values()))
    one_round = FedAvg().start(InMemoryGrid(trained), initial(), num_rounds=1).arrays
    models = {node: trained(node, arrays_of(initial()))[0] for node in EXAMPLES}
    for name in ("weight", "brain", "scalar"):
        columns = zip(*(np.ravel(model[name]).tolist() for model in models.values()), strict=True)
        totals = [sum(n * Fraction(x) for n, x in zip(EXAMPLES.values(), c, strict=True)) for c in columns]
        dtype = models[1][name].dtype
        right = [rounded(total / sum(EXAMPLES.values()), dtype.name) for total in totals]
        np.testing.assert_array_equal(np.ravel(arrays_of(one_round)[name]), np.array(right).astype(dtype))


@pytest.mark.parametrize("kind", [FedAvg, FedMedian, FedTrimmedAvg], ids=lambda kind: kind.__name__)
def test_it_is_what_flower_computes_up_to_rounding(kind):
    without_brain = ArrayRecord({name: array for name, array in initial().items() if name != "brain"})
    ours, theirs = (
        made().start(InMemoryGrid(trained), ArrayRecord(dict(without_brain)), num_rounds=1).arrays
        for made in (kind, getattr(strategy, kind.__name__))
    )
    for name, array in arrays_of(ours).items():
        np.testing.assert_allclose(array, theirs[name].numpy(), rtol=1e-5)


def test_arrays_are_views_of_the_bytes_in_a_record():
    array = Array(np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    view = arrays_of(ArrayRecord({"a": array}))["a"]
    np.testing.assert_array_equal(view, array.numpy())
    assert not view.flags.owndata
    assert not view.flags.writeable
    start = np.frombuffer(array.data, np.uint8).ctypes.data
    assert start <= view.ctypes.data < start + len(array.data)


def test_replies_that_are_errors_do_not_count():
    grid = InMemoryGrid(trained)
    plan = FedAvg()
    messages = list(plan.configure_train(1, initial(), ConfigRecord(), grid))
    replies = grid.send_and_receive(messages)
    failed = Message(Error(code=0, reason="lost"), reply_to=messages[0])
    arrays, _ = plan.aggregate_train(1, [failed, *replies[:2]])
    again, _ = plan.aggregate_train(1, replies[:2])
    assert bits(arrays) == bits(again)
    assert plan.aggregate_train(1, [failed]) == (None, None)


def test_state_dicts_come_back():
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(torch.bfloat16)
    state = state_dict_of(record_of(module.state_dict()))
    assert all(torch.equal(state[name], tensor) for name, tensor in module.state_dict().items())
    module.load_state_dict(state)
    state["0.weight"].zero_()
    assert module[0].weight.abs().sum() > 0


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_floats_of_8_bits_come_back(name):
    array = np.array([[1.5, -2.0]], getattr(ml_dtypes, name))
    (view,) = arrays_of(record_of({"a": array})).values()
    assert view.dtype == array.dtype
    assert view.tolist() == array.tolist()


def test_mistakes_are_refused():
    cut = record_of({"a": np.zeros(3)})["a"]
    for data in (cut.data[:20], cut.data[:-1]):
        with pytest.raises(ConversionError, match="'a' is not an array in NumPy's format"):
            arrays_of(ArrayRecord({"a": Array("float64", (3,), "numpy.ndarray", data)}))
    for keywords in ({"precision": "fast"}, {"integers": "median"}):
        with pytest.raises(OptionError, match=next(iter(keywords))):
            FedAvg(**keywords)
    with pytest.raises(ValueError, match="beta"):
        FedTrimmedAvg(beta=0.5)
    with pytest.raises(ConversionError, match="'a' is serialized as 'other'"):
        arrays_of(ArrayRecord({"a": Array("float32", (1,), "other", b"")}))
    with pytest.raises(ConversionError, match="'a' is a str"):
        record_of({"a": "text"})


@pytest.mark.parametrize(
    "array", [np.float32([[1, 2], [3, 4]]), np.int64(7), np.empty((0, 3)), np.uint8([9])]
)
def test_records_hold_the_bytes_that_numpy_saves(array):
    file = io.BytesIO()
    np.save(file, array)
    assert record_of({"w": np.asarray(array)})["w"].data == file.getvalue()


def test_views_are_those_of_any_version_of_the_format_and_order_of_axes():
    array = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    for version in ((1, 0), (2, 0), (3, 0)):
        file = io.BytesIO()
        np.lib.format.write_array(file, array, version)
        stored = Array("float32", (2, 3), "numpy.ndarray", file.getvalue())
        np.testing.assert_array_equal(arrays_of(ArrayRecord({"w": stored}))["w"], array)

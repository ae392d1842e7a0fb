"""DataParallel over logical devices: the gradients of one device, and the same bits every time."""

import copy

import pytest
import torch

from crossdevice.errors import ConversionError, DeviceError, MismatchError, OptionError
from crossdevice.integrations.torch import DataParallel
from unit.integrations.small_networks import TWO, batch, network, sgd


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [12, 10, 2])
def test_data_parallel_has_the_losses_and_gradients_of_one_device(count, size):
    alone, shared = network(), DataParallel(network(), devices=[f"cpu:{i}" for i in range(count)])
    ours, theirs = sgd(shared.parameters()), sgd(alone.parameters())
    for seed in range(3):
        x, y = batch(size, seed)
        losses = []
        for model, optimizer in ((shared, ours), (alone, theirs)):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1])
    for left, right in zip(shared.module.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(left, right)


def test_data_parallel_takes_structures_keyword_arguments_and_plain_values():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, inputs, *, factor):
            return {"out": inputs["x"] * self.weight * factor, "sum": inputs["x"].sum()}

    model = DataParallel(Scaled(), devices=["cpu:0", "cpu:1"])
    answer = model({"x": torch.arange(3.0)}, factor=2)
    assert answer["out"].tolist() == [0, 2, 4]
    assert answer["sum"].tolist() == [1, 2], "one number per replica, as in torch.nn.DataParallel"


class Returns(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return {"x": x, "more": self.function(x)}


@pytest.mark.parametrize("size", [10, 9], ids=["even", "uneven"])
@pytest.mark.parametrize("number", [len, lambda x: x.sum().item(), lambda x: [len(x), 2]])
def test_data_parallel_refuses_numbers_of_single_replicas_whether_or_not_they_are_equal(size, number):
    model = DataParallel(Returns(number), devices=["cpu:0", "cpu:1"])
    with pytest.raises(ConversionError, match=r"numbers \[.*torch\.tensor\(number\)"):
        model(torch.ones(size, 3))
    alone = DataParallel(Returns(number), devices=["cpu:0"])
    assert alone(torch.ones(size, 3))["more"] == number(torch.ones(size, 3))


def test_data_parallel_returns_equal_words_and_flags_and_refuses_different_ones():
    same, other = (
        DataParallel(Returns(function), devices=["cpu:0", "cpu:1"])
        for function in (lambda _: (True, "a word", None), lambda x: bool(x[0] == 0))
    )
    assert same(torch.arange(2.0))["more"] == (True, "a word", None)
    with pytest.raises(MismatchError, match=r"different values.*\[True, False\]"):
        other(torch.arange(2.0))


def test_data_parallel_keeps_the_first_copys_buffers_and_follows_train_and_eval():
    torch.manual_seed(0)
    model = DataParallel(torch.nn.BatchNorm1d(6), devices=["cpu:0", "cpu:1"])
    x, _ = batch(8)
    model(x)
    expected = torch.nn.BatchNorm1d(6)
    expected(x[:4])
    torch.testing.assert_close(model.module.running_mean, expected.running_mean)
    model.eval()
    torch.testing.assert_close(model(x), expected.eval()(x))


def test_data_parallel_is_a_module_with_the_original_inside():
    original = network()
    model = DataParallel(original, devices=["cpu:0", "cpu:1"])
    assert model.module is original
    assert len(list(model.parameters())) == 4
    with torch.no_grad():
        assert not model(batch(4)[0]).requires_grad


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3, bias=False)
        self.b = torch.nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.unused = torch.nn.Parameter(torch.ones(2))
        self.scale = 1.0

    def forward(self, x):
        return self.b(self.a(x)) * self.scale, "a word"


def test_data_parallel_keeps_ties_attributes_and_hooks_and_leaves_unused_parameters_alone():
    torch.manual_seed(0)
    original = Tied()
    model = DataParallel(original, devices=["cpu:0", "cpu:1"])
    calls = []
    original.a.register_forward_hook(lambda *_: calls.append(1))
    original.scale = 2.0
    x = torch.randn(4, 3)
    result, word = model(x)
    assert word == "a word"
    assert len(calls) == 2
    torch.testing.assert_close(result, original(x)[0])
    result.sum().backward()
    found = original.a.weight.grad.clone()
    assert original.unused.grad is None
    original.zero_grad()
    original(x)[0].sum().backward()
    torch.testing.assert_close(found, original.a.weight.grad)


def test_data_parallel_takes_modules_without_parameters_and_can_be_copied_after_a_call():
    model = DataParallel(torch.nn.ReLU(), devices=["cpu:0", "cpu:1"])
    assert model(torch.tensor([-1.0, 2.0])).tolist() == [0, 2]
    again = copy.deepcopy(model)
    assert again(torch.tensor([-1.0, 2.0])).tolist() == [0, 2]


# -------------------------------------------------------------------- habits of torch.nn.DataParallel


def test_the_arguments_of_pytorchs_own_are_accepted():
    model = DataParallel(network(), device_ids=TWO, output_device="cpu", dim=0)
    assert model.output_device == torch.device("cpu")
    assert [str(device) for device in model.devices] == TWO
    assert DataParallel(network(), [torch.device("cpu", 0), "cpu:1"])(batch(3)[0]).shape == (3, 3)
    columns = DataParallel(torch.nn.ReLU(), TWO, dim=1)
    assert columns(torch.ones(2, 5)).shape == (2, 5)
    with pytest.raises(DeviceError, match="cuda:99 does not exist here"):
        DataParallel(network(), [99])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": []}, "devices is empty"),
        ({"device_ids": []}, "devices is empty"),
        ({"devices": TWO, "device_ids": TWO}, "both devices and device_ids"),
    ],
)
def test_devices_must_be_named_once(options, message):
    with pytest.raises(OptionError, match=message):
        DataParallel(network(), **options)

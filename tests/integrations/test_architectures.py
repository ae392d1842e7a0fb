"""Real architectures on several devices have the loss and the gradients of one, within rounding.

`WAYS` are the columns: each gets a module, devices, arguments and a loss that is a sum over examples, and
returns the loss of the whole batch and the gradients by parameter name.
"""

import hashlib

import pytest
import torch

from crossdevice.integrations.torch import DataParallel
from integrations.architectures import ARCHITECTURES, LIBRARIES, WITHOUT_DROPOUT, case_of
from integrations.by_mirrored_module import by_mirrored_module

repeats = pytest.mark.more("a repetition")

DEVICES = {2: ["cpu:0", "cpu:1"], 3: ["cpu:0", "cpu:1", "cpu:2"]}


def alone(module, devices, inputs, loss_of):
    loss = loss_of(module(**inputs))
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in module.named_parameters()}


def by_data_parallel(module, devices, inputs, loss_of):
    loss, _ = alone(DataParallel(module, devices), devices, inputs, loss_of)
    return loss, {name: parameter.grad for name, parameter in module.named_parameters()}


WAYS = {"DataParallel": by_data_parallel, "MirroredModule": by_mirrored_module}


def spread(case, devices):
    return case.module, devices, case.inputs, case.loss_of


def dense(gradients):
    return {name: g.to_dense() for name, g in gradients.items() if g is not None}


def digest(loss, gradients):
    tensors = [loss, *dense(gradients).values()]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def each_architecture(names):
    """Those that need another library are left to `make test-all`."""
    marks = {name: pytest.mark.more(library) for name, library in LIBRARIES.items()}
    return pytest.mark.parametrize("architecture", [pytest.param(n, marks=marks.get(n, ())) for n in names])


@pytest.mark.parametrize("size", [pytest.param(6, id="even", marks=repeats), pytest.param(5, id="uneven")])
@pytest.mark.parametrize("count", [pytest.param(2, marks=repeats), 3])
@each_architecture(ARCHITECTURES)
@pytest.mark.parametrize("way", WAYS)
def test_loss_and_gradients_are_those_of_one_device(way, architecture, count, size):
    expected_loss, expected = alone(*spread(case_of(architecture, size), None))
    found_loss, found = WAYS[way](*spread(case_of(architecture, size), DEVICES[count]))
    torch.testing.assert_close(found_loss, expected_loss)
    torch.testing.assert_close(dense(found), dense(expected))


@each_architecture(name for name in ARCHITECTURES if name not in WITHOUT_DROPOUT)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_seed_gives_the_same_bits_with_dropout(way, architecture):
    def trained(seed):
        case = case_of(architecture, 5)
        case.module.train()
        torch.manual_seed(seed)
        return digest(*WAYS[way](*spread(case, DEVICES[3])))

    first = trained(1)
    assert [trained(1), trained(1)] == [first, first]
    assert trained(2) != first


@pytest.mark.parametrize("count", DEVICES)
@each_architecture(["torchvision resnet18", "timm resnet"])
def test_sync_batch_norm_in_training_is_batch_norm_on_one_device(architecture, count):
    plain, ours = case_of(architecture, 5), case_of(architecture, 5)
    plain.module.train()
    expected_loss, expected = alone(*spread(plain, None))
    module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(ours.module).train()
    found_loss, found = by_data_parallel(module, DEVICES[count], ours.inputs, ours.loss_of)
    torch.testing.assert_close(found_loss, expected_loss)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(module.state_dict(), plain.module.state_dict())


@pytest.mark.more("transformers")
@pytest.mark.parametrize("size", [6, 5], ids=["even", "uneven"])
def test_states_of_recurrent_models_are_joined_and_split_again(size):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=32, hidden_size=8, state_size=4, num_hidden_layers=2)
    module = transformers.MambaForCausalLM(config).eval()
    prompt, token = torch.randint(0, 32, (size, 6)), torch.randint(0, 32, (size, 1))

    @torch.no_grad()
    def logits_of(model):
        states = [None, transformers.DynamicCache(config=config)]  # made by the model, and for it
        return [
            model(token, cache_params=model(prompt, cache_params=own).cache_params).logits for own in states
        ]

    torch.testing.assert_close(logits_of(DataParallel(module, DEVICES[3])), logits_of(module))

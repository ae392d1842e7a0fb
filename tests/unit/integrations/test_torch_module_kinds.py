"""Which kinds of modules DataParallel can replicate: compiled ones, graphs; and which it refuses."""

import copy

import pytest
import torch

from crossdevice.errors import ConversionError
from crossdevice.integrations.torch import DataParallel
from unit.integrations.small_networks import THREE, TWO, assert_same_gradients, batch, gradients, network


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks
@pytest.mark.parametrize("compiled", ["module", "submodule"])
def test_compiled_modules_are_replicated_with_their_code(compiled):
    module = network()
    if compiled == "module":
        ours = torch.compile(copy.deepcopy(module), backend="eager")
    else:
        ours = torch.nn.Sequential(torch.compile(copy.deepcopy(module[:2]), backend="eager"), module[2])
    x, _ = batch(5)
    expected = list(gradients(module, x).values())
    found = gradients(DataParallel(copy.deepcopy(ours), THREE), x)
    torch.testing.assert_close([g for g in found.values() if g is not None], expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_modules_that_were_compiled_in_place_and_scripts_are_refused():
    module = network()
    module[0].compile(backend="eager")
    with pytest.raises(
        ConversionError, match=r"submodule '0' was compiled in place.*torch\.compile\(module\)"
    ):
        DataParallel(module, TWO)(batch(4)[0])
    traced = torch.jit.trace(network(), batch(4)[0])
    with pytest.raises(ConversionError, match="the module is a ScriptModule"):
        DataParallel(traced, TWO)(batch(4)[0])


def test_parametrized_modules_are_refused_where_their_weights_are_kept_by_module():
    module = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(6, 3))
    assert_same_gradients(module, batch(5)[0])
    with (
        torch.nn.utils.parametrize.cached(),
        pytest.raises(ConversionError, match=r"the module is parametrized.*enter that block in forward"),
    ):
        DataParallel(module, TWO)(batch(4)[0])


def test_graph_modules_keep_their_code_and_plain_attributes():
    module = torch.fx.symbolic_trace(network())
    module.factor = 3  # as torch.export leaves flags for its hooks
    module.register_forward_hook(lambda own, _, result: result * own.factor)
    x, _ = batch(5)
    expected = gradients(network(), x, loss=lambda result: (3 * result).square().sum())
    torch.testing.assert_close(gradients(DataParallel(module, TWO), x), expected)


def test_gradients_of_parameters_are_refused_in_one_batch():
    model = DataParallel(network(), TWO)
    with pytest.raises(ConversionError, match=r"is_grads_batched=True.*one after the other"):
        torch.autograd.grad(
            model(batch(4)[0]).sum(1), list(model.parameters()), torch.eye(4), is_grads_batched=True
        )

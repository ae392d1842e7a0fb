"""A training step by MirroredModule, as a column of tables of architectures."""

import torch

from crossdevice import MirroredStrategy, PerReplica
from crossdevice.integrations.torch import MirroredModule


def by_mirrored_module(module, devices, inputs, loss_of):
    """The loss of the whole batch, a sum over examples, and gradients by name, the same in all copies."""
    strategy = MirroredStrategy(devices, own_random_streams=True)
    model = MirroredModule(module, strategy)

    def step(share):
        loss = loss_of(model(**share))
        loss.backward()
        model.reduce_gradients("sum")
        return loss.detach()

    losses = strategy.run(step, args=(PerReplica(shares_of(inputs, len(devices))),))
    model.check_in_step()
    gradients = [{name: p.grad for name, p in copy.named_parameters()} for copy in model.replicas]
    for others in gradients[1:]:
        for name, gradient in gradients[0].items():
            assert (gradient is None) == (others[name] is None), name
            assert gradient is None or torch.equal(gradient.to_dense(), others[name].to_dense()), name
    return strategy.reduce("sum", losses, axis=None), gradients[-1]


def shares_of(inputs, count):
    """Arguments of each replica: rows of the batch, which may not be divisible; all have those of one row."""
    size = max(len(tensor) for tensor in inputs.values())
    return [
        {name: tensor if len(tensor) == 1 else tensor[rows] for name, tensor in inputs.items()}
        for rows in torch.arange(size).tensor_split(count)
    ]

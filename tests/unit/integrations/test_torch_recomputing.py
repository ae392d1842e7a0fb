"""What asks for its replica is refused where PyTorch recomputes a forward pass after the replicas ended."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import crossdevice as cd
from crossdevice.errors import ContextError
from crossdevice.integrations.torch import DataParallel, MirroredModule
from unit.integrations.small_networks import TWO

ASKING = {
    "all_reduce": lambda h: cd.get_replica_context().all_reduce("sum", h.sum(0, keepdim=True)),
    "num_replicas_in_sync": lambda _: cd.get_strategy().num_replicas_in_sync,
    "SyncBatchNorm": torch.nn.SyncBatchNorm(3),
}


class Recomputing(torch.nn.Module):
    def __init__(self, use_reentrant, ask):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.layer, self.last = torch.nn.Linear(4, 3), torch.nn.Linear(3, 3)
        self.ask = ask

    def forward(self, x):
        def compute(x):
            hidden = self.layer(x)
            return self.last(hidden * self.ask(hidden))

        if self.use_reentrant is None:
            return compute(x)
        return checkpoint(compute, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("ask", ASKING.values(), ids=ASKING)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_data_parallel_refuses_to_recompute_what_asks_for_its_replica(use_reentrant, ask):
    model = DataParallel(Recomputing(use_reentrant, ask), TWO)
    result = model(torch.ones(4, 4, requires_grad=True))
    with pytest.raises(ContextError, match=r"in a backward pass.*torch\.utils\.checkpoint.*leave"):
        result.sum().backward()
    # Not for long: code outside of replicas is a lone replica again.
    alone = Recomputing(use_reentrant, ASKING["all_reduce"])
    alone(torch.ones(4, 4, requires_grad=True)).sum().backward()
    DataParallel(alone, TWO)(torch.ones(1, 4, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_replicas_recompute_calls_in_their_own_backward_passes(use_reentrant):
    found = []
    for reentrant in (None, use_reentrant):
        torch.manual_seed(0)
        strategy = cd.MirroredStrategy(TWO)
        model = MirroredModule(Recomputing(reentrant, ASKING["all_reduce"]), strategy)

        def step(x, model=model):
            model(x.requires_grad_()).sum().backward()
            model.reduce_gradients("sum")

        strategy.run(step, args=(cd.PerReplica([torch.ones(2, 4), torch.full((1, 4), 2.0)]),))
        found.append(model.layer.weight.grad)
    torch.testing.assert_close(*found)

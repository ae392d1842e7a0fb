"""Two runs differ: `crossdevice bits` names the module that is not reproducible."""

import contextlib
import tempfile
from pathlib import Path

import torch

import crossdevice as cd
from crossdevice.cli.main import main
from crossdevice.integrations.torch import ModuleBits

SHUFFLED = torch.Generator()
SHUFFLED.seed()  # another one in every run


class SumOverEdges(torch.nn.Module):
    """Sum over the edges of each node, in a random order.

    So it does on any machine what atomic additions (`index_add_`) do on a GPU.
    """

    def __init__(self, edges: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("edges", edges)

    def forward(self, nodes: torch.Tensor) -> torch.Tensor:
        source, target = self.edges[
            :, torch.randperm(self.edges.shape[1], generator=SHUFFLED)
        ]
        return torch.zeros_like(nodes).index_add_(0, target, nodes[source])


def train(path: str) -> float:
    torch.manual_seed(0)
    nodes, edges = torch.randn(8, 4), torch.randint(0, 8, (2, 4000))
    layers = [
        torch.nn.Linear(4, 16),
        torch.nn.Tanh(),
        SumOverEdges(edges),
        torch.nn.Linear(16, 1),
    ]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with cd.record_bits(path), ModuleBits(model):
        for _ in range(3):
            loss = model(nodes).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


with tempfile.TemporaryDirectory() as folder, contextlib.chdir(Path(folder)):
    losses = [train("run_a.bits"), train("run_b.bits")]
    print("nearly the same loss:", abs(losses[0] - losses[1]) < 1e-3 * losses[0])
    print("$ crossdevice bits run_a.bits run_b.bits")
    status = main(["bits", "run_a.bits", "run_b.bits"])
    print("exit status", status)

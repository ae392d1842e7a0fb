"""A training loop in PyTorch: one process, a module per device, a reduction a step."""

import torch

import crossdevice as cd
from crossdevice.integrations.torch import MirroredModule

torch.manual_seed(0)
strategy = cd.MirroredStrategy(
    ["cpu:0", "cpu:1"]
)  # or ["cuda:0", "cuda:1"], or ["cuda:0"] * 2
model = MirroredModule(
    torch.nn.Sequential(
        torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
    ),
    strategy,
)
optimizers = model.optimizers(lambda parameters: torch.optim.Adam(parameters, lr=0.01))

points = torch.rand(512, 2) * 2 - 1
inside = (points.norm(dim=1) < 0.7).float()[:, None]
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(points, inside), batch_size=100, shuffle=True
)


def step(x, y, optimizer, batch_size):
    """Forward, backward and update of one replica; only the gradients meet."""
    optimizer.zero_grad()
    loss = (
        torch.nn.functional.binary_cross_entropy_with_logits(
            model(x), y, reduction="sum"
        )
        / batch_size
    )
    loss.backward()
    model.reduce_gradients("sum")
    optimizer.step()
    return loss.detach()


for epoch in range(40):
    for x, y in strategy.experimental_distribute_dataset(loader):
        batch_size = sum(len(part) for part in strategy.experimental_local_results(y))
        losses = strategy.run(step, args=(x, y, optimizers, batch_size))
    if epoch % 10 == 9:
        total = float(strategy.reduce("sum", losses, axis=None))
        print(f"epoch {epoch + 1}: loss {total:.3f}")

model.check_in_step()
with torch.no_grad():
    accuracy = ((model(points) > 0).float() == inside).float().mean()
print(f"accuracy {float(accuracy):.3f}; all replicas hold the same bits")

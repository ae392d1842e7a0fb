"""DataParallel in the place of PyTorch's own: one line changed, on CPUs too."""

import torch

from crossdevice.integrations.torch import DataParallel

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
# model = torch.nn.DataParallel(model)                      # before: GPUs only
model = DataParallel(model, devices=["cpu:0", "cpu:1", "cpu:2"])  # now: any devices
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

inputs = torch.randn(64, 4)
labels = (inputs[:, 0] > inputs[:, 1]).long()
for step in range(50):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1}: loss {loss.item():.3f}")

"""PyTorch: modules on several devices, and gradients between processes.

`DataParallel` takes the place of `torch.nn.DataParallel`. `MirroredModule` is for training steps that run as
replicas of a strategy, backward pass and optimizer included.
"""

from crossdevice.integrations.torch.data_parallel import DataParallel
from crossdevice.integrations.torch.mirrored_module import MirroredModule

__all__ = ["DataParallel", "MirroredModule"]

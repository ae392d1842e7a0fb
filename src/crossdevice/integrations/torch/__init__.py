"""PyTorch: modules on several devices, and gradients between processes.

`DataParallel` takes the place of `torch.nn.DataParallel`. `MirroredModule` is for training steps that run as
replicas of a strategy, backward pass and optimizer included. `reproducible_hook` is for
`torch.nn.parallel.DistributedDataParallel`, `ReproducibleReduceScatter` for FSDP2's `fully_shard`.
`ExactGradients` makes a training step the same on any number of workers, `ExactReduceScatter` one of FSDP2.
"""

from crossdevice.values.registry import missing_library

try:
    from crossdevice.integrations.torch.batches import register_container
    from crossdevice.integrations.torch.communication_hook import ReproducibleMean, reproducible_hook
    from crossdevice.integrations.torch.data_parallel import DataParallel
    from crossdevice.integrations.torch.distributed import BackendOptions
    from crossdevice.integrations.torch.exact_clipping import clip_grad_norm_
    from crossdevice.integrations.torch.exact_gradients import ExactGradients, ExactStep
    from crossdevice.integrations.torch.micro_batch_seeds import micro_batch_seed, seeded_micro_batch
    from crossdevice.integrations.torch.mirrored_module import MirroredModule
    from crossdevice.integrations.torch.module_bits import ModuleBits
    from crossdevice.integrations.torch.sharded_gradients import ExactReduceScatter, ReproducibleReduceScatter
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{__name__} needs {missing_library(error)}", name=error.name) from None

__all__ = [
    "BackendOptions",
    "DataParallel",
    "ExactGradients",
    "ExactReduceScatter",
    "ExactStep",
    "MirroredModule",
    "ModuleBits",
    "ReproducibleMean",
    "ReproducibleReduceScatter",
    "clip_grad_norm_",
    "micro_batch_seed",
    "register_container",
    "reproducible_hook",
    "seeded_micro_batch",
]

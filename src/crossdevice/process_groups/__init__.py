"""Other processes: groups that make the same calls, on engines that exist (torch.distributed, MPI)."""

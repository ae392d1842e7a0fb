"""The tasks of each collective, from shapes and numbers of replicas alone: the same on all ranks."""

"""The fused pass over the memory of one GPU."""

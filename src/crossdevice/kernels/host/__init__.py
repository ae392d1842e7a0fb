"""The fused pass over host memory."""

"""Reductions, gathers and copies between processes."""

"""Reductions, gathers and copies inside one process."""

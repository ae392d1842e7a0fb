"""Datasets cut up for replicas, and structures of per-replica values."""

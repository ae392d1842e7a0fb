"""Algorithms, one per file; each only says how a sum is planned."""

"""Replicas as threads: where they run, where they meet, and who they are."""

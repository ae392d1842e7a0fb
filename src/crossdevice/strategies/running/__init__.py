"""Replicas as threads: placement, meetings, and contexts."""

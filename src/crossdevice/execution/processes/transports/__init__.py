"""Transports run tasks: each file moves arrays between processes in one way, whatever the collective."""

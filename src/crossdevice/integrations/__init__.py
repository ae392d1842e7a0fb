"""Plugs: older interfaces and other people's frameworks."""

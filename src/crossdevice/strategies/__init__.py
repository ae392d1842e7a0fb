"""Strategies: each runs one function on several devices and keeps variables in step."""

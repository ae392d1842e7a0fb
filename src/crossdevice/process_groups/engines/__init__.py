"""Engines, which carry bytes to other ranks: one file each, and one for each part of a large one."""

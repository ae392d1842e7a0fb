"""The memory of one host: who shares it, how ranks take steps in it, and what goes through it."""

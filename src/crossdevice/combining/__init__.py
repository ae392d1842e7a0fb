"""Many models into one: as they arrive, or from files."""

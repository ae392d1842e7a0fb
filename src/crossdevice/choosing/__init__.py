"""Choice of an algorithm: `by_devices`, or `by_cost` where a topology is known."""

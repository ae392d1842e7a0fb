"""Which algorithm? `choose_algorithm` asks `by_devices`, or `by_cost` where a topology is known."""

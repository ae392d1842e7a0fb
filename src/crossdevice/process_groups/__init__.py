"""Other processes: groups of ranks that make the same calls, each watched until its deadline."""

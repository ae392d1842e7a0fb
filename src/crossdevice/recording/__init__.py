"""Which bits a run has seen, in a file, and where two runs part."""

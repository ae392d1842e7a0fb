"""Records of the bits a run has seen, and of the place where two runs part."""

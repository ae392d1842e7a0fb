"""The arithmetic in NumPy: the bits that every faster kernel repeats."""

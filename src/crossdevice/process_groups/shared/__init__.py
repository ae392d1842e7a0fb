"""Memory shared by ranks of one host: discovery, steps, and messages through it."""

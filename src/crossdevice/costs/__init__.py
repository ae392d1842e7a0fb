"""Cost models: machines as links, and plans timed on them."""

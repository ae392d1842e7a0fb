"""What would it cost? Machines as links, and plans timed on them."""

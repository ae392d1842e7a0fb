"""Notes that ranks exchange beside their calls: identity, position, and reasons for giving up."""

"""Notes between ranks beside their calls: who they are, where they wait, and why they gave up."""

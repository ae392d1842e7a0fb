"""The fused pass: every input read once, every result written once."""

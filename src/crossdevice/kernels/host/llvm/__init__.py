"""The arithmetic compiled for the processor at hand."""

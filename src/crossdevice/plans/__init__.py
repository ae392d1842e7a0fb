"""Plans as data: buffers and steps, read by the executor, the ledger and the renderer."""

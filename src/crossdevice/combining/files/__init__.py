"""Files of models, read by ranges of their tensors and written one tensor after another."""

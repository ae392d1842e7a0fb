"""Worker threads and memory for the results of kernels."""

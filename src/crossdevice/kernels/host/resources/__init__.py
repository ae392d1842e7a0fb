"""What kernels work with: worker threads and memory for results."""

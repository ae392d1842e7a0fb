"""`crossdevice determinism`: changes to the bits of sums, for several libraries."""

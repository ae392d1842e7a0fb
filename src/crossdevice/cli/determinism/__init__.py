"""`crossdevice determinism`: what changes the bits of sums, for several libraries."""

"""`crossdevice bits`."""

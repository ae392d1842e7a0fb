"""`crossdevice average`."""

"""`crossdevice explain`: what an algorithm does on a machine, and what it costs there."""

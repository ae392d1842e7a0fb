"""`crossdevice doctor`: what is installed, what is chosen, and what is missing for more."""

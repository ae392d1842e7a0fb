"""`crossdevice doctor`: installed libraries, choices, and missing parts."""

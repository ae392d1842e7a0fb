"""What users hold: a strategy runs one function on several devices and keeps variables in step."""

"""Variables with one copy per device."""

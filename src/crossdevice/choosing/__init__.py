"""Which algorithm? By the devices at hand, or by predicted and measured cost."""

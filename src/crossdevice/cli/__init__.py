"""Commands: `crossdevice <command>`, one file each."""

"""`crossdevice run`: processes of one host that form a group."""

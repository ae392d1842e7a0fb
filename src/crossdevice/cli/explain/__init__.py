"""`crossdevice explain`: an algorithm's steps and costs on a machine."""

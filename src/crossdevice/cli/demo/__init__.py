"""`crossdevice demo`: a classifier trained on devices and in processes, to the same bits."""

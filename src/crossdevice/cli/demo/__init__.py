"""`crossdevice demo`: a classifier trained on logical devices."""

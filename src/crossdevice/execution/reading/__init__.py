"""Reading a call: values, destinations, structures and `out=`, checked before any work is done."""

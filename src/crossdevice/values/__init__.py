"""The nouns: devices, operations, options and the containers that hold one array per device."""

"""What tests on a GPU share: its memory, which JAX would take for itself."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

"""`python -m crossdevice` is the `crossdevice` command."""

import sys

from crossdevice.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

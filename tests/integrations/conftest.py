"""What other libraries need to be imported here."""

import torchvision_operators  # noqa: F401 (importing it declares them)

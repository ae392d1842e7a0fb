"""The backend "crossdevice" of torch.distributed: collectives with the same bits every time.

`import crossdevice.integrations.torch` registers it. Where crossdevice is installed, `import torch` does so.
"""

from crossdevice.integrations.torch.distributed.options import BackendOptions
from crossdevice.integrations.torch.distributed.process_group import CrossdeviceProcessGroup
from crossdevice_torch_backend import register

__all__ = ["BackendOptions", "CrossdeviceProcessGroup"]

register()

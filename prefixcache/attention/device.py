"""Where attention runs.

Every launcher runs the same torch code on the device of its tensors. A path that is special to a
device belongs in the launcher of its operation; this module only says which device that is.
"""

from __future__ import annotations

import torch


def default_device() -> str:
    """`"cuda"` if torch sees a device, else `"cpu"`."""
    return "cuda" if torch.cuda.is_available() else "cpu"

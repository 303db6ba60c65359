import subprocess
import sys

import pytest
import torch

from prefixcache.attention.device import default_device


@pytest.mark.parametrize(("available", "device"), [(True, "cuda"), (False, "cpu")])
def test_cuda_is_used_when_torch_sees_it(
    available: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert default_device() == device


@pytest.mark.parametrize("module", ["prefixcache.attention.batch", "prefixcache.storage.layout"])
def test_batches_and_layouts_need_no_torch(module: str) -> None:
    program = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from prefixcache.attention import device
from prefixcache.attention.device import default_device, uses_triton


@pytest.mark.parametrize(("available", "name"), [(True, "cuda"), (False, "cpu")])
def test_cuda_is_used_when_torch_sees_it(
    available: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert default_device() == name


@pytest.mark.parametrize("module", ["prefixcache.attention.batch", "prefixcache.storage.layout"])
def test_batches_and_layouts_need_no_torch(module: str) -> None:
    program = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), (None, False)])
def test_a_cpu_tensor_goes_to_triton_only_under_its_interpreter(
    value: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    assert uses_triton(torch.zeros(1)) is expected


@pytest.mark.parametrize("installed", [True, False])
def test_a_cuda_tensor_goes_to_triton_where_it_is_installed(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_has_triton", lambda: installed)
    tensor = SimpleNamespace(is_cuda=True)
    assert uses_triton(tensor) is installed


def test_the_cpu_path_does_not_load_triton() -> None:
    program = (
        "import sys, torch; from prefixcache.attention import decode, prefill, write_kv; "
        "from prefixcache.storage.kv_cache import KVCache; "
        "import numpy as np; cache = torch.zeros(2, 1, 4, 8); k = torch.ones(1, 1, 8); "
        "write_kv.write_kv(KVCache(cache, cache.clone()), k, k, np.array([0])); "
        "sys.exit('triton' in sys.modules)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    assert (
        subprocess.run([sys.executable, "-c", program], check=False, env=environment).returncode
        == 0
    )

"""From settings to a daemon's memory: which layout, with which scales."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefixcache.errors import InvalidArgumentError
from prefixcache.options import make_config
from prefixcache.server.configured_daemon import make_daemon
from prefixcache.server.daemon import Daemon
from prefixcache.storage.layout import KVLayout, LatentLayout, Layout, Quantization

HEADS = {"num_layers": 2, "num_kv_heads": 3, "head_dim": 8, "dtype": "bfloat16", "block_size": 4}
LATENT = {"num_layers": 2, "latent_dim": 16, "rope_dim": 8, "dtype": "float16", "block_size": 4}
QUANTISED_TENSORS = {"kv_dtype": "int8", "kv_scales": "tensor"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`prepare_torch` sets this one if nobody has."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")


@contextmanager
def made(**settings: object) -> Iterator[Daemon]:
    daemon = make_daemon(make_config({"storage": "cpu", "num_blocks": 3, **settings}))
    yield daemon
    daemon.close()


def write(folder: Path, content: object) -> str:
    path = folder / "file.json"
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        (HEADS, KVLayout(2, 3, 8, 4, "bfloat16")),
        (
            {**HEADS, "kv_dtype": "int8"},
            KVLayout(2, 3, 8, 4, "bfloat16", Quantization("int8")),
        ),
        (
            {**HEADS, "kv_dtype": "float8_e4m3", "kv_scales": "tensor"},
            KVLayout(2, 3, 8, 4, "bfloat16", Quantization("float8_e4m3", "tensor")),
        ),
        (LATENT, LatentLayout(2, 16, 8, 4, "float16")),
    ],
)
def test_the_flags_give_the_layout(settings: dict[str, object], layout: Layout) -> None:
    with made(**settings) as daemon:
        assert daemon.engine is not None
        assert daemon.engine.memory.layout == layout


def test_a_model_config_may_be_quantised_and_may_ask_for_latents(tmp_path: Path) -> None:
    heads = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "torch_dtype": "float16",
    }
    path = write(tmp_path, heads)
    with made(model_config=path, kv_dtype="float8_e4m3") as daemon:
        assert daemon.engine is not None
        assert daemon.engine.memory.layout == KVLayout(
            2, 2, 8, 16, "float16", Quantization("float8_e4m3")
        )
    path = write(tmp_path, heads | {"kv_lora_rank": 16, "qk_rope_head_dim": 8})
    with made(model_config=path) as daemon:
        assert daemon.engine is not None
        assert daemon.engine.memory.layout == LatentLayout(2, 16, 8, 16, "float16")
    with pytest.raises(InvalidArgumentError) as refused, made(model_config=path, kv_dtype="int8"):
        pass
    assert refused.value.field == "--kv-dtype"


def test_a_scale_file_gives_each_layer_its_scales(tmp_path: Path) -> None:
    path = write(tmp_path, {"k": [0.5, 2], "v": [0.25, 1e-3]})
    with made(**HEADS, **QUANTISED_TENSORS, kv_scale_file=path) as daemon:
        assert daemon.engine is not None
        scales = [daemon.engine.memory.layer(layer).scales for layer in range(2)]
        assert [part and part.fixed for part in scales] == [(0.5, 0.25), (2.0, 1e-3)]


def test_float8_has_scales_of_one_if_no_file_says_others() -> None:
    with made(**HEADS, kv_dtype="float8_e4m3", kv_scales="tensor") as daemon:
        assert daemon.engine is not None
        scales = [daemon.engine.memory.layer(layer).scales for layer in range(2)]
        assert [part and part.fixed for part in scales] == [(1.0, 1.0), (1.0, 1.0)]


def test_a_scale_file_of_another_model_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"k": [1.0] * 3, "v": [1.0] * 3})
    settings = {**HEADS, **QUANTISED_TENSORS, "kv_scale_file": path}
    with pytest.raises(InvalidArgumentError, match="3 numbers, the model has 2") as refused:
        make_daemon(make_config({"storage": "cpu", "num_blocks": 3, **settings}))
    assert refused.value.field == "kv_scale_file"


@pytest.mark.parametrize("settings", [HEADS, {**HEADS, "kv_dtype": "int8"}, LATENT])
def test_memory_is_filled_with_blocks_of_the_layouts_size(settings: dict[str, object]) -> None:
    with made(**settings, num_blocks=None, memory=2**16) as daemon:
        assert daemon.engine is not None
        block_bytes = daemon.engine.memory.layout.block_bytes
        assert daemon.info.num_blocks == 2**16 // block_bytes
        assert daemon.info.layout.block_bytes == block_bytes

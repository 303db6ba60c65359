import json
from pathlib import Path

import pytest

from prefixcache.errors import InvalidArgumentError
from prefixcache.storage.layout import KVLayout, LatentLayout
from prefixcache.storage.model_config import layout_from_model_config

LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}


def write_config(folder: Path, config: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, (32, 8, 128, "bfloat16")),
        (LLAMA | {"head_dim": 80}, (32, 8, 80, "bfloat16")),
        (LLAMA | {"head_dim": None}, (32, 8, 128, "bfloat16")),
        (LLAMA | {"num_key_value_heads": None}, (32, 32, 128, "bfloat16")),
        (LLAMA | {"num_key_value_heads": 1}, (32, 1, 128, "bfloat16")),
        (LLAMA | {"dtype": "float16"}, (32, 8, 128, "float16")),
        (LLAMA | {"torch_dtype": "torch.float32"}, (32, 8, 128, "float32")),
        ({"text_config": LLAMA, "hidden_size": 5}, (32, 8, 128, "bfloat16")),
        (
            {"text_config": LLAMA | {"torch_dtype": None}, "torch_dtype": "float16"},
            (32, 8, 128, "float16"),
        ),
    ],
)
def test_a_model_config_gives_the_layout(
    config: dict[str, object], expected: tuple[int, int, int, str], tmp_path: Path
) -> None:
    layout = layout_from_model_config(write_config(tmp_path, config), block_size=16)
    num_layers, num_kv_heads, head_dim, dtype = expected
    assert layout == KVLayout(num_layers, num_kv_heads, head_dim, 16, dtype)


@pytest.mark.parametrize(
    "config", [DEEPSEEK, {"text_config": DEEPSEEK, "num_hidden_layers": 27}], ids=["text", "whole"]
)
def test_a_model_with_a_latent_rank_has_a_latent_layout(
    config: dict[str, object], tmp_path: Path
) -> None:
    layout = layout_from_model_config(write_config(tmp_path, config), block_size=32)
    assert layout == LatentLayout(61, 512, 64, 32, "bfloat16")


def test_a_latent_rank_of_null_is_none(tmp_path: Path) -> None:
    path = write_config(tmp_path, LLAMA | {"kv_lora_rank": None, "qk_rope_head_dim": 64})
    assert isinstance(layout_from_model_config(path, block_size=16), KVLayout)


def test_an_explicit_dtype_wins_over_the_config(tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    layout = layout_from_model_config(write_config(tmp_path, config), 16, dtype="float32")
    assert layout.dtype == "float32"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_key_value_heads": None, "num_attention_heads": None}, "num_attention_heads"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 100}, "head_dim"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers"),
        ({"num_key_value_heads": [4, 8]}, "num_kv_heads"),
        ({"torch_dtype": None}, "dtype"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
        ({"kv_lora_rank": "512", "qk_rope_head_dim": 64}, "kv_lora_rank"),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 0}, "qk_rope_head_dim"),
    ],
)
def test_a_config_that_does_not_say_enough_is_refused_by_key(
    change: dict[str, object], field: str, tmp_path: Path
) -> None:
    path = write_config(tmp_path, LLAMA | change)
    with pytest.raises(InvalidArgumentError) as refusal:
        layout_from_model_config(path, block_size=16)
    assert refusal.value.field == field


@pytest.mark.parametrize("content", [None, b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_config_is_refused_by_path(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"config\.json") as refusal:
        layout_from_model_config(path, block_size=16)
    assert refusal.value.field == "model_config"

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import cbor2
import pytest

from prefixcache.errors import InvalidArgumentError
from prefixcache.storage.layout import (
    KVLayout,
    fingerprint,
    layout_from_model_config,
    num_blocks_for_memory,
)

LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
IDENTITY = {
    "block_size": 16,
    "model_name": "m",
    "model_revision": "r1",
    "hash_algorithm": "sha256_cbor",
}
LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


def test_a_block_holds_keys_and_values_of_all_layers() -> None:
    assert LAYOUT.block_bytes == 30 * 2 * 3 * 16 * 64 * 2
    assert LAYOUT.shape(5) == (5, 30, 2, 3, 16, 64)
    assert replace(LAYOUT, dtype="float32").block_bytes == 2 * LAYOUT.block_bytes


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, None, "4"])
def test_a_count_that_is_no_positive_integer_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        replace(LAYOUT, **{field: value})
    assert refusal.value.field == field


@pytest.mark.parametrize("dtype", ["float64", "fp16", "", None])
def test_an_unknown_dtype_is_refused(dtype: object) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        replace(LAYOUT, dtype=dtype)
    assert refusal.value.field == "dtype"


def test_the_fingerprint_can_be_recomputed_from_its_recipe() -> None:
    without_storage = {
        "model_name": "m",
        "model_revision": "r1",
        "block_size": 16,
        "hash_algorithm": "sha256_cbor",
        "hash_recipe_version": 1,
    }
    identity = without_storage | {
        "num_layers": 30,
        "num_kv_heads": 3,
        "head_dim": 64,
        "dtype": "bfloat16",
    }
    for layout, entries in ((LAYOUT, identity), (None, without_storage)):
        expected = hashlib.sha256(cbor2.dumps(entries, canonical=True)).digest()
        assert fingerprint(layout, **IDENTITY) == expected


def test_the_fingerprint_tells_every_field_apart() -> None:
    layouts = [
        None,
        LAYOUT,
        replace(LAYOUT, num_layers=31),
        replace(LAYOUT, num_kv_heads=6),
        replace(LAYOUT, head_dim=128),
        replace(LAYOUT, dtype="float16"),
    ]
    prints = [fingerprint(layout, **IDENTITY) for layout in layouts]
    for field, value in IDENTITY.items():
        other = 32 if field == "block_size" else f"{value}x"
        prints.append(fingerprint(LAYOUT, **(IDENTITY | {field: other})))
    assert len(set(prints)) == len(prints)


def test_memory_is_filled_with_whole_blocks() -> None:
    size = LAYOUT.block_bytes
    assert num_blocks_for_memory(LAYOUT, 10 * size) == 10
    assert num_blocks_for_memory(LAYOUT, 10 * size - 1) == 9
    assert num_blocks_for_memory(LAYOUT, 2**50) == 2**50 // size


@pytest.mark.parametrize("memory_bytes", [0, -1, LAYOUT.block_bytes - 1])
def test_memory_for_less_than_a_block_is_refused_with_the_numbers(memory_bytes: int) -> None:
    with pytest.raises(InvalidArgumentError, match=str(LAYOUT.block_bytes)) as refusal:
        num_blocks_for_memory(LAYOUT, memory_bytes)
    assert refusal.value.field == "memory"


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
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
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

import hashlib
from dataclasses import replace

import cbor2
import pytest

from prefixcache.errors import InvalidArgumentError
from prefixcache.storage.layout import (
    QUANTIZED_DTYPES,
    SCALE_GRANULARITIES,
    KVLayout,
    LatentLayout,
    Layout,
    Quantization,
    fingerprint,
    num_blocks_for_memory,
)

LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
LATENT = LatentLayout(num_layers=5, latent_dim=512, rope_dim=64, block_size=16, dtype="bfloat16")
IDENTITY = {
    "block_size": 16,
    "model_name": "m",
    "model_revision": "r1",
    "hash_algorithm": "sha256_cbor",
}


def test_a_block_holds_keys_and_values_of_all_layers() -> None:
    assert LAYOUT.block_bytes == 30 * 2 * 3 * 16 * 64 * 2
    assert LAYOUT.block_shape == (30, 2, 3, 16, 64)
    assert (LAYOUT.value_dim, LAYOUT.stored_dtype) == (64, "bfloat16")
    assert replace(LAYOUT, dtype="float32").block_bytes == 2 * LAYOUT.block_bytes
    # No padding, whatever the size: a block of 1 element of each.
    assert KVLayout(1, 1, 1, 1, "float16").block_bytes == 4


@pytest.mark.parametrize("stored", ["float8_e4m3", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_quantised_block_has_bytes_and_behind_them_scales(stored: str, dtype: str) -> None:
    layout = replace(LAYOUT, dtype=dtype, quantization=Quantization(stored))
    assert (layout.dtype, layout.stored_dtype, layout.element_bytes) == (dtype, stored, 1)
    assert layout.block_shape == LAYOUT.block_shape
    assert layout.scales_shape == (30, 2, 3, 16)
    assert layout.kv_bytes == 30 * 2 * 3 * 16 * 64
    assert layout.block_bytes == layout.kv_bytes + 30 * 2 * 3 * 16 * 4

    one_a_tensor = replace(layout, quantization=Quantization(stored, "tensor"))
    assert one_a_tensor.scales_shape == (30, 2)
    assert one_a_tensor.block_bytes == layout.kv_bytes + 30 * 2 * 4


@pytest.mark.parametrize("granularity", ["token_head", "tensor"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 1, 5, 3), (1, 3, 20, 7), (2, 2, 16, 4)])
def test_a_quantised_block_and_its_scales_stay_aligned(
    shape: tuple[int, int, int, int], granularity: str
) -> None:
    layout = KVLayout(*shape, "float16", Quantization("int8", granularity))
    num_layers, num_kv_heads, head_dim, block_size = shape
    num_elements = num_layers * 2 * num_kv_heads * block_size * head_dim
    num_scales = num_layers * 2 * (num_kv_heads * block_size if granularity == "token_head" else 1)
    assert layout.kv_bytes % 16 == layout.block_bytes % 16 == 0
    assert 0 <= layout.kv_bytes - num_elements < 16
    assert 0 <= layout.block_bytes - layout.kv_bytes - 4 * num_scales < 16


def test_a_latent_block_holds_one_latent_a_token_and_layer() -> None:
    assert LATENT.block_shape == (5, 16, 576)
    assert LATENT.block_bytes == 5 * 16 * 576 * 2
    assert (LATENT.num_kv_heads, LATENT.head_dim, LATENT.value_dim) == (1, 576, 512)
    assert LATENT.quantization is None and LATENT.scales_shape is None


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, None, "4"])
def test_a_count_that_is_no_positive_integer_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        replace(LAYOUT, **{field: value})
    assert refusal.value.field == field


@pytest.mark.parametrize("field", ["num_layers", "latent_dim", "rope_dim", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, None, "4"])
def test_a_latent_count_that_is_no_positive_integer_is_refused_by_name(
    field: str, value: object
) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        replace(LATENT, **{field: value})
    assert refusal.value.field == field


@pytest.mark.parametrize("layout", [LAYOUT, LATENT], ids=lambda layout: layout.kind)
@pytest.mark.parametrize("dtype", ["float64", "fp16", "int8", "float8_e4m3", "", None])
def test_an_unknown_dtype_is_refused(layout: Layout, dtype: object) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        replace(layout, dtype=dtype)
    assert refusal.value.field == "dtype"


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("float8_e5m2",), "quantization.dtype"),
        (("float16",), "quantization.dtype"),
        (("int8", "block"), "quantization.scales"),
        (("int8", None), "quantization.scales"),
    ],
)
def test_an_unknown_quantisation_is_refused(words: tuple[str, ...], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        Quantization(*words)
    assert refusal.value.field == field


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
    quantised = replace(LAYOUT, quantization=Quantization("int8", "tensor"))
    latent = without_storage | {
        "num_layers": 5,
        "latent_dim": 512,
        "rope_dim": 64,
        "dtype": "bfloat16",
    }
    for layout, entries in (
        (LAYOUT, identity),
        (None, without_storage),
        (quantised, identity | {"quantization": "int8", "scales": "tensor"}),
        (LATENT, latent),
    ):
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
        *(
            replace(LAYOUT, quantization=Quantization(dtype, scales))
            for dtype in QUANTIZED_DTYPES
            for scales in SCALE_GRANULARITIES
        ),
        KVLayout(5, 1, 576, 16, "bfloat16"),
        LATENT,
        replace(LATENT, latent_dim=64, rope_dim=512),
        replace(LATENT, num_layers=6),
        replace(LATENT, dtype="float16"),
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

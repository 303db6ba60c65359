"""The hash chain against golden values, the reference encoder and the recipe in plain Python."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import pytest
import xxhash

from prefixcache.core.extra_keys import (
    MAX_ITEM_LAYERS,
    MAX_TEXT_BYTES,
    block_extra_keys,
    check_extra_keys,
)
from prefixcache.core.hashing import (
    HASH_ALGORITHMS,
    HASH_RECIPE_VERSION,
    HashAlgorithm,
    Hasher,
    none_hash,
)
from prefixcache.errors import InvalidArgumentError
from prefixcache.types import NO_EXTRA_KEYS, ExtraKeys, Lora, MultimodalItem, PromptEmbeds

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "block_hashes.json").read_text())
SEED = "a seed of the tests"
SIZE = 16
EDGES = (0, 1, 23, 24, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1)
IMAGE = MultimodalItem("image", 2, 5)


def outside_hash(name: str, parent: bytes, tokens: Sequence[int], keys: list[list[Any]]) -> bytes:
    """One block's hash as somebody with only the written recipe computes it."""
    if name == "xxh3":
        data = parent + struct.pack(f"<{len(tokens)}I", *tokens)
        data += cbor2.dumps(keys, canonical=True) if keys else b""
    else:
        data = cbor2.dumps([parent, list(tokens), keys or None], canonical=True)
    if name == "sha256_cbor":
        return hashlib.sha256(data).digest()
    return xxhash.xxh3_128(data).digest()


def outside_chain(
    name: str, parent: bytes, tokens: Sequence[int], size: int, keys: list[list[Any]] | None = None
) -> list[bytes]:
    hashes = []
    for index in range(len(tokens) // size):
        block = [int(token) for token in tokens[index * size : (index + 1) * size]]
        parent = outside_hash(name, parent, block, keys[index] if keys else [])
        hashes.append(parent)
    return hashes


def tokens_of(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


def chain(
    values: Sequence[int],
    extra_keys: ExtraKeys = NO_EXTRA_KEYS,
    *,
    name: str = "sha256_cbor",
    size: int = 4,
) -> list[bytes]:
    hasher = Hasher(HASH_ALGORITHMS[name], SEED, size)
    return list(hasher.chain(None, tokens_of(values), extra_keys).hashes)


def golden_extra_keys(row: dict[str, Any]) -> ExtraKeys:
    """The request that has the extra keys of a golden row, from its case's name."""
    case = row["case"][:2]
    lora = Lora("ad1", "/p/ad1") if case in ("G3", "G7") else None
    image = (MultimodalItem("abc", 4, 20),) if case in ("G5", "G7") else ()
    salt = {"G4": "s1", "G7": "s1"}.get(case, "")
    embeds = ()
    if case == "G6":
        digests = tuple(bytes.fromhex(keys[0][1]) for keys in row["extra_keys"])
        embeds = (PromptEmbeds(0, 32, digests),)
    return ExtraKeys(lora, image, salt, embeds)


@pytest.mark.parametrize(
    "row", GOLDEN, ids=lambda row: f"{row['algo']}-{row['seed']}-{row['case'][:2]}"
)
def test_hashes_and_none_hash_are_byte_equal_to_vllm(row: dict[str, Any]) -> None:
    hasher = Hasher(HASH_ALGORITHMS[row["algo"]], row["seed"], SIZE)
    assert hasher.none_hash.hex() == row["none_hash"]
    values = [token for block in row["token_blocks"] for token in block]
    hashes = hasher.chain(None, tokens_of(values), golden_extra_keys(row)).hashes
    assert [block_hash.hex() for block_hash in hashes] == row["digests"]


def test_golden_data_cover_both_recipes_and_all_cases() -> None:
    assert {row["algo"] for row in GOLDEN} == {"sha256_cbor", "xxhash_cbor"}
    assert {row["case"][:2] for row in GOLDEN} == {f"G{case}" for case in range(1, 8)}
    assert len(GOLDEN) == 21


def test_an_embeds_digest_is_the_sha256_of_the_blocks_slice() -> None:
    embeds = np.arange(128, dtype=np.float32).reshape(32, 4)
    row = next(row for row in GOLDEN if row["case"].startswith("G6"))
    for block, keys in enumerate(row["extra_keys"]):
        part = embeds[block * SIZE : (block + 1) * SIZE]
        assert keys == [["prompt_embeds", hashlib.sha256(part.tobytes()).hexdigest()]]


@pytest.mark.parametrize("size", [1, 3, 16, 24, 300])
@pytest.mark.parametrize("name", HASH_ALGORITHMS)
def test_random_tokens_around_cbor_widths_hash_as_the_reference_encoder_says(
    name: str, size: int
) -> None:
    random = np.random.default_rng(size)
    near = np.array([edge + step for edge in EDGES for step in (-1, 0, 1)], dtype=np.int64)
    values = random.choice(near.clip(0, 2**32 - 1), size * 7 + size // 2)
    hasher = Hasher(HASH_ALGORITHMS[name], SEED, size)
    assert list(hasher.chain(None, tokens_of(values), NO_EXTRA_KEYS).hashes) == outside_chain(
        name, hasher.none_hash, values.tolist(), size
    )


@pytest.mark.parametrize("width", EDGES)
@pytest.mark.parametrize("name", HASH_ALGORITHMS)
def test_a_block_of_one_cbor_width_hashes_right(name: str, width: int) -> None:
    hasher = Hasher(HASH_ALGORITHMS[name], SEED, 4)
    assert chain([width] * 8, name=name) == outside_chain(name, hasher.none_hash, [width] * 8, 4)


@pytest.mark.parametrize("num_tokens", [32767, 32768, 32769, 32784, 65536, 70001])
@pytest.mark.parametrize("name", ["sha256_cbor", "xxh3"])
def test_prompts_longer_than_an_encoding_chunk_hash_as_short_ones_do(
    name: str, num_tokens: int
) -> None:
    values = np.random.default_rng(num_tokens).integers(0, 152_000, num_tokens)
    hasher = Hasher(HASH_ALGORITHMS[name], SEED, SIZE)
    hashes = hasher.chain(None, tokens_of(values), NO_EXTRA_KEYS).hashes
    assert list(hashes) == outside_chain(name, hasher.none_hash, values.tolist(), SIZE)


@pytest.mark.parametrize("size", [5, 1000, 40_000])
def test_a_block_size_that_does_not_divide_the_chunk_hashes_right(size: int) -> None:
    values = np.random.default_rng(size).integers(0, 70_000, 80_000)
    hasher = Hasher(HASH_ALGORITHMS["xxhash_cbor"], SEED, size)
    hashes = hasher.chain(None, tokens_of(values), NO_EXTRA_KEYS).hashes
    assert list(hashes) == outside_chain("xxhash_cbor", hasher.none_hash, values.tolist(), size)


@pytest.mark.parametrize("name", HASH_ALGORITHMS)
def test_extra_keys_of_chunked_prompts_stay_with_their_blocks(name: str) -> None:
    num_tokens = 40_000
    values = np.random.default_rng(1).integers(0, 152_000, num_tokens)
    items = (MultimodalItem("late", 32_760, 20), MultimodalItem("early", 3, 2))
    hasher = Hasher(HASH_ALGORITHMS[name], SEED, SIZE)
    hashes = hasher.chain(None, tokens_of(values), ExtraKeys(multimodal_items=items)).hashes
    keys: list[list[Any]] = [[] for _ in range(num_tokens // SIZE)]
    keys[0] = [["mm", "early", 3]]
    keys[2047] = [["mm", "late", 8]]
    keys[2048] = [["mm", "late", -8]]
    assert list(hashes) == outside_chain(name, hasher.none_hash, values.tolist(), SIZE, keys)


@pytest.mark.parametrize("name", HASH_ALGORITHMS)
def test_an_outsider_can_recompute_hashes_from_the_written_recipe(name: str) -> None:
    digest = hashlib.sha256 if name == "sha256_cbor" else xxhash.xxh3_128
    start = digest(cbor2.dumps(SEED, canonical=True)).digest()
    keys = ExtraKeys(
        Lora("ad", "/v1"),
        (MultimodalItem("b", 6, 3), MultimodalItem("a", 1, 4)),
        "salt",
        (PromptEmbeds(9, 3, (b"\x01" * 32,)),),
    )
    lora = ["lora", "ad", "/v1"]
    expected = outside_chain(
        name,
        start,
        list(range(12)),
        4,
        [
            [lora, ["mm", "a", 1], ["cache_salt", "salt"]],
            [lora, ["mm", "a", -3], ["mm", "b", 2]],
            [lora, ["mm", "b", -2], ["prompt_embeds", b"\x01" * 32]],
        ],
    )
    assert chain(range(12), keys, name=name) == expected
    assert HASH_RECIPE_VERSION == 1


# ---- NONE_HASH


@pytest.mark.parametrize("name", HASH_ALGORITHMS)
def test_without_a_seed_none_hash_differs_between_starts(name: str) -> None:
    algorithm = HASH_ALGORITHMS[name]
    values = {none_hash(algorithm, None) for _ in range(8)}
    assert len(values) == 8
    assert {len(value) for value in values} == {algorithm.digest_bytes}


@pytest.mark.parametrize("name", HASH_ALGORITHMS)
def test_the_same_seed_gives_the_same_hashes_and_another_seed_others(name: str) -> None:
    algorithm, values = HASH_ALGORITHMS[name], tokens_of(range(8))

    def hashes(seed: str | None) -> list[bytes]:
        return list(Hasher(algorithm, seed, 4).chain(None, values, NO_EXTRA_KEYS).hashes)

    assert hashes("seed one") == hashes("seed one")
    assert hashes("seed one")[0] != hashes("seed two")[0]
    assert hashes(None)[0] != hashes(None)[0]


def test_a_seed_that_is_an_empty_text_is_a_seed() -> None:
    algorithm = HASH_ALGORITHMS["sha256_cbor"]
    assert none_hash(algorithm, "") == hashlib.sha256(b"\x60").digest()


def test_the_default_recipe_is_the_only_one_with_a_strong_digest() -> None:
    strong = {name for name, recipe in HASH_ALGORITHMS.items() if recipe.is_cryptographic}
    assert strong == {"sha256_cbor"}


# ---- the chain


def test_equal_blocks_of_one_prompt_have_different_hashes() -> None:
    first, second = chain([1, 2, 3, 4, 1, 2, 3, 4])
    assert first != second
    assert first == chain([1, 2, 3, 4])[0]


def test_tokens_past_the_last_full_block_do_not_matter() -> None:
    assert chain(range(11)) == chain(range(8))
    assert chain(range(3)) == []


def test_a_chain_continued_from_a_parent_equals_one_made_at_once() -> None:
    keys = ExtraKeys(Lora("a"), (MultimodalItem("image", 3, 8),), "salt")
    hasher, values = Hasher(HASH_ALGORITHMS["sha256_cbor"], SEED, 4), tokens_of(range(16))
    whole = hasher.chain(None, values, keys).hashes
    for split in range(1, 4):
        rest = hasher.chain(whole[split - 1], values[split * 4 :], keys, first_block=split)
        assert list(rest.hashes) == list(whole[split:])


def test_an_injected_digest_is_used() -> None:
    constant = HashAlgorithm("constant", 2, lambda data: b"\x07\x07", True, False)
    hasher = Hasher(constant, SEED, 2)
    assert list(hasher.chain(None, tokens_of(range(6)), NO_EXTRA_KEYS).hashes) == [b"\x07\x07"] * 3


# ---- extra keys


def decoded(extra_keys: ExtraKeys, num_blocks: int, size: int = 4, first: int = 0) -> list[Any]:
    encoded = block_extra_keys(extra_keys, first, num_blocks, size)
    assert encoded is not None
    return [cbor2.loads(block) if block else [] for block in encoded]


def test_extra_keys_stand_in_the_written_order_whatever_the_order_given() -> None:
    late, early = MultimodalItem("late", 3, 1), MultimodalItem("early", 0, 2)
    embeds = PromptEmbeds(2, 1, (b"d" * 32,))
    keys = ExtraKeys(Lora("l", "p"), (late, early), "salt", (embeds,))
    assert decoded(keys, 1) == [
        [
            ["lora", "l", "p"],
            ["mm", "early", 0],
            ["mm", "late", 3],
            ["cache_salt", "salt"],
            ["prompt_embeds", b"d" * 32],
        ]
    ]


def test_lora_is_on_every_block_and_the_salt_on_the_first_only() -> None:
    assert decoded(ExtraKeys(Lora("l"), cache_salt="s"), 3) == [
        [["lora", "l", ""], ["cache_salt", "s"]],
        [["lora", "l", ""]],
        [["lora", "l", ""]],
    ]
    assert decoded(ExtraKeys(Lora("l"), cache_salt="s"), 1, first=1) == [[["lora", "l", ""]]]


def test_an_item_is_on_each_block_that_it_overlaps_with_its_offset_there() -> None:
    item = MultimodalItem("image", 3, 6)
    assert decoded(ExtraKeys(multimodal_items=(item,)), 4) == [
        [["mm", "image", 3]],
        [["mm", "image", -1]],
        [["mm", "image", -5]],
        [],
    ]


def test_an_item_that_ends_at_a_block_edge_is_not_on_the_next_block() -> None:
    item = MultimodalItem("image", 4, 4)
    assert decoded(ExtraKeys(multimodal_items=(item,)), 3) == [[], [["mm", "image", 0]], []]


def test_each_block_with_embeds_has_its_own_digest() -> None:
    digests = tuple(bytes([number]) * 32 for number in range(3))
    keys = ExtraKeys(prompt_embeds=(PromptEmbeds(3, 6, digests),))
    assert decoded(keys, 3) == [[["prompt_embeds", digest]] for digest in digests]
    assert decoded(keys, 1, first=2) == [[["prompt_embeds", digests[2]]]]


@pytest.mark.parametrize("name", HASH_ALGORITHMS)
def test_absent_and_empty_extra_keys_are_one_and_the_same(name: str) -> None:
    absent = chain(range(8), name=name)
    assert chain(range(8), ExtraKeys(None, (), "", ()), name=name) == absent
    assert block_extra_keys(ExtraKeys(None, (), "", ()), 0, 2, 4) is None
    assert chain(range(8), ExtraKeys(Lora("a", "")), name=name) == chain(
        range(8), ExtraKeys(Lora("a")), name=name
    )


@pytest.mark.parametrize("name", HASH_ALGORITHMS)
def test_each_kind_of_extra_key_changes_the_hash_in_its_own_way(name: str) -> None:
    """A salt that is spelled like a LoRA name is another key; so is a reload of an adapter."""
    variants = [
        NO_EXTRA_KEYS,
        ExtraKeys(Lora("S")),
        ExtraKeys(Lora("S", "v1")),
        ExtraKeys(Lora("S", "v2")),
        ExtraKeys(cache_salt="S"),
        ExtraKeys(multimodal_items=(MultimodalItem("S", 0, 1),)),
        ExtraKeys(multimodal_items=(MultimodalItem("S", 1, 1),)),
        ExtraKeys(prompt_embeds=(PromptEmbeds(0, 1, (b"S" * 32,)),)),
        ExtraKeys(Lora("S"), cache_salt="S"),
    ]
    hashes = [chain([1, 2, 3, 4], keys, name=name)[0] for keys in variants]
    assert len(set(hashes)) == len(variants)


def test_a_salt_changes_every_hash_of_the_chain() -> None:
    plain, salted = chain(range(16)), chain(range(16), ExtraKeys(cache_salt="a"))
    assert not set(plain) & set(salted)


def test_blocks_before_an_image_keep_their_hash() -> None:
    with_image = chain(range(16), ExtraKeys(multimodal_items=(MultimodalItem("a", 6, 4),)))
    plain = chain(range(16))
    assert with_image[0] == plain[0]
    assert not set(with_image[1:]) & set(plain)


# ---- what is refused


@pytest.mark.parametrize(
    ("extra_keys", "field"),
    [
        (ExtraKeys(Lora("", "path")), "extra_keys.lora.name"),
        (
            ExtraKeys(multimodal_items=(MultimodalItem("", 0, 1),)),
            "extra_keys.multimodal_items.identifier",
        ),
        (
            ExtraKeys(multimodal_items=(MultimodalItem("a", 0, 0),)),
            "extra_keys.multimodal_items.offset",
        ),
        (
            ExtraKeys(multimodal_items=(MultimodalItem("a", 8, 5),)),
            "extra_keys.multimodal_items.offset",
        ),
        (
            ExtraKeys(multimodal_items=(MultimodalItem("a", -1, 2),)),
            "extra_keys.multimodal_items.offset",
        ),
        (
            ExtraKeys(prompt_embeds=(PromptEmbeds(0, 5, (b"d" * 32,)),)),
            "extra_keys.prompt_embeds.digests",
        ),
        (
            ExtraKeys(prompt_embeds=(PromptEmbeds(0, 4, (b"short",)),)),
            "extra_keys.prompt_embeds.digests",
        ),
        (
            ExtraKeys(prompt_embeds=(PromptEmbeds(10, 4, (b"d" * 32, b"d" * 32)),)),
            "extra_keys.prompt_embeds.offset",
        ),
    ],
)
def test_extra_keys_that_cannot_belong_to_the_tokens_are_refused_by_name(
    extra_keys: ExtraKeys, field: str
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check_extra_keys(extra_keys, 0, 12, 4)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda text: ExtraKeys(Lora(text)), "lora.name"),
        (lambda text: ExtraKeys(Lora("a", text)), "lora.path"),
        (lambda text: ExtraKeys(cache_salt=text), "cache_salt"),
        (
            lambda text: ExtraKeys(multimodal_items=(MultimodalItem(text, 0, 1),)),
            "multimodal_items.identifier",
        ),
    ],
)
def test_a_text_that_would_make_every_block_dear_to_hash_is_refused_by_name(
    make: Callable[[str], ExtraKeys], field: str
) -> None:
    check_extra_keys(make("é" * (MAX_TEXT_BYTES // 2)), 0, 12, 4)
    with pytest.raises(InvalidArgumentError) as caught:
        check_extra_keys(make("é" * (MAX_TEXT_BYTES // 2) + "x"), 0, 12, 4)
    assert caught.value.field == f"extra_keys.{field}"


def test_items_may_overlap_but_not_all_of_them_on_every_block() -> None:
    whole = tuple(MultimodalItem(str(index), 0, 12) for index in range(MAX_ITEM_LAYERS + 1))
    check_extra_keys(ExtraKeys(multimodal_items=whole[1:]), 0, 12, 4)
    with pytest.raises(InvalidArgumentError) as caught:
        check_extra_keys(ExtraKeys(multimodal_items=whole), 0, 12, 4)
    assert caught.value.field == "extra_keys.multimodal_items"


def test_extra_keys_that_fit_are_accepted() -> None:
    embeds = PromptEmbeds(7, 2, (b"d" * 32, b"e" * 32))
    check_extra_keys(ExtraKeys(Lora("a"), (IMAGE,), "salt", (embeds,)), 0, 12, 4)
    check_extra_keys(NO_EXTRA_KEYS, 0, 0, 4)

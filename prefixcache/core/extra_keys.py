"""Extra keys: what besides token ids tells blocks apart, block by block.

Owns which keys belong to which block, their encoding, their checks, and how they follow a sequence
that grows or is cut. All functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cbor2

from prefixcache.errors import InvalidArgumentError
from prefixcache.types import ExtraKeys, MultimodalItem, PromptEmbeds

MAX_TEXT_BYTES = 4096
"""Longest LoRA name or path, identifier or salt. LoRA enters the hash of every block, so a longer
one would make a prompt cost its length times the number of blocks."""
MAX_ITEM_LAYERS = 16
"""Items may overlap, such as the sound and the pictures of a video; so much of each other."""
ExtraKey = tuple[str | int | bytes, ...]
"""One tagged extra key, such as `("lora", name, path)`."""


@dataclass(frozen=True, slots=True)
class NamespacedKeys(ExtraKeys):
    """Extra keys of a tenant's prompt: blocks are shared within `namespace` and no further.

    Made by the daemon alone: neither the wire nor the clients' `ExtraKeys` has the field.
    """

    namespace: str = ""

    def __bool__(self) -> bool:
        return True


def in_namespace(extra_keys: ExtraKeys, namespace: str) -> ExtraKeys:
    """The keys of a prompt in that namespace; an empty one is that of no tenant."""
    if not namespace:
        return extra_keys
    return NamespacedKeys(
        extra_keys.lora,
        extra_keys.multimodal_items,
        extra_keys.cache_salt,
        extra_keys.prompt_embeds,
        namespace,
    )


def block_extra_keys(
    extra_keys: ExtraKeys, first_block: int, num_blocks: int, block_size: int
) -> list[bytes] | None:
    """Canonical CBOR of the extra keys of blocks `first_block ..< first_block + num_blocks`.

    `b""` stands for a block without extra keys; None for no extra keys in any of them. The order
    within a block is tenant, LoRA, multimodal items, cache salt, prompt embeddings; items by
    offset.
    """
    if not extra_keys or num_blocks == 0:
        return None
    if not extra_keys.reaches_later_blocks:
        return _first_block_keys(extra_keys, num_blocks) if first_block == 0 else None
    keys: list[list[ExtraKey]] = [[] for _ in range(num_blocks)]

    def overlapped(offset: int, num_tokens: int) -> range:
        first = max(offset // block_size, first_block)
        last = min(-(-(offset + num_tokens) // block_size), first_block + num_blocks)
        return range(first, last)

    if first_block == 0:
        keys[0] += _tenant_key(extra_keys)
    if extra_keys.lora:
        tag = ("lora", extra_keys.lora.name, extra_keys.lora.path)
        for block in keys:
            block.append(tag)
    for item in sorted(extra_keys.multimodal_items, key=lambda item: item.offset):
        for block_index in overlapped(item.offset, item.num_tokens):
            start = item.offset - block_index * block_size
            keys[block_index - first_block].append(("mm", item.identifier, start))
    if first_block == 0:
        keys[0] += _salt_key(extra_keys)
    for embeds in sorted(extra_keys.prompt_embeds, key=lambda embeds: embeds.offset):
        base = embeds.offset // block_size
        for block_index in overlapped(embeds.offset, embeds.num_tokens):
            digest = embeds.digests[block_index - base]
            keys[block_index - first_block].append(("prompt_embeds", digest))
    return _encode_keys(keys)


def _first_block_keys(extra_keys: ExtraKeys, num_blocks: int) -> list[bytes]:
    """Of keys that the first block alone has: no step a block."""
    tail = cbor2.dumps((*_tenant_key(extra_keys), *_salt_key(extra_keys)), canonical=True)
    return [tail] + [b""] * (num_blocks - 1)


def _tenant_key(extra_keys: ExtraKeys) -> list[ExtraKey]:
    return [("tenant", extra_keys.namespace)] if isinstance(extra_keys, NamespacedKeys) else []


def _salt_key(extra_keys: ExtraKeys) -> list[ExtraKey]:
    return [("cache_salt", extra_keys.cache_salt)] if extra_keys.cache_salt else []


def _encode_keys(keys: list[list[ExtraKey]]) -> list[bytes] | None:
    encoded: dict[tuple[ExtraKey, ...], bytes] = {(): b""}
    tails = []
    for block in map(tuple, keys):
        tail = encoded.get(block)
        if tail is None:
            tail = encoded[block] = cbor2.dumps(block, canonical=True)
        tails.append(tail)
    return tails if len(encoded) > 1 else None


def check_extra_keys(extra_keys: ExtraKeys, first_token: int, end_token: int, size: int) -> None:
    """Refuse extra keys that cannot belong to the tokens `[first_token, end_token)`.

    size: tokens a block. Raises InvalidArgumentError with the field's name.
    """
    if extra_keys.lora:
        if not extra_keys.lora.name:
            raise InvalidArgumentError("extra_keys.lora.name", "is empty; a path needs a name")
        _check_length("lora.name", extra_keys.lora.name)
        _check_length("lora.path", extra_keys.lora.path)
    _check_length("cache_salt", extra_keys.cache_salt)
    num_item_tokens = 0
    for item in extra_keys.multimodal_items:
        if not item.identifier:
            raise InvalidArgumentError("extra_keys.multimodal_items.identifier", "is empty")
        _check_length("multimodal_items.identifier", item.identifier)
        _check_span("multimodal_items", item.offset, item.num_tokens, first_token, end_token)
        num_item_tokens += item.num_tokens
    if num_item_tokens > MAX_ITEM_LAYERS * (end_token - first_token):
        raise InvalidArgumentError(
            "extra_keys.multimodal_items",
            f"have {num_item_tokens} tokens together, at most {MAX_ITEM_LAYERS} for each of the "
            f"{end_token - first_token} tokens of this call",
        )
    for embeds in extra_keys.prompt_embeds:
        _check_span("prompt_embeds", embeds.offset, embeds.num_tokens, first_token, end_token)
        end = embeds.offset + embeds.num_tokens
        num_blocks = -(-end // size) - embeds.offset // size
        if len(embeds.digests) != num_blocks or any(len(d) != 32 for d in embeds.digests):
            raise InvalidArgumentError(
                "extra_keys.prompt_embeds.digests",
                f"needs one 32-byte digest for each of the {num_blocks} blocks it overlaps",
            )


def _check_length(name: str, text: str) -> None:
    num_bytes = len(text.encode())
    if num_bytes > MAX_TEXT_BYTES:
        raise InvalidArgumentError(
            f"extra_keys.{name}", f"has {num_bytes} bytes, at most {MAX_TEXT_BYTES}"
        )


def _check_span(name: str, offset: int, num_tokens: int, first_token: int, end_token: int) -> None:
    if num_tokens < 1 or offset < first_token or offset + num_tokens > end_token:
        raise InvalidArgumentError(
            f"extra_keys.{name}.offset",
            f"[{offset}, {offset + num_tokens}) is empty or outside the tokens of this call, "
            f"[{first_token}, {end_token})",
        )


def merge_extra_keys(left: ExtraKeys, right: ExtraKeys) -> ExtraKeys:
    """Items of an Append join those of the sequence; the rest stays as it is."""
    if not right:
        return left
    return replace(
        left,
        multimodal_items=left.multimodal_items + right.multimodal_items,
        prompt_embeds=left.prompt_embeds + right.prompt_embeds,
    )


def splits_block_of_item(extra_keys: ExtraKeys, num_tokens: int, block_size: int) -> bool:
    """True if cutting to `num_tokens` leaves a block with a part of what an item put into it."""
    spans: tuple[MultimodalItem | PromptEmbeds, ...] = (
        *extra_keys.multimodal_items,
        *extra_keys.prompt_embeds,
    )
    return num_tokens % block_size != 0 and any(
        span.offset < num_tokens < span.offset + span.num_tokens for span in spans
    )


def cut_extra_keys(extra_keys: ExtraKeys, num_tokens: int, block_size: int) -> ExtraKeys:
    """What is left of the extra keys when only the first `num_tokens` tokens are kept."""
    items = tuple(
        MultimodalItem(item.identifier, item.offset, min(item.num_tokens, num_tokens - item.offset))
        for item in extra_keys.multimodal_items
        if item.offset < num_tokens
    )
    embeds = []
    for span in extra_keys.prompt_embeds:
        if span.offset < num_tokens:
            length = min(span.num_tokens, num_tokens - span.offset)
            num_blocks = -(-(span.offset + length) // block_size) - span.offset // block_size
            embeds.append(PromptEmbeds(span.offset, length, span.digests[:num_blocks]))
    return replace(extra_keys, multimodal_items=items, prompt_embeds=tuple(embeds))

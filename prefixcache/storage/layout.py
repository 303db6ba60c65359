"""Shapes and sizes of K/V storage, as plain numbers.

Owns: the layout of the pool, its fingerprint, and how both are derived from a model's config.
Owns no memory (see `pool_memory`) and imports no torch, so that clients and a daemon without
storage can use it. Everything here is pure but for reading the config file.

The order is `[N, L, 2, Hkv, B, D]`: one block's K/V of all layers are one contiguous span, which
copy-on-write, other processes and slower tiers move as a whole, and within it each head's `[B, D]`
tile is contiguous. Rejected: a tensor per layer (a block is then in 2·L places), and tokens before
heads (attention reads one head at a time, up to 2x slower from tiles with gaps).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import cbor2

from prefixcache.core.hashing import HASH_RECIPE_VERSION
from prefixcache.errors import InvalidArgumentError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one block holds.

    `dtype` is a key of `DTYPE_BYTES`. Raises InvalidArgumentError, naming the field, on a count
    below 1 or another dtype.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "dtype" and (type(value) is not int or value < 1):
                raise InvalidArgumentError(field.name, f"must be an integer >= 1, is {value!r}")
        if self.dtype not in DTYPE_BYTES:
            names = ", ".join(DTYPE_BYTES)
            raise InvalidArgumentError("dtype", f"must be one of {names}, is {self.dtype!r}")

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: K and V of all layers."""
        elements = self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim
        return elements * self.dtype_bytes

    def shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """`(N, L, 2, Hkv, B, D)`."""
        return (
            num_blocks,
            self.num_layers,
            2,
            self.num_kv_heads,
            self.block_size,
            self.head_dim,
        )


def fingerprint(
    layout: KVLayout | None,
    *,
    block_size: int,
    model_name: str,
    model_revision: str,
    hash_algorithm: str,
) -> bytes:
    """Identity of stored K/V, 32 bytes: two parties may exchange blocks only if it is equal.

    layout: None where the clients own their K/V memory; then its entries below are absent.

    SHA-256 of the canonical CBOR of this map (text keys; counts as integers, the rest as text):
    `model_name`, `model_revision`, `block_size`, `hash_algorithm`, `hash_recipe_version`, and of
    the layout `num_layers`, `num_kv_heads`, `head_dim`, `dtype`.
    """
    identity: dict[str, str | int] = {
        "model_name": model_name,
        "model_revision": model_revision,
        "block_size": block_size,
        "hash_algorithm": hash_algorithm,
        "hash_recipe_version": HASH_RECIPE_VERSION,
    }
    if layout is not None:
        identity |= {
            "num_layers": layout.num_layers,
            "num_kv_heads": layout.num_kv_heads,
            "head_dim": layout.head_dim,
            "dtype": layout.dtype,
        }
    return hashlib.sha256(cbor2.dumps(identity, canonical=True)).digest()


def num_blocks_for_memory(layout: KVLayout, memory_bytes: int) -> int:
    """How many blocks fit into `memory_bytes`; InvalidArgumentError if not even one does."""
    num_blocks = memory_bytes // layout.block_bytes
    if num_blocks < 1:
        raise InvalidArgumentError(
            "memory", f"{memory_bytes} bytes, and one block takes {layout.block_bytes} bytes"
        )
    return num_blocks


def layout_from_model_config(path: Path, block_size: int, dtype: str | None = None) -> KVLayout:
    """Read the layout off a Hugging Face `config.json`.

    Uses `num_hidden_layers`, `num_key_value_heads` (else `num_attention_heads`), `head_dim` (else
    `hidden_size / num_attention_heads`) and `dtype` or `torch_dtype`, in `text_config` if the
    model has other parts too. An explicit `dtype` wins over the file's.

    Raises InvalidArgumentError, naming the key, if one is missing or unfit, or if the model
    stores latents instead of K/V heads.
    """
    config = _ModelConfig.read(path)
    if config.find("kv_lora_rank") is not None:
        raise InvalidArgumentError("kv_lora_rank", f"{path}: latent K/V are not supported")
    num_kv_heads = config.find("num_key_value_heads")
    head_dim = config.find("head_dim")
    if num_kv_heads is None:
        num_kv_heads = config.count("num_attention_heads")
    if head_dim is None:
        hidden_size = config.count("hidden_size")
        num_query_heads = config.count("num_attention_heads")
        if hidden_size % num_query_heads:
            raise InvalidArgumentError(
                "head_dim",
                f"{path}: missing, and hidden_size {hidden_size} is no multiple of "
                f"num_attention_heads {num_query_heads}",
            )
        head_dim = hidden_size // num_query_heads
    return KVLayout(
        num_layers=config.count("num_hidden_layers"),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=config.dtype() if dtype is None else dtype,
    )


@dataclass(frozen=True, slots=True)
class _ModelConfig:
    """The text model's part of a config file, with its whole for keys that only that has."""

    path: Path
    sections: tuple[dict[str, Any], ...]

    @classmethod
    def read(cls, path: Path) -> _ModelConfig:
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidArgumentError("model_config", f"{path}: {error}") from error
        if not isinstance(whole, dict):
            raise InvalidArgumentError("model_config", f"{path}: not a JSON object")
        text = whole.get("text_config")
        return cls(path, (text, whole) if isinstance(text, dict) else (whole,))

    def find(self, key: str) -> Any:
        """The value of `key`, or None if it is absent or null."""
        for section in self.sections:
            if section.get(key) is not None:
                return section[key]
        return None

    def count(self, key: str) -> int:
        value = self.find(key)
        if value is None:
            raise InvalidArgumentError(key, f"{self.path}: missing")
        if type(value) is not int or value < 1:
            raise InvalidArgumentError(key, f"{self.path}: must be an integer >= 1, is {value!r}")
        return value

    def dtype(self) -> str:
        value = self.find("dtype") or self.find("torch_dtype")
        if value is None:
            raise InvalidArgumentError("dtype", f"{self.path}: missing, and none was given")
        return str(value).removeprefix("torch.")

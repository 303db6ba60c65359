"""The K/V layout that a model's Hugging Face configuration asks for.

From its `config.json`, or from the same keys in memory. Keeps no state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefixcache.errors import InvalidArgumentError
from prefixcache.storage.layout import KVLayout, LatentLayout, Layout

LAYOUT_KEYS = (
    "num_hidden_layers",
    "num_key_value_heads",
    "num_attention_heads",
    "head_dim",
    "hidden_size",
    "kv_lora_rank",
    "qk_rope_head_dim",
)
"""What is read of a configuration, besides the dtype."""


def layout_from_model_config(path: Path, block_size: int, dtype: str | None = None) -> Layout:
    """Read the layout off a Hugging Face `config.json`.

    Uses `num_hidden_layers`, `num_key_value_heads` (else `num_attention_heads`), `head_dim` (else
    `hidden_size / num_attention_heads`) and `dtype` or `torch_dtype`, in `text_config` if the
    model has other parts too. An explicit `dtype` wins over the file's. A model with a
    `kv_lora_rank` (DeepSeek-V2, DeepSeek-V3, Kimi) stores latents of that many elements, and
    `qk_rope_head_dim` more.

    Raises InvalidArgumentError, naming the key, if one is missing or unfit.
    """
    return _layout(_ModelConfig.read(path), block_size, dtype)


def layout_from_keys(
    keys: Mapping[str, Any], block_size: int, dtype: str, *, source: str
) -> Layout:
    """`layout_from_model_config` of `LAYOUT_KEYS` in memory. source: named in errors."""
    return _layout(_ModelConfig(source, (keys,)), block_size, dtype)


def _layout(config: _ModelConfig, block_size: int, dtype: str | None) -> Layout:
    num_layers = config.count("num_hidden_layers")
    dtype = config.dtype() if dtype is None else dtype
    if config.find("kv_lora_rank") is not None:
        latent_dim, rope_dim = config.count("kv_lora_rank"), config.count("qk_rope_head_dim")
        return LatentLayout(num_layers, latent_dim, rope_dim, block_size, dtype)
    num_kv_heads = config.find("num_key_value_heads")
    if num_kv_heads is None:
        num_kv_heads = config.count("num_attention_heads")
    head_dim = config.find("head_dim")
    if head_dim is None:
        head_dim = _head_dim_of(config)
    return KVLayout(num_layers, num_kv_heads, head_dim, block_size, dtype)


def _head_dim_of(config: _ModelConfig) -> int:
    """Where the file does not say it."""
    hidden_size = config.count("hidden_size")
    num_query_heads = config.count("num_attention_heads")
    if hidden_size % num_query_heads:
        raise InvalidArgumentError(
            "head_dim",
            f"{config.source}: missing, and hidden_size {hidden_size} is no multiple of "
            f"num_attention_heads {num_query_heads}",
        )
    return hidden_size // num_query_heads


@dataclass(frozen=True, slots=True)
class _ModelConfig:
    """The text model's part of a config file, with its whole for keys that only that has."""

    source: str
    """Where it comes from, for errors."""
    sections: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, path: Path) -> _ModelConfig:
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidArgumentError("model_config", f"{path}: {error}") from error
        if not isinstance(whole, dict):
            raise InvalidArgumentError("model_config", f"{path}: not a JSON object")
        text = whole.get("text_config")
        return cls(str(path), (text, whole) if isinstance(text, dict) else (whole,))

    def find(self, key: str) -> Any:
        """The value of `key`, or None if it is absent or null."""
        for section in self.sections:
            if section.get(key) is not None:
                return section[key]
        return None

    def count(self, key: str) -> int:
        value = self.find(key)
        if value is None:
            raise InvalidArgumentError(key, f"{self.source}: missing")
        if type(value) is not int or value < 1:
            raise InvalidArgumentError(key, f"{self.source}: must be an integer >= 1, is {value!r}")
        return value

    def dtype(self) -> str:
        value = self.find("dtype") or self.find("torch_dtype")
        if value is None:
            raise InvalidArgumentError("dtype", f"{self.source}: missing, and none was given")
        return str(value).removeprefix("torch.")

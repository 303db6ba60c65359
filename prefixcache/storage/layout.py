"""Shapes and sizes of K/V storage, as plain numbers.

Owns: the layouts of the pool and their fingerprint. Owns no memory (see `pool_memory`) and imports
no torch, so that clients and a daemon without storage can use it. Pure.

Block first, `[N, L, 2, Hkv, B, D]`: one block's K/V of all layers are one contiguous span, which
copy-on-write, other processes and slower tiers move as a whole, and within it each head's `[B, D]`
tile is contiguous. The scales of a quantised block are the end of its span, so that they move with
it. Rejected: a tensor per layer (a block is then in 2·L places), and tokens before heads (attention
reads one head at a time, up to 2x slower from tiles with gaps).

A layout is a `KVLayout` or a `LatentLayout`. Both have `kind`, `num_layers`, `block_size`, `dtype`
(of q, k, v and out), `quantization`, `num_kv_heads`, `head_dim` (of q and k), `value_dim` (of v and
out), the shapes and bytes of a block's regions, and `identity`, their part of the fingerprint.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import cbor2

from prefixcache.core.hashing import HASH_RECIPE_VERSION
from prefixcache.errors import InvalidArgumentError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
QUANTIZED_DTYPES = ("float8_e4m3", "int8")
SCALE_GRANULARITIES = ("token_head", "tensor")

_SCALE_BYTES = 4  # float32
_ALIGNMENT = 16  # of a quantised block and of its scales: the widest load of a GPU's thread


@dataclass(frozen=True, slots=True)
class Quantization:
    """K/V as 1-byte numbers times float32 scales.

    dtype: one of `QUANTIZED_DTYPES`. scales: "token_head", a scale for each token's K and V of each
    head, or "tensor", one for K and one for V of a layer, kept in each block. Raises
    InvalidArgumentError, naming the field, on another word.
    """

    dtype: str
    scales: str = "token_head"

    def __post_init__(self) -> None:
        _check_word("quantization.dtype", self.dtype, QUANTIZED_DTYPES)
        _check_word("quantization.scales", self.scales, SCALE_GRANULARITIES)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """K and V of each KV head: multi-head, grouped-query and multi-query attention.

    `dtype` is a key of `DTYPE_BYTES`. Raises InvalidArgumentError, naming the field, on a count
    below 1 or another dtype.
    """

    kind: str = field(default="kv", init=False, repr=False)
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        _check_counts(self, "num_layers", "num_kv_heads", "head_dim", "block_size")
        _check_word("dtype", self.dtype, DTYPE_BYTES)

    @property
    def value_dim(self) -> int:
        return self.head_dim

    @property
    def stored_dtype(self) -> str:
        """Type of the elements in the pool."""
        return self.dtype if self.quantization is None else self.quantization.dtype

    @property
    def block_shape(self) -> tuple[int, ...]:
        """`(L, 2, Hkv, B, D)`: the elements of one block."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def scales_shape(self) -> tuple[int, ...] | None:
        """`(L, 2, Hkv, B)` or `(L, 2)`: the float32 scales of one block; None if there are none."""
        if self.quantization is None:
            return None
        whole = (self.num_layers, 2, self.num_kv_heads, self.block_size)
        return whole if self.quantization.scales == "token_head" else whole[:2]

    @property
    def element_bytes(self) -> int:
        """Bytes of one element in the pool."""
        return DTYPE_BYTES[self.dtype] if self.quantization is None else 1

    @property
    def kv_bytes(self) -> int:
        """Bytes of one block's elements, and of the padding before scales."""
        num_bytes = math.prod(self.block_shape) * self.element_bytes
        return num_bytes if self.quantization is None else _padded(num_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: K, V and scales of all layers."""
        if self.scales_shape is None:
            return self.kv_bytes
        return self.kv_bytes + _padded(math.prod(self.scales_shape) * _SCALE_BYTES)

    @property
    def identity(self) -> Mapping[str, str | int]:
        """What tells its blocks from those of other layouts; see `fingerprint`."""
        entries: dict[str, str | int] = {
            "num_layers": self.num_layers,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "dtype": self.dtype,
        }
        if self.quantization is not None:
            entries["quantization"] = self.quantization.dtype
            entries["scales"] = self.quantization.scales
        return entries


@dataclass(frozen=True, slots=True)
class LatentLayout:
    """One latent of all heads: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    A token has `latent_dim + rope_dim` elements a layer: the compressed K/V, and the part of K that
    carries its position. Attention reads them as one KV head whose V are the first `latent_dim`.
    `dtype` is a key of `DTYPE_BYTES`. Raises InvalidArgumentError, naming the field, on a count
    below 1 or another dtype.
    """

    quantization: ClassVar[None] = None
    scales_shape: ClassVar[None] = None
    num_kv_heads: ClassVar[int] = 1

    kind: str = field(default="latent", init=False, repr=False)
    num_layers: int
    latent_dim: int
    rope_dim: int
    block_size: int
    dtype: str

    def __post_init__(self) -> None:
        _check_counts(self, "num_layers", "latent_dim", "rope_dim", "block_size")
        _check_word("dtype", self.dtype, DTYPE_BYTES)

    @property
    def head_dim(self) -> int:
        return self.latent_dim + self.rope_dim

    @property
    def value_dim(self) -> int:
        return self.latent_dim

    @property
    def stored_dtype(self) -> str:
        return self.dtype

    @property
    def block_shape(self) -> tuple[int, ...]:
        """`(L, B, R + P)`: the elements of one block."""
        return (self.num_layers, self.block_size, self.head_dim)

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_bytes(self) -> int:
        return math.prod(self.block_shape) * self.element_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: the latents of all layers."""
        return self.kv_bytes

    @property
    def identity(self) -> Mapping[str, str | int]:
        return {
            "num_layers": self.num_layers,
            "latent_dim": self.latent_dim,
            "rope_dim": self.rope_dim,
            "dtype": self.dtype,
        }


Layout: TypeAlias = KVLayout | LatentLayout


def fingerprint(
    layout: Layout | None,
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
    the layout `num_layers`, `num_kv_heads`, `head_dim`, `dtype`. A quantised one adds its dtype as
    `quantization` and the granularity as `scales`; a latent one has `latent_dim` and `rope_dim` in
    place of `num_kv_heads` and `head_dim`.
    """
    identity: dict[str, str | int] = {
        "model_name": model_name,
        "model_revision": model_revision,
        "block_size": block_size,
        "hash_algorithm": hash_algorithm,
        "hash_recipe_version": HASH_RECIPE_VERSION,
    }
    if layout is not None:
        identity |= layout.identity
    return hashlib.sha256(cbor2.dumps(identity, canonical=True)).digest()


def num_blocks_for_memory(layout: Layout, memory_bytes: int) -> int:
    """How many blocks fit into `memory_bytes`; InvalidArgumentError if not even one does."""
    num_blocks = memory_bytes // layout.block_bytes
    if num_blocks < 1:
        raise InvalidArgumentError(
            "memory", f"{memory_bytes} bytes, and one block takes {layout.block_bytes} bytes"
        )
    return num_blocks


def _check_counts(layout: Layout, *names: str) -> None:
    for name in names:
        value = getattr(layout, name)
        if type(value) is not int or value < 1:
            raise InvalidArgumentError(name, f"must be an integer >= 1, is {value!r}")


def _check_word(name: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        raise InvalidArgumentError(name, f"must be one of {', '.join(known)}, is {value!r}")


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT

"""What the pool holds: its size, the model's K/V, and how blocks are found."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import SecretStr, model_validator

from prefixcache.config.section import Section, Size, setting
from prefixcache.errors import InvalidArgumentError
from prefixcache.sizes import MAX_BLOCKS, format_size

DEFAULT_CPU_MEMORY_BYTES = 2**30
DEFAULT_GPU_MEMORY_FRACTION = 0.8
LATENT_KV_DTYPE = "must be auto for multi-head latent attention: latents are not quantised"

_MAX_BLOCK_SIZE = 1024


class PoolSection(Section):
    title: ClassVar[str] = "Block pool"

    storage: Literal["auto", "cpu", "cuda", "none"] = setting(
        "auto",
        "Where K/V live; auto is cuda if there is a GPU, else cpu. With none the daemon only "
        "manages blocks, and clients keep the K/V.",
    )
    num_blocks: int | None = setting(
        None, "Size of the pool, in blocks.", unit="blocks", ge=1, le=MAX_BLOCKS
    )
    memory: Size | None = setting(
        None,
        "Size of the pool, in bytes. If no size is given, it is "
        f"{format_size(DEFAULT_CPU_MEMORY_BYTES)} on a CPU.",
        unit="bytes",
        ge=1,
    )
    gpu_memory_fraction: float | None = setting(
        None,
        "Size of the pool, as a part of the GPU's free memory. If no size is given, it is "
        f"{DEFAULT_GPU_MEMORY_FRACTION} on a GPU.",
        gt=0,
        le=1,
    )
    block_size: int = setting(16, "Tokens of a block.", unit="tokens", ge=1, le=_MAX_BLOCK_SIZE)

    def memory_bytes(self, free_gpu_bytes: int | None) -> int:
        """Bytes for K/V if `num_blocks` is None. `free_gpu_bytes` is None on a CPU."""
        if self.memory is not None:
            return self.memory
        if free_gpu_bytes is not None:
            return int(free_gpu_bytes * (self.gpu_memory_fraction or DEFAULT_GPU_MEMORY_FRACTION))
        if self.gpu_memory_fraction is not None:
            raise InvalidArgumentError("--gpu-memory-fraction", "there is no GPU here")
        return DEFAULT_CPU_MEMORY_BYTES

    @model_validator(mode="after")
    def _check(self) -> Self:
        sizes = {
            "--num-blocks": self.num_blocks,
            "--memory": self.memory,
            "--gpu-memory-fraction": self.gpu_memory_fraction,
        }
        given = [flag for flag, size in sizes.items() if size is not None]
        if len(given) > 1:
            raise InvalidArgumentError(given[1], f"cannot go with {given[0]}; give one of them")
        if self.storage == "none" and given != ["--num-blocks"]:
            raise InvalidArgumentError(
                "--num-blocks",
                "needed with --storage none, as the daemon does not know the size of a block",
            )
        if self.storage == "cpu" and self.gpu_memory_fraction is not None:
            raise InvalidArgumentError("--gpu-memory-fraction", "cannot go with --storage cpu")
        return self


class ModelSection(Section):
    title: ClassVar[str] = "Model"

    model_config_path: Path | None = setting(
        None,
        "Hugging Face config.json to take the K/V layout from.",
        alias="model_config",
    )
    model_name: str = setting("", "Name of the model; part of the layout fingerprint.")
    model_revision: str = setting(
        "", "Revision of the weights; part of the layout fingerprint. New weights, new revision."
    )
    num_layers: int | None = setting(None, "Layers of the model.", unit="layers", ge=1, le=65535)
    num_kv_heads: int | None = setting(None, "KV heads a layer.", unit="heads", ge=1, le=65535)
    head_dim: int | None = setting(None, "Elements of a head.", unit="elements", ge=1, le=65535)
    latent_dim: int | None = setting(
        None,
        "Elements of the compressed K/V of multi-head latent attention (kv_lora_rank); with "
        "--rope-dim in place of --num-kv-heads and --head-dim.",
        unit="elements",
        ge=1,
        le=65535,
    )
    rope_dim: int | None = setting(
        None,
        "Elements of K that carry the position in multi-head latent attention (qk_rope_head_dim).",
        unit="elements",
        ge=1,
        le=65535,
    )
    dtype: Literal["float32", "float16", "bfloat16"] | None = setting(
        None, "Type of q, k, v and the output; taken from --model-config if left out."
    )
    kv_dtype: Literal["auto", "float8_e4m3", "int8"] = setting(
        "auto",
        "Type of the stored K/V elements; auto is the one of --dtype, the others are quantised.",
    )
    kv_scales: Literal["token_head", "tensor"] = setting(
        "token_head",
        "What a scale of quantised K/V is for: each token's head, taken from its largest element, "
        "or all K (all V) of a layer, given by --kv-scale-file.",
    )
    kv_scale_file: Path | None = setting(
        None,
        'JSON file {"k": [...], "v": [...]} with one scale a layer, for --kv-scales tensor. Left '
        "out, they are 1.0 with float8_e4m3; int8 needs it.",
    )

    @property
    def is_latent(self) -> bool:
        """Whether the flags ask for a latent layout; a model config may too."""
        return self.latent_dim is not None or self.rope_dim is not None

    @property
    def missing_flags(self) -> list[str]:
        """Flags that a K/V layout still needs."""
        if self.model_config_path is not None:
            return []
        needed = {"--num-layers": self.num_layers, **self._shape_flags, "--dtype": self.dtype}
        return [flag for flag, value in needed.items() if value is None]

    @property
    def _shape_flags(self) -> dict[str, int | None]:
        if self.is_latent:
            return self._latent_flags
        return self._head_flags

    @property
    def _head_flags(self) -> dict[str, int | None]:
        return {"--num-kv-heads": self.num_kv_heads, "--head-dim": self.head_dim}

    @property
    def _latent_flags(self) -> dict[str, int | None]:
        return {"--latent-dim": self.latent_dim, "--rope-dim": self.rope_dim}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.model_config_path is not None:
            said = {"--num-layers": self.num_layers, **self._head_flags, **self._latent_flags}
            for flag, value in said.items():
                if value is not None:
                    raise InvalidArgumentError(flag, "cannot go with --model-config, which says it")
        if self.is_latent:
            for flag, value in self._head_flags.items():
                if value is not None:
                    raise InvalidArgumentError(
                        flag, "cannot go with --latent-dim and --rope-dim: latents have no heads"
                    )
            if self.kv_dtype != "auto":
                raise InvalidArgumentError("--kv-dtype", LATENT_KV_DTYPE)
        self._check_scales()
        return self

    def _check_scales(self) -> None:
        if self.kv_scales == "tensor" and self.kv_dtype == "auto":
            raise InvalidArgumentError("--kv-scales", "is for quantised K/V: give a --kv-dtype")
        if self.kv_scale_file is not None and self.kv_scales != "tensor":
            raise InvalidArgumentError("--kv-scale-file", "goes with --kv-scales tensor only")
        if self.kv_scale_file is None and (self.kv_dtype, self.kv_scales) == ("int8", "tensor"):
            raise InvalidArgumentError(
                "--kv-scale-file",
                "needed with --kv-dtype int8 and --kv-scales tensor: int8 holds whole numbers, so "
                "no scale fits every model",
            )


class CacheSection(Section):
    title: ClassVar[str] = "Prefix cache"

    prefix_caching: bool = setting(
        True, "Share blocks of equal prefixes. Turned off, nothing is ever hit, to compare with."
    )
    hash_algorithm: Literal["sha256_cbor", "xxhash_cbor", "xxh3"] = setting(
        "sha256_cbor",
        "Digest of a block. sha256_cbor and xxhash_cbor give the bytes of vLLM's; the xxh ones "
        "are faster, and can be made to collide.",
    )
    hash_seed: SecretStr | None = setting(
        None,
        "Text that the chain of hashes starts from: daemons with the same seed have the same "
        "hashes. Random at each start if left out. Of 16 characters or more, and better in the "
        "environment than on a command line, which other users can see.",
    )
    verify_hits: bool | None = setting(
        None,
        "Compare token ids on each hit, so that a collision is a miss. Left out, it is on for "
        "xxhash_cbor and xxh3.",
    )
    owner_ttl: float = setting(
        600.0,
        "Free sequences of clients without a session that made no call for so long.",
        unit="seconds",
        gt=0,
    )
    max_fork_children: int = setting(
        256, "Most children of one Fork.", unit="sequences", ge=1, le=65535
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hash_seed is not None and not self.hash_seed.get_secret_value():
            raise InvalidArgumentError("--hash-seed", "is empty; leave it out for a random start")
        return self

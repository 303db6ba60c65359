"""Whether a transformers model and a daemon fit, told before anything runs.

Owns what a model must be like, the K/V layout that it needs, and the flags of `prefixcache serve`
that give it. What shows only while a model runs is checked by `attention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from prefixcache.client import ServerInfo
from prefixcache.errors import FingerprintMismatchError, InvalidArgumentError, NoStorageError
from prefixcache.integrations.transformers.identity import weights_revision
from prefixcache.storage.layout import KVLayout
from prefixcache.storage.model_config import LAYOUT_KEYS, layout_from_keys

if TYPE_CHECKING:
    from prefixcache.attached.pool_view import PoolView

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_GROWING_ROPE = frozenset({"dynamic", "longrope"})


def check_model(model: PreTrainedModel) -> None:
    """Raises InvalidArgumentError, naming the kind, for a model that cannot be computed exactly."""
    for problem in _problems(model):
        raise InvalidArgumentError("model", f"{type(model).__name__}: {problem}")


def check_daemon(model: PreTrainedModel, info: ServerInfo, revision: str | None) -> None:
    """Whether the daemon holds K/V of this model's shape, and of its weights.

    revision: what the daemon's is to be; None for the `weights_revision` of the model. Raises
    NoStorageError, or InvalidArgumentError with the flags that would fit.
    """
    if info.layout is None:
        raise NoStorageError
    layout = kv_layout(model, info.block_size)
    actual = info.layout
    if not isinstance(actual, KVLayout) or _shape(actual) != _shape(layout):
        raise InvalidArgumentError(
            "model",
            f"needs the layout {layout}, the daemon has {actual}; "
            f"`prefixcache serve {' '.join(serve_flags(model))}` fits",
        )
    wanted = weights_revision(model) if revision is None else revision
    if info.model_revision != wanted:
        raise InvalidArgumentError(
            "model",
            f"has weights of the revision {wanted!r}, the daemon's blocks are of "
            f"{info.model_revision!r}; `prefixcache serve {' '.join(serve_flags(model))}` fits, or "
            f"say revision={info.model_revision!r} if that is what its operator calls them",
        )


def check_view(model: PreTrainedModel, info: ServerInfo, view: PoolView) -> None:
    """Whether the view is of that daemon, to be written to, and where the model is.

    Raises FingerprintMismatchError or InvalidArgumentError.
    """
    if view.fingerprint != info.fingerprint:
        raise FingerprintMismatchError(info.fingerprint, view.fingerprint)
    if not view.is_writable:
        raise InvalidArgumentError("view", "is for reading only, and a pass writes K/V")
    if view.device != model.device:
        raise InvalidArgumentError("view", f"is on {view.device}, the model is on {model.device}")


def kv_layout(model: PreTrainedModel, block_size: int = 16) -> KVLayout:
    """K/V of the model, in its dtype. Raises InvalidArgumentError if its config does not tell."""
    config = model.config.get_text_config()
    keys = {key: getattr(config, key, None) for key in LAYOUT_KEYS}
    dtype = str(model.dtype).removeprefix("torch.")
    layout = layout_from_keys(keys, block_size, dtype, source=type(config).__name__)
    assert isinstance(layout, KVLayout), "check_model refuses latents"
    return layout


def serve_flags(model: PreTrainedModel) -> tuple[str, ...]:
    """Flags of `prefixcache serve` for a daemon that fits the model, but for its size.

    They name the weights (`weights_revision`), so that a model with others is refused.
    """
    layout = kv_layout(model)
    name = str(model.config.name_or_path).rstrip("/").rpartition("/")[2]
    flags = {
        "--num-layers": layout.num_layers,
        "--num-kv-heads": layout.num_kv_heads,
        "--head-dim": layout.head_dim,
        "--dtype": layout.dtype,
        "--model-name": name or model.config.model_type,
        "--model-revision": weights_revision(model),
    }
    return tuple(str(word) for flag in flags.items() for word in flag)


def _shape(layout: KVLayout) -> tuple[int, int, int, str]:
    return layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.dtype


def _problems(model: PreTrainedModel) -> Iterator[str]:
    if not isinstance(model, PreTrainedModel):
        yield "no model of transformers; of PEFT's it is `get_base_model()`"
        return
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        yield "encoder and decoder, and only decoders have a cache of prefixes"
    if not model.can_generate() or "logits_to_keep" not in _parameters(model):
        yield "no causal language model, or one that computes the logits of all tokens"
    for kind in sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES):
        yield f"layers of kind {kind!r}"
    if getattr(config, "kv_lora_rank", None) is not None:
        yield "multi-head latent attention, whose latents transformers does not give to attention"
    for kind in sorted(_rope_types(config) & _GROWING_ROPE):
        yield f"RoPE of type {kind!r}, with which K depend on the length of the whole sequence"
    if getattr(config, "alibi", False):
        yield "ALiBi"
    if getattr(config, "use_bidirectional_attention", False) or not getattr(
        config, "is_causal", True
    ):
        yield "attention that is not causal"


def _parameters(model: PreTrainedModel) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _rope_types(config: Any) -> set[str]:
    """Of all layers, or of each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(kind["rope_type"]) for kind in kinds if "rope_type" in kind}

"""The K/V layout that the settings of a model describe."""

from __future__ import annotations

from dataclasses import replace

from prefixcache.config.cache import LATENT_KV_DTYPE, ModelSection
from prefixcache.errors import InvalidArgumentError
from prefixcache.storage.layout import KVLayout, LatentLayout, Layout, Quantization
from prefixcache.storage.model_config import layout_from_model_config


def layout_of(model: ModelSection, block_size: int) -> Layout:
    """model: without `missing_flags`. Raises InvalidArgumentError, naming a flag or a setting."""
    layout = _plain_layout(model, block_size)
    if model.kv_dtype == "auto":
        return layout
    if isinstance(layout, LatentLayout):
        raise InvalidArgumentError("--kv-dtype", LATENT_KV_DTYPE)
    return replace(layout, quantization=Quantization(model.kv_dtype, model.kv_scales))


def _plain_layout(model: ModelSection, block_size: int) -> Layout:
    """The layout in the model's own dtype."""
    if model.model_config_path is not None:
        try:
            return layout_from_model_config(model.model_config_path, block_size, model.dtype)
        except InvalidArgumentError as error:
            if error.field in ("dtype", "model_config"):  # flags of their own
                raise
            raise InvalidArgumentError("--model-config", error.message) from error
    assert model.num_layers is not None
    assert model.dtype is not None
    if model.is_latent:
        assert model.latent_dim is not None
        assert model.rope_dim is not None
        return LatentLayout(
            model.num_layers, model.latent_dim, model.rope_dim, block_size, model.dtype
        )
    assert model.num_kv_heads is not None
    assert model.head_dim is not None
    return KVLayout(model.num_layers, model.num_kv_heads, model.head_dim, block_size, model.dtype)

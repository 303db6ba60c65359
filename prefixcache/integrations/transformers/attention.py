"""Attention of a transformers model over the daemon's blocks.

Owns the two functions that transformers calls in place of its own, `attend` in each layer and
`causal_mask` once a pass and kind, and the check that what a model asks for is what the kernels
compute. What is not is refused, with its name: masks other than causal ones and causal windows,
dropout, biases, arguments that nobody here knows.

A pass is flat: the new tokens of all sequences follow each other in one row, [1, T]. Which of them
see which follows from the sequences, so a mask is never a matrix: it says its kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from prefixcache.client import Sequence
from prefixcache.errors import InvalidArgumentError
from prefixcache.types import AttentionOptions

ATTENTION_NAME = "prefixcache"
"""Of `model.set_attn_implementation`."""

_OF_NO_CONCERN = frozenset({"position_ids", "cache_position"})
"""Arguments that a model hands to its layers, which have applied positions to q and k already."""
_FAR = 1 << 20
"""A position beyond every window that a mask may have by chance."""


class AttentionBackend(Protocol):
    """Who writes K/V and attends: a `Client`, or what maps the pool into this process."""

    def prefill(
        self,
        layer: int,
        sequences: list[Sequence],
        num_tokens: list[int],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor: ...

    def decode(
        self,
        layer: int,
        sequences: list[Sequence],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor: ...


@dataclass(slots=True)
class ForwardPass:
    """One run of the model over a flat batch, as its layers need to know it."""

    backend: AttentionBackend
    sequences: list[Sequence]
    num_tokens: list[int]
    """New tokens of each sequence, in the order of the batch; their sum is T."""
    num_layers_done: int = 0


@dataclass(frozen=True, slots=True)
class CausalMask:
    """A query at position p sees the keys at j <= p, with a window those at j > p - window."""

    window: int | None


def register() -> None:
    """Make both functions known to transformers as `ATTENTION_NAME`. May be called again."""
    AttentionInterface.register(ATTENTION_NAME, attend)
    AttentionMaskInterface.register(ATTENTION_NAME, causal_mask)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    *,
    forward_pass: ForwardPass | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """One layer's attention, in the form that transformers' AttentionInterface asks for.

    query: [1, Hq, T, D], key and value: [1, Hkv, T, D], positions applied -> [1, T, Hq, D].
    attention_mask: what `causal_mask` gave. forward_pass: the keyword argument of the model's
    forward, which hands it on to its layers. s_aux: attention sinks, [Hq].

    Raises InvalidArgumentError for an attention that would not be computed as the model means it,
    before the layer has written anything.
    """
    if forward_pass is None:
        raise InvalidArgumentError(
            "model", "ran outside of CachedModel, or does not hand keyword arguments to its layers"
        )
    if dropout:
        raise InvalidArgumentError("model", f"has a dropout of {dropout} in its attention")
    for name, argument in others.items():
        if name not in _OF_NO_CONCERN and argument is not None and argument is not False:
            raise InvalidArgumentError("model", f"gives its attention {name}, which has no kernel")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise InvalidArgumentError("model", "has attention that is not causal")
    _check_mask(attention_mask, sliding_window)
    layer = forward_pass.num_layers_done
    _check_layer(module, layer)
    options = AttentionOptions(
        scale=scaling,
        window=sliding_window,
        soft_cap=softcap,
        sinks=() if s_aux is None else tuple(s_aux.tolist()),
    )
    out = _computed(forward_pass, layer, query, key, value, options)
    forward_pass.num_layers_done += 1
    return out.unsqueeze(0), None


def _check_mask(mask: object, window: int | None) -> None:
    """The mask is what transformers' own attention goes by, the window is what kernels are told."""
    if not isinstance(mask, CausalMask):
        raise InvalidArgumentError("model", "gives its attention a mask of its own making")
    if mask.window != window:
        raise InvalidArgumentError(
            "model",
            f"has a mask with a window of {mask.window} tokens, and asks its attention for one "
            f"of {window}",
        )


def _check_layer(module: torch.nn.Module, layer: int) -> None:
    actual = getattr(module, "layer_idx", None)
    if actual != layer:
        raise InvalidArgumentError(
            "model", f"runs the attention of layer {actual} where that of layer {layer} is due"
        )


def _computed(
    forward_pass: ForwardPass,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """[T, Hq, D]: by one Decode if each sequence has one new token, else by one Prefill."""
    backend, sequences = forward_pass.backend, forward_pass.sequences
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    if len(sequences) == len(q):
        return backend.decode(layer, sequences, q, k, v, options)
    return backend.prefill(layer, sequences, forward_pass.num_tokens, q, k, v, options)


def causal_mask(
    *,
    mask_function: Callable[..., torch.Tensor],
    device: torch.device,
    local_size: int | None = None,
    allow_is_causal_skip: bool = False,
    use_vmap: bool = False,
    **_: Any,
) -> CausalMask:
    """The mask of a pass, in the form that transformers' AttentionMaskInterface asks for.

    mask_function: whether a query index sees a key index. local_size: the size of a window, or of
    chunks. Raises InvalidArgumentError unless the function is causal, with or without a window,
    which costs a few comparisons and nothing that grows with the tokens.
    """
    # A mask that depends on the tokens (images, packed sequences) says so by either of these.
    if allow_is_causal_skip and not use_vmap:
        for window in {None, local_size}:
            if _is_mask(mask_function, window, device):
                return CausalMask(window)
    name = getattr(mask_function, "__qualname__", repr(mask_function))
    raise InvalidArgumentError(
        "model",
        f"has an attention mask that is neither causal nor a causal sliding window ({name}, "
        f"local size {local_size})",
    )


def _is_mask(
    mask_function: Callable[..., torch.Tensor], window: int | None, device: torch.device
) -> bool:
    """Whether the function agrees with the mask where it begins and ends, near and far."""
    size = 1 if window is None else window
    near = {0, 1, size - 1, size, size + 1, 2 * size, 2 * size + 1}
    far = {_FAR, _FAR + 1, _FAR - size, _FAR - size + 1}
    indices = torch.tensor(sorted(near | far), device=device)
    zero = indices[:1].view(1, 1, 1, 1)
    queries, keys = indices.view(1, 1, -1, 1), indices.view(1, 1, 1, -1)
    wanted = keys <= queries
    if window is not None:
        wanted = wanted & (keys > queries - window)
    return torch.equal(mask_function(zero, zero, queries, keys).expand(wanted.shape), wanted)

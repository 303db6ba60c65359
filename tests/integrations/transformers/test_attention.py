"""What a model asks of its attention while it runs is checked: nothing is left out in silence."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Gemma2Config
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from prefixcache.errors import InvalidArgumentError
from prefixcache.integrations.transformers.attention import (
    ATTENTION_NAME,
    CausalMask,
    ForwardPass,
    attend,
    causal_mask,
    register,
)
from prefixcache.types import AttentionOptions
from tests.integrations.transformers.models import CONFIGS, WINDOW

CPU = torch.device("cpu")
PLAIN = CausalMask(None)


class Recorder:
    """A backend that computes nothing and keeps what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, AttentionOptions]] = []

    def prefill(self, layer: int, *operands: Any) -> torch.Tensor:
        return self._keep("prefill", layer, operands[2], operands[-1])

    def decode(self, layer: int, *operands: Any) -> torch.Tensor:
        return self._keep("decode", layer, operands[1], operands[-1])

    def _keep(self, name: str, layer: int, q: torch.Tensor, options: Any) -> torch.Tensor:
        self.calls.append((name, layer, options))
        return q


def run(mask: object = PLAIN, counts: tuple[int, ...] = (3, 2), **arguments: Any) -> Recorder:
    backend = Recorder()
    total = sum(counts)
    layer = arguments.pop("layer_idx", 0)
    module = SimpleNamespace(layer_idx=layer, **arguments.pop("module", {}))
    forward_pass = ForwardPass(backend, [object()] * len(counts), list(counts))
    q, kv = torch.zeros(1, 4, total, 8), torch.zeros(1, 2, total, 8)
    out, weights = attend(module, q, kv, kv, mask, forward_pass=forward_pass, **arguments)
    assert out.shape == (1, total, 4, 8)
    assert weights is None
    return backend


def test_options_come_from_the_arguments() -> None:
    arguments = {"scaling": 0.5, "softcap": 20.0, "sliding_window": 7}
    sinks = torch.tensor([0.5, 1.5, -1.0, 0.0], dtype=torch.bfloat16)
    backend = run(CausalMask(7), s_aux=sinks, **arguments)
    options = AttentionOptions(0.5, window=7, soft_cap=20.0, sinks=(0.5, 1.5, -1.0, 0.0))
    assert backend.calls == [("prefill", 0, options)]


def test_single_tokens_are_one_decode() -> None:
    assert run(counts=(1, 1, 1)).calls[0][0] == "decode"
    assert run(counts=(1, 2, 1)).calls[0][0] == "prefill"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"mask": torch.zeros(1, 1, 5, 5)}, "mask of its own"),
        ({"mask": None}, "mask of its own"),
        ({"mask": CausalMask(7)}, "window of 7 tokens"),
        ({"sliding_window": 7}, "for one of 7"),
        ({"is_causal": False}, "not causal"),
        ({"module": {"is_causal": False}}, "not causal"),
        ({"dropout": 0.1}, "dropout"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"head_mask": torch.zeros(1)}, "head_mask"),
        ({"output_attentions": True}, "output_attentions"),
        ({"layer_idx": 1}, "layer 1"),
        ({"layer_idx": None}, "layer None"),
    ],
)
def test_what_has_no_kernel_is_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidArgumentError, match=problem):
        run(**arguments)


def test_arguments_that_say_nothing_to_attention() -> None:
    run(position_ids=torch.arange(5), use_cache=False, head_mask=None)


# ---- masks


def kind(mask_function: Any, local_size: int | None = None, **arguments: Any) -> CausalMask:
    arguments = {"allow_is_causal_skip": True, "q_length": 5, "kv_length": 5, **arguments}
    return causal_mask(mask_function=mask_function, device=CPU, local_size=local_size, **arguments)


@pytest.mark.parametrize("window", [1, 2, 6, 4096])
def test_causal_masks_are_known(window: int) -> None:
    assert kind(causal_mask_function) == CausalMask(None)
    assert kind(causal_mask_function, window) == CausalMask(None)
    assert kind(sliding_window_causal_mask_function(window), window) == CausalMask(window)


@pytest.mark.parametrize("size", [2, 6, 4096])
def test_other_masks_are_refused(size: int) -> None:
    chunked = chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int64))
    for mask_function in (
        chunked,
        bidirectional_mask_function,
        sliding_window_bidirectional_mask_function(size),
        sliding_window_causal_mask_function(size + 1),
        sliding_window_causal_mask_function(size - 1),
        or_masks(causal_mask_function, lambda batch, head, query, key: key < size),
    ):
        with pytest.raises(InvalidArgumentError, match="neither causal"):
            kind(mask_function, size)


@pytest.mark.parametrize("flags", [{"use_vmap": True}, {"allow_is_causal_skip": False}])
def test_a_mask_that_depends_on_tokens_is_refused(flags: dict[str, bool]) -> None:
    with pytest.raises(InvalidArgumentError, match="neither causal"):
        kind(causal_mask_function, **flags)


def test_masks_of_long_passes_are_no_matrices() -> None:
    """A matrix of these would have 2^60 elements."""
    register()
    config = copy.deepcopy(CONFIGS["gemma2"])
    assert isinstance(config, Gemma2Config)
    config._attn_implementation_internal = ATTENTION_NAME
    length = 1 << 30
    arguments = {
        "config": config,
        "inputs_embeds": torch.empty(1, 1, 1).expand(1, length, 1),
        "attention_mask": torch.ones(1, 1, dtype=torch.bool).expand(1, length),
        "cache": None,
        "position_ids": torch.zeros(1, 1, dtype=torch.int64).expand(1, length),
    }
    assert create_causal_mask(**arguments) == CausalMask(None)
    assert create_sliding_window_causal_mask(**arguments) == CausalMask(WINDOW)


def test_chunks_are_refused_where_transformers_makes_them() -> None:
    register()
    config = copy.deepcopy(CONFIGS["llama"])
    config._attn_implementation_internal = ATTENTION_NAME
    config.attention_chunk_size = 4
    with pytest.raises(InvalidArgumentError, match="local size 4"):
        create_chunked_causal_mask(
            config=config,
            inputs_embeds=torch.zeros(1, 3, 1),
            attention_mask=torch.ones(1, 3, dtype=torch.bool),
            cache=None,
            position_ids=torch.arange(3)[None],
        )

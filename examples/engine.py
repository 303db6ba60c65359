"""An inference engine without K/V memory of its own: the daemon answers its attention.

Owns the way from a transformers model to the daemon. Three things make the plug:

1. `attend` is registered as an attention function of transformers. In each layer it sends the new
   tokens' q, k and v to the daemon and returns what comes back; the model keeps no cache.
2. Tokens that the daemon reports as cached are never run through the model.
3. A batch is flat: the new tokens of all sequences follow each other in one row, `[1, T]`, each
   with its own position id. No padding, no mask: the daemon knows which tokens attend to which.

Not thread-safe: one engine, one thread.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import AttentionInterface, PreTrainedModel

from prefixcache.client import Client, Sequence
from prefixcache.types import AttentionOptions, CacheUse, ResultCode

ATTENTION_NAME = "prefixcache"


class NotAppendedError(Exception):
    """The daemon refused the next tokens of a sequence, most likely for want of free blocks."""


class Phase(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True)
class Request:
    """The tokens of one sequence, and how many of them have their K/V in the daemon."""

    sequence: Sequence
    tokens: list[int]
    num_computed: int

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.num_computed :]


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass of the model, as its attention layers need to know it."""

    client: Client
    phase: Phase
    sequences: list[Sequence]
    num_tokens: list[int]
    """New tokens of each sequence, in the order of the flat batch; their sum is T."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    step: Step,
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention, in the form that transformers' AttentionInterface asks for.

    query: [1, Hq, T, D], key and value: [1, Hkv, T, D], rotated already -> [1, T, Hq, D].
    `step` is the keyword argument that `Engine` gave to the model, which hands it on.
    """
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    layer, options = cast(int, module.layer_idx), AttentionOptions(scale=scaling)
    if step.phase is Phase.PREFILL:
        out = step.client.prefill(layer, step.sequences, step.num_tokens, q, k, v, options)
    else:
        out = step.client.decode(layer, step.sequences, q, k, v, options)
    return out.unsqueeze(0), None


class Engine:
    """Runs a decoder-only transformers model on the daemon's K/V blocks."""

    def __init__(self, model: PreTrainedModel, client: Client) -> None:
        # transformers makes no mask for an attention function that it has no mask recipe for.
        AttentionInterface.register(ATTENTION_NAME, attend)
        model.set_attn_implementation(ATTENTION_NAME)
        self._model = model
        self._client = client

    def open(self, tokens: list[int], cache_use: CacheUse = CacheUse.READ_WRITE) -> Request:
        """Allocate a sequence for the prompt; what is cached counts as computed."""
        sequence = self._client.sequence(tokens, cache_use=cache_use)
        return Request(sequence, list(tokens), sequence.num_cached_tokens)

    def append(self, requests: list[Request], tokens: list[list[int]]) -> None:
        """Give each request its next tokens, in one call for all."""
        results = self._client.append([request.sequence for request in requests], tokens)
        for request, new_tokens, result in zip(requests, tokens, results, strict=True):
            if result.code is not ResultCode.OK:
                raise NotAppendedError(f"{request.sequence.sequence_id:#018x}: {result.code.name}")
            request.tokens.extend(new_tokens)

    def prefill(self, requests: list[Request]) -> torch.Tensor:
        """Run all new tokens of each request. Returns the last token's logits, [S, vocabulary]."""
        return self._forward(requests, Phase.PREFILL)

    def decode(self, requests: list[Request]) -> torch.Tensor:
        """Run the one new token of each request. Returns its logits, [S, vocabulary]."""
        return self._forward(requests, Phase.DECODE)

    def close(self, requests: list[Request]) -> None:
        """Give the sequences back; their full blocks stay findable until they are evicted."""
        self._client.free([request.sequence for request in requests])

    @torch.inference_mode()
    def _forward(self, requests: list[Request], phase: Phase) -> torch.Tensor:
        num_tokens = [len(request.new_tokens) for request in requests]
        tokens = [token for request in requests for token in request.new_tokens]
        positions = [
            position
            for request in requests
            for position in range(request.num_computed, len(request.tokens))
        ]
        step = Step(self._client, phase, [r.sequence for r in requests], num_tokens)
        hidden = self._model.base_model(
            input_ids=torch.tensor([tokens]),
            position_ids=torch.tensor([positions]),
            use_cache=False,
            step=step,
        ).last_hidden_state[0]
        for request in requests:
            request.num_computed = len(request.tokens)
        # Only a sequence's last token says what comes next: spare the rest the vocabulary.
        last = [end - 1 for end in itertools.accumulate(num_tokens)]
        logits: torch.Tensor = self._model.lm_head(hidden[last])
        return logits

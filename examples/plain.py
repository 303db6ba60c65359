"""The yardstick: the same model as transformers runs it, with no cache of any kind."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Comparison:
    """An answer against the plain model."""

    tokens_equal: bool
    largest_difference: float
    """Of any logit of any step."""
    smallest_margin: float
    """Between the best and the second best logit of any step. Far above `largest_difference`
    means that the answer did not hang on rounding."""


def compare(
    model: PreTrainedModel, prompt: list[int], answer: list[int], logits: torch.Tensor
) -> Comparison:
    """Compare a greedy answer and its logits `[len(answer), vocabulary]` with the plain model."""
    plain = plain_logits(model, prompt, answer)
    best = plain.topk(2, dim=-1).values
    return Comparison(
        tokens_equal=plain.argmax(dim=-1).tolist() == answer,
        largest_difference=(plain - logits).abs().max().item(),
        smallest_margin=(best[:, 0] - best[:, 1]).min().item(),
    )


@torch.inference_mode()
def plain_logits(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """The plain model's logits for every token of the answer, `[len(answer), vocabulary]`.

    One ordinary forward pass over prompt and answer. Greedy decoding gives exactly this answer if
    and only if each of its tokens is the most likely one after the prompt and the tokens before
    it, and those are the logits that a causal model gives for all positions at once. So the
    comparison is as strict as generating step by step, and nothing is kept from step to step.
    """
    tokens = torch.tensor([prompt + answer[:-1]])
    model.set_attn_implementation("sdpa")
    logits: torch.Tensor = model(
        input_ids=tokens,
        # Said outright: the end-of-message token is also the padding token.
        attention_mask=torch.ones_like(tokens),
        use_cache=False,
        logits_to_keep=len(answer),
    ).logits[0]
    return logits

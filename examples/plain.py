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


class PlainModel:
    """The model with its attention given back to transformers. An answer is computed once."""

    def __init__(self, model: PreTrainedModel) -> None:
        model.set_attn_implementation("sdpa")
        self._model = model
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def compare(self, prompt: list[int], answer: list[int], logits: torch.Tensor) -> Comparison:
        """logits: those the greedy answer was chosen by, `[len(answer), vocabulary]`."""
        plain = self.logits(prompt, answer)
        best = plain.topk(2, dim=-1).values
        return Comparison(
            tokens_equal=plain.argmax(dim=-1).tolist() == answer,
            largest_difference=(plain - logits).abs().max().item(),
            smallest_margin=(best[:, 0] - best[:, 1]).min().item(),
        )

    def logits(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """Of every token of the answer, `[len(answer), vocabulary]`.

        One ordinary forward pass over prompt and answer. Greedy decoding gives exactly this answer
        if and only if each of its tokens is the most likely one after the prompt and the tokens
        before it, and those are the logits that a causal model gives for all positions at once. So
        the comparison is as strict as generating step by step, and nothing is kept from step to
        step.
        """
        tokens = tuple(prompt + answer[:-1])
        if tokens not in self._known:
            self._known[tokens] = self._run(tokens, len(answer))
        return self._known[tokens]

    @torch.inference_mode()
    def _run(self, tokens: tuple[int, ...], num_last: int) -> torch.Tensor:
        input_ids = torch.tensor([tokens])
        logits: torch.Tensor = self._model(
            input_ids=input_ids,
            # Said outright: the end-of-message token is also the padding token.
            attention_mask=torch.ones_like(input_ids),
            use_cache=False,
            logits_to_keep=num_last,
        ).logits[0]
        return logits

"""Choosing the next token from its logits."""

from __future__ import annotations

import torch

from examples.engine.request import Question


class Sampler:
    """One for each choice: equal seeds and choices draw equal tokens, whatever runs beside them."""

    def __init__(self, question: Question, index: int) -> None:
        self._question = question
        self._generator = torch.Generator()
        if question.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed((question.seed + index) % 2**63)

    def choose(self, logits: torch.Tensor) -> int:
        """logits: [vocabulary], any float dtype."""
        question = self._question
        if question.temperature == 0 or question.top_p == 0:
            return int(logits.argmax())
        weights = torch.softmax(logits.float().cpu() / question.temperature, dim=-1)
        if question.top_p < 1:
            weights = _nucleus(weights, question.top_p)
        return int(torch.multinomial(weights, 1, generator=self._generator))


def _nucleus(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """The fewest tokens that have `top_p` of the probability (arXiv 1904.09751), others 0."""
    ordered, places = weights.sort(descending=True)
    is_left = ordered.cumsum(-1) - ordered < top_p
    return torch.zeros_like(weights).scatter(-1, places, ordered * is_left)

"""How the next token is chosen from logits: the most likely one, or one drawn at random. And which
tokens end an output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from prefixcache.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature: what logits are divided by; 0 takes the most likely token, and nothing is drawn.
    top_k: draw from the so many most likely tokens only, and those as likely as the last of them.
    top_p: draw from the most likely tokens only that together have this probability, at least one.
    seed: output i of a call draws with a `torch.Generator` of its own, seeded with seed + i. So
        what it draws depends neither on the other outputs nor on when it is computed.

    Applied in this order, as transformers does. Raises InvalidArgumentError, naming the field.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InvalidArgumentError("temperature", f"is {self.temperature}, must be >= 0")
        if self.top_k is not None and self.top_k < 1:
            raise InvalidArgumentError("top_k", f"is {self.top_k}, must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InvalidArgumentError("top_p", f"is {self.top_p}, must be above 0, at most 1")

    def generator(self, output: int, device: torch.device) -> torch.Generator:
        return torch.Generator(device).manual_seed(self.seed + output)

    def next_token(self, logits: torch.Tensor, generator: torch.Generator) -> int:
        """Choose by logits, [vocabulary]."""
        if self.temperature == 0:
            return int(logits.argmax())
        drawn = torch.multinomial(self.probabilities(logits), 1, generator=generator)
        return int(drawn)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Of each token to be drawn, at a temperature above 0: [vocabulary] float32."""
        scores = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < len(scores):
            scores = scores.masked_fill(scores < scores.topk(self.top_k).values[-1], -torch.inf)
        if self.top_p is not None:
            likely, order = scores.softmax(-1).sort(descending=True, stable=True)
            beyond = likely.cumsum(-1) - likely >= self.top_p
            beyond[0] = False
            scores = scores.masked_fill(
                torch.empty_like(beyond).scatter_(0, order, beyond), -torch.inf
            )
        return scores.softmax(-1)


GREEDY = Sampling()


def own_stop_token_ids(model: PreTrainedModel) -> list[int]:
    """Those of the model's generation config: one, several or none."""
    config = model.generation_config
    ids = None if config is None else config.eos_token_id
    if ids is None:
        return []
    return list(ids) if isinstance(ids, list) else [ids]

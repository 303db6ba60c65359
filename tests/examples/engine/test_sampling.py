"""Tokens are drawn by their probability, the same ones for the same seed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from examples.engine.request import Question
from examples.engine.sampling import Sampler

LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def drawn(count: int, index: int = 0, logits: torch.Tensor = LOGITS, **options: Any) -> list[int]:
    sampler = Sampler(Question((1,), 1, **options), index)
    return [sampler.choose(logits) for _ in range(count)]


def test_without_temperature_it_is_the_most_likely() -> None:
    assert drawn(3, temperature=0.0) == [0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_come_as_often_as_they_are_likely(dtype: torch.dtype) -> None:
    counts = Counter(drawn(4000, logits=LOGITS.to(dtype), temperature=1.0, seed=1))
    for token, share in enumerate([0.5, 0.3, 0.15, 0.05]):
        assert counts[token] / 4000 == pytest.approx(share, abs=0.03)


def test_a_low_temperature_makes_the_likely_ones_likelier() -> None:
    counts = Counter(drawn(4000, temperature=0.5, seed=1))
    assert counts[0] / 4000 == pytest.approx(0.25 / (0.25 + 0.09 + 0.0225 + 0.0025), abs=0.03)


@pytest.mark.parametrize(
    ("top_p", "tokens"), [(1.0, {0, 1, 2, 3}), (0.85, {0, 1, 2}), (0.7, {0, 1}), (0.0, {0})]
)
def test_top_p_leaves_the_fewest_that_have_so_much(top_p: float, tokens: set[int]) -> None:
    assert set(drawn(500, temperature=1.0, top_p=top_p, seed=3)) == tokens


def test_the_seed_and_the_choice_decide() -> None:
    first = drawn(30, temperature=1.0, seed=5)
    assert drawn(30, temperature=1.0, seed=5) == first
    assert drawn(30, temperature=1.0, seed=6) != first
    assert drawn(30, index=1, temperature=1.0, seed=5) != first


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_every_seed_that_is_admitted_works(seed: int) -> None:
    drawn(1, index=15, temperature=1.0, seed=seed)

from __future__ import annotations

import pytest
import torch

from prefixcache.errors import InvalidArgumentError
from prefixcache.integrations.transformers import GREEDY, Sampling

LOGITS = torch.tensor([1.0, 3.0, 2.0, 3.0, -4.0])


def probabilities(**fields: float) -> torch.Tensor:
    return Sampling(**fields).probabilities(LOGITS)


def test_greedy_takes_the_first_of_the_most_likely_and_draws_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    assert GREEDY.next_token(LOGITS, generator) == 1
    assert torch.equal(generator.get_state(), before)


def test_temperature_divides_the_logits() -> None:
    assert torch.equal(probabilities(temperature=0.5), (LOGITS / 0.5).softmax(-1))


def test_top_k_keeps_those_as_likely_as_the_last_of_them() -> None:
    assert probabilities(temperature=1.0, top_k=1).tolist() == [0, 0.5, 0, 0.5, 0]
    assert probabilities(temperature=1.0, top_k=2).tolist() == [0, 0.5, 0, 0.5, 0]
    assert probabilities(temperature=1.0, top_k=3).count_nonzero() == 3
    assert probabilities(temperature=1.0, top_k=5).count_nonzero() == 5
    assert probabilities(temperature=1.0, top_k=50).count_nonzero() == 5


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    assert probabilities(temperature=1.0, top_p=1e-9).tolist() == [0, 1, 0, 0, 0]
    assert probabilities(temperature=1.0, top_p=0.5).tolist() == [0, 0.5, 0, 0.5, 0]
    assert probabilities(temperature=1.0, top_p=0.9).count_nonzero() == 3
    assert probabilities(temperature=1.0, top_p=1.0).count_nonzero() == 5


def test_low_precision_logits_are_drawn_from_in_float32() -> None:
    assert Sampling(1.0).probabilities(LOGITS.to(torch.bfloat16)).dtype is torch.float32


def test_each_output_has_a_generator_of_its_own() -> None:
    sampling, cpu = Sampling(1.0, seed=5), torch.device("cpu")
    states = [sampling.generator(index, cpu).get_state() for index in (0, 1, 1)]
    assert torch.equal(states[1], states[2])
    assert not torch.equal(states[0], states[1])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.1),
    ],
)
def test_bad_fields_are_named(field: str, value: float) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        Sampling(**{field: value})
    assert refused.value.field == field

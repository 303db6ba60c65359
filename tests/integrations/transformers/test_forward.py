"""A pass of a model over rows of tokens: logits of plain transformers, whatever the rows are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from prefixcache import Client
from prefixcache.attached import attach
from prefixcache.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from prefixcache.integrations.transformers import CachedModel, Row
from tests.integrations.transformers.models import (
    BLOCK_SIZE,
    CONFIGS,
    MakeModel,
    PlainModel,
    client_for,
    prompt,
    tiny_model,
)


@pytest.fixture
def client() -> Iterator[Client]:
    with client_for(tiny_model("llama")) as opened:
        yield opened


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_those_of_plain_transformers(
    cached_model: MakeModel, family: str, dtype: torch.dtype
) -> None:
    """Prompts in one pass, chunks beside single tokens, and what another sequence has computed."""
    model = tiny_model(family, dtype)
    plain = PlainModel(model)
    long, short = prompt(23), prompt(9, seed=1)
    with client_for(model) as client:
        cached = cached_model(model, client)
        first, second = client.sequence(long), client.sequence(short)
        logits = cached.forward([Row(first, long[:14]), Row(second, short)])
        plain.assert_close(logits, [long[:14], short])

        second.append([5])
        logits = cached.forward([Row(first, long[14:]), Row(second, [5])])
        plain.assert_close(logits, [long, [*short, 5]])

        first.append([6])
        second.append([7])
        logits = cached.forward([Row(first, [6]), Row(second, [7])])
        plain.assert_close(logits, [[*long, 6], [*short, 5, 7]])

        tail = prompt(4, seed=2)
        third = client.sequence(long + tail)
        assert third.num_cached_tokens == 20
        logits = cached.forward([Row(third, [*long[20:], *tail])])
        plain.assert_close(logits, [long + tail])


@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1])
def test_prompts_of_any_length(cached_model: MakeModel, length: int) -> None:
    model = tiny_model("llama")
    plain = PlainModel(model)
    tokens = prompt(length)
    with client_for(model) as client, client.sequence(tokens) as sequence:
        logits = cached_model(model, client).forward([Row(sequence, tokens)])
        plain.assert_close(logits, [tokens])


def test_a_prompt_that_is_cached_whole_computes_its_last_token(cached_model: MakeModel) -> None:
    model = tiny_model("llama")
    plain = PlainModel(model)
    tokens = prompt(2 * BLOCK_SIZE)
    with client_for(model) as client:
        cached = cached_model(model, client)
        with client.sequence(tokens) as sequence:
            cached.forward([Row(sequence, tokens)])
        with client.sequence(tokens) as sequence:
            assert sequence.num_computed_tokens == len(tokens) - 1
            plain.assert_close(cached.forward([Row(sequence, tokens[-1:])]), [tokens])


def test_forks_go_on_by_themselves(cached_model: MakeModel) -> None:
    model = tiny_model("llama")
    plain = PlainModel(model)
    tokens = prompt(10)
    with client_for(model) as client:
        cached = cached_model(model, client)
        parent = client.sequence(tokens)
        cached.forward([Row(parent, tokens)])
        family = [parent, *parent.fork(2)]
        client.append(family, [[1], [2], [3]])
        logits = cached.forward([Row(family[i], [i + 1]) for i in range(3)])
        plain.assert_close(logits, [[*tokens, i + 1] for i in range(3)])


def test_a_pass_computes_nothing_but_its_rows(cached_model: MakeModel, client: Client) -> None:
    model = tiny_model("llama")
    cached = cached_model(model, client)
    ids: list[torch.Tensor] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, given: ids.append(given[0]))
    sequences = [client.sequence(prompt(length, length)) for length in (3, 17)]
    cached.forward([Row(s, prompt(s.num_tokens, s.num_tokens)) for s in sequences])
    (batch,) = ids
    assert batch.shape == (1, 20), "padding"


def test_an_engine_may_commit_by_its_next_step(client: Client) -> None:
    """Of an attached model; the daemon itself knows what it has computed."""
    model, tokens = tiny_model("llama"), prompt(9)
    with attach(client) as view, client.steps() as steps:
        cached = CachedModel(model, client, view=view)
        sequence = client.sequence(tokens)
        cached.forward([Row(sequence, tokens)], commit=False)
        assert sequence.num_uncommitted_tokens == 9
        assert client.lookup(tokens).num_cached_tokens == 0
        step = steps.new_step()
        step.commit([sequence], [sequence.num_uncommitted_tokens])
        step.append([sequence], [[1]])
        steps.run(step)
        assert sequence.num_uncommitted_tokens == 0
        assert client.lookup(tokens).num_cached_tokens == 8
        cached.forward([Row(sequence, [1])])
        assert sequence.num_uncommitted_tokens == 0


# ---- what is refused


def test_rows_that_are_not_the_next_tokens(cached_model: MakeModel, client: Client) -> None:
    cached = cached_model(tiny_model("llama"), client)
    sequence = client.sequence(prompt(6))
    with pytest.raises(InvalidArgumentError, match="rows"):
        cached.forward([])
    for tokens in ([], prompt(7)):
        with pytest.raises(InvalidArgumentError, match=r"rows\.token_ids"):
            cached.forward([Row(sequence, tokens)])
    cached.forward([Row(sequence, prompt(6))])
    with pytest.raises(InvalidArgumentError, match=r"rows\.token_ids"):
        cached.forward([Row(sequence, [1])])


def test_one_sequence_twice_in_a_pass(cached_model: MakeModel, client: Client) -> None:
    cached = cached_model(tiny_model("llama"), client)
    tokens = prompt(6)
    sequence = client.sequence(tokens)
    with pytest.raises(InvalidArgumentError):
        cached.forward([Row(sequence, tokens[:2]), Row(sequence, tokens[2:])])
    assert sequence.num_started_tokens == 0


def test_a_pass_that_failed_between_layers_spoils_its_sequences_only(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    plain = PlainModel(model)
    cached = CachedModel(model, client)
    tokens = prompt(6)
    broken, other = client.sequence(tokens), client.sequence(tokens)

    def prefill(layer: int, *arguments: object) -> torch.Tensor:
        if layer == 1:
            raise UnavailableError("gone")
        return Client.prefill(client, layer, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(client, "prefill", prefill)
        with pytest.raises(UnavailableError):
            cached.forward([Row(broken, tokens)])
    with pytest.raises(FailedPreconditionError, match="allocate its tokens again"):
        cached.forward([Row(other, tokens), Row(broken, tokens)])
    plain.assert_close(cached.forward([Row(other, tokens)]), [tokens])


def test_a_model_whose_attention_was_changed(client: Client) -> None:
    model = tiny_model("llama")
    plain = PlainModel(model)
    cached = CachedModel(model, client)
    tokens = prompt(6)
    sequence = client.sequence(tokens)
    model.set_attn_implementation("eager")
    with pytest.raises(FailedPreconditionError, match="0 of 3 layers"):
        cached.forward([Row(sequence, tokens)])
    model.set_attn_implementation("prefixcache")
    plain.assert_close(cached.forward([Row(sequence, tokens)]), [tokens])


def test_a_model_in_training_mode(client: Client) -> None:
    model = tiny_model("llama")
    cached = CachedModel(model, client)
    model.train()
    with pytest.raises(FailedPreconditionError, match="eval"):
        cached.forward([Row(client.sequence([1]), [1])])


def test_the_model_alone(client: Client) -> None:
    model = tiny_model("llama")
    CachedModel(model, client)
    with pytest.raises(InvalidArgumentError, match="outside of CachedModel"):
        model(input_ids=torch.tensor([[1, 2]]), use_cache=False)

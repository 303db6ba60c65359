"""Generated tokens are those of plain transformers, in every mode and whatever the pool is like."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from prefixcache import Client
from prefixcache.errors import (
    ExceedsPoolError,
    InvalidArgumentError,
    NoRoomError,
    UnavailableError,
)
from prefixcache.integrations.transformers import CachedModel, Sampling, generation
from tests.integrations.transformers.models import (
    BLOCK_SIZE,
    CONFIGS,
    MakeModel,
    PlainModel,
    TokenCounter,
    client_for,
    daemon_for,
    prompt,
    tiny_model,
)

NEW = 12
LENGTHS = (1, BLOCK_SIZE, BLOCK_SIZE + 1, 23)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def plain() -> PlainModel:
    return PlainModel(tiny_model("llama"))


@pytest.fixture
def client(model: PreTrainedModel) -> Iterator[Client]:
    with client_for(model) as opened:
        yield opened


@contextmanager
def two_clients(model: PreTrainedModel, num_blocks: int) -> Iterator[tuple[Client, Client]]:
    with (
        daemon_for(model, num_blocks) as running,
        Client(running.target) as client,
        Client(running.target) as other,
    ):
        yield client, other


def prompts() -> list[list[int]]:
    return [prompt(length, seed=length) for length in LENGTHS]


def tokens_of(cached: CachedModel, *arguments: object, **options: object) -> list[list[int]]:
    return [list(result.token_ids) for result in cached.generate(*arguments, **options)]


@pytest.mark.parametrize("family", CONFIGS)
def test_greedy_tokens_are_those_of_plain_transformers(
    cached_model: MakeModel, family: str
) -> None:
    model = tiny_model(family)
    plain = PlainModel(model)
    wanted = [plain.greedy(tokens, NEW) for tokens in prompts()]
    with client_for(model) as client:
        cached = cached_model(model, client)
        assert tokens_of(cached, prompts(), NEW) == wanted
        # From the cache, and in chunks.
        cached = cached_model(model, client, max_pass_tokens=5)
        assert tokens_of(cached, prompts(), NEW) == wanted
        assert client.list_sequences() == []


@pytest.mark.parametrize(
    ("sampling", "processors"),
    [
        (Sampling(0.7, seed=3), [TemperatureLogitsWarper(0.7)]),
        (Sampling(1.5, top_k=9, seed=4), [TemperatureLogitsWarper(1.5), TopKLogitsWarper(9)]),
        (Sampling(1.5, top_p=0.8, seed=5), [TemperatureLogitsWarper(1.5), TopPLogitsWarper(0.8)]),
        (
            Sampling(2.0, top_k=20, top_p=0.6, seed=6),
            [TemperatureLogitsWarper(2.0), TopKLogitsWarper(20), TopPLogitsWarper(0.6)],
        ),
        (Sampling(1.0, top_k=1, top_p=1.0), [TopKLogitsWarper(1)]),
    ],
)
def test_sampled_tokens_are_those_of_a_sampler_over_plain_logits(
    cached_model: MakeModel,
    sampling: Sampling,
    processors: list[object],
    model: PreTrainedModel,
    plain: PlainModel,
    client: Client,
) -> None:
    made = tokens_of(cached_model(model, client), prompts(), NEW, sampling, num_return_sequences=3)
    for index, tokens in enumerate(made):
        generator = torch.Generator().manual_seed(sampling.seed + index)
        wanted = plain.sampled(
            prompts()[index // 3], NEW, LogitsProcessorList(processors), generator
        )
        assert tokens == wanted, index


def test_samples_of_one_prompt_differ(
    cached_model: MakeModel, model: PreTrainedModel, client: Client
) -> None:
    made = tokens_of(
        cached_model(model, client), [prompt(9)], NEW, Sampling(1.0), num_return_sequences=4
    )
    assert len({tuple(tokens) for tokens in made}) == 4


# ---- streaming and ends


def test_a_stream_gives_each_token_as_it_is_chosen(
    cached_model: MakeModel, model: PreTrainedModel, client: Client
) -> None:
    cached = cached_model(model, client)
    counter = TokenCounter(model)
    wanted = tokens_of(cached, prompts(), NEW)
    counter.take()
    stream = cached.stream(prompts(), NEW)
    assert counter.take() == 0
    made: list[list[int]] = [[] for _ in LENGTHS]
    for index, token in stream:
        made[index].append(token)
        # Nothing is held back: the pass that computes a token's predecessor gives it.
        assert len(counter.passes) == max(map(len, made))
    assert made == wanted


def test_a_stream_that_is_left_frees_its_sequences(
    cached_model: MakeModel, model: PreTrainedModel, client: Client
) -> None:
    stream = cached_model(model, client).stream(prompts(), NEW)
    for _ in range(6):
        next(stream)
    assert client.list_sequences()
    stream.close()
    assert client.list_sequences() == []


def test_stop_tokens_end_an_output(
    cached_model: MakeModel, model: PreTrainedModel, client: Client
) -> None:
    cached = cached_model(model, client)
    (whole,) = tokens_of(cached, [prompt(9)], NEW)
    stop = whole[4]
    first = whole.index(stop)
    (stopped,) = cached.generate([prompt(9)], NEW, stop_token_ids=[stop])
    assert (list(stopped.token_ids), stopped.finish_reason) == (whole[: first + 1], "stop")
    (other,) = cached.generate([prompt(9)], first + 1)
    assert (list(other.token_ids), other.finish_reason) == (whole[: first + 1], "length")


@pytest.mark.parametrize("as_list", [False, True])
def test_the_models_own_stop_tokens_hold_unless_others_are_given(
    cached_model: MakeModel, as_list: bool, client: Client
) -> None:
    model = tiny_model("llama")
    plain = PlainModel(model)
    whole = plain.greedy(prompt(9), NEW)
    model.generation_config.eos_token_id = [whole[4], 127] if as_list else whole[4]
    plain = PlainModel(model)
    cached = cached_model(model, client)
    assert tokens_of(cached, [prompt(9)], NEW) == [plain.greedy(prompt(9), NEW)]
    assert tokens_of(cached, [prompt(9)], NEW, stop_token_ids=()) == [whole]


def test_outputs_of_one_prompt_may_end_at_their_first_token(
    cached_model: MakeModel, model: PreTrainedModel, plain: PlainModel, client: Client
) -> None:
    cached = cached_model(model, client)
    sampling = Sampling(1.0)
    whole = tokens_of(cached, [prompt(9)], NEW, sampling, num_return_sequences=4)
    for stop in {tokens[0] for tokens in whole}:
        made = cached.generate(
            [prompt(9)], NEW, sampling, num_return_sequences=4, stop_token_ids=[stop]
        )
        for tokens, result in zip(whole, made, strict=True):
            end = tokens.index(stop) + 1 if stop in tokens else NEW
            assert list(result.token_ids) == tokens[:end]


def test_no_prompts(model: PreTrainedModel, client: Client) -> None:
    assert CachedModel(model, client).generate([], NEW) == []


# ---- what is computed


def test_a_second_run_computes_only_what_is_not_cached(
    cached_model: MakeModel, model: PreTrainedModel, client: Client
) -> None:
    cached = cached_model(model, client)
    counter = TokenCounter(model)
    first = cached.generate(prompts(), NEW)
    assert [result.num_cached_tokens for result in first] == [0] * len(LENGTHS)
    # Nothing is computed for the last token.
    assert counter.take() == sum(length + NEW - 1 for length in LENGTHS)

    second = cached.generate(prompts(), NEW)
    hits = [min(length // BLOCK_SIZE * BLOCK_SIZE, length - 1) for length in LENGTHS]
    assert [result.num_cached_tokens for result in second] == hits
    assert counter.take() == sum(length + NEW - 1 for length in LENGTHS) - sum(hits)
    assert [result.token_ids for result in second] == [result.token_ids for result in first]


def test_an_answer_is_cached_for_the_next_turn(
    cached_model: MakeModel, model: PreTrainedModel, client: Client
) -> None:
    cached = cached_model(model, client)
    (answer,) = tokens_of(cached, [prompt(9)], NEW)
    (turn,) = cached.generate([[*prompt(9), *answer, 1, 2, 3]], NEW)
    assert turn.num_cached_tokens == (9 + NEW - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_prompts_of_one_call_compute_a_shared_prefix_once(
    cached_model: MakeModel, model: PreTrainedModel, plain: PlainModel, client: Client
) -> None:
    shared = prompt(4 * BLOCK_SIZE)
    questions = [shared + prompt(5, seed=seed) for seed in (1, 2, 3)]
    cached = cached_model(model, client)
    counter = TokenCounter(model)
    made = tokens_of(cached, questions, NEW)
    assert counter.take() == len(shared) + 3 * (5 + NEW - 1)
    assert made == [plain.greedy(question, NEW) for question in questions]


def test_samples_share_their_prompt(
    cached_model: MakeModel, model: PreTrainedModel, client: Client
) -> None:
    counter = TokenCounter(model)
    cached_model(model, client).generate([prompt(22)], NEW, Sampling(1.0), num_return_sequences=3)
    assert counter.take() == 22 + 3 * (NEW - 1)


def test_chunks_of_prompts_run_beside_single_tokens(
    cached_model: MakeModel, model: PreTrainedModel, plain: PlainModel, client: Client
) -> None:
    counter = TokenCounter(model)
    made = tokens_of(cached_model(model, client, max_pass_tokens=5), prompts(), NEW)
    assert max(counter.passes) == 5
    assert made == [plain.greedy(tokens, NEW) for tokens in prompts()]


def test_two_engines_compute_a_prompt_once(
    cached_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two threads, each with a client of its own."""
    monkeypatch.setattr(generation, "_WAIT_PENDING_S", 60.0)  # however slow the other one is
    models = [tiny_model("llama"), tiny_model("llama")]
    plain = PlainModel(models[0])
    counters = [TokenCounter(model) for model in models]
    text = prompt(4 * BLOCK_SIZE + 1)
    made: list[list[list[int]]] = []
    with daemon_for(models[0]) as running:

        def engine(model: PreTrainedModel) -> None:
            with Client(running.target) as client:
                made.append(tokens_of(cached_model(model, client), [text], NEW))

        threads = [threading.Thread(target=engine, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert made == [[plain.greedy(text, NEW)]] * 2
    # The last token of the prompt, and those generated but for the last one, are each one's own.
    assert sum(counter.take() for counter in counters) == 4 * BLOCK_SIZE + 2 * (1 + NEW - 1)


# ---- room


@pytest.mark.parametrize("max_pass_tokens", [5, 2048])
@pytest.mark.parametrize("num_blocks", [9, 12, 16])
def test_preempted_sequences_go_on_with_the_same_tokens(
    cached_model: MakeModel,
    num_blocks: int,
    max_pass_tokens: int,
    model: PreTrainedModel,
    plain: PlainModel,
) -> None:
    """The largest one needs 9 blocks."""
    with client_for(model, num_blocks) as client:
        cached = cached_model(model, client, max_pass_tokens=max_pass_tokens)
        made = tokens_of(cached, prompts(), NEW)
        assert client.stats().resumed_requests > 0
        assert client.list_sequences() == []
    assert made == [plain.greedy(tokens, NEW) for tokens in prompts()]


def test_the_oldest_request_is_never_preempted(
    cached_model: MakeModel, model: PreTrainedModel
) -> None:
    """It has a token of each pass, whatever becomes of the others."""
    counter = TokenCounter(model)
    texts = [prompt(8, seed=seed) for seed in range(4)]
    with client_for(model, num_blocks=12) as client:
        num_tokens = 0
        for index, _ in cached_model(model, client).stream(texts, NEW):
            if index == 0:
                num_tokens += 1
                assert len(counter.passes) == num_tokens
        assert num_tokens == NEW
        assert client.stats().resumed_requests > 0


def test_a_preempted_request_is_ahead_of_those_that_have_not_begun(
    cached_model: MakeModel, model: PreTrainedModel
) -> None:
    """The second makes room for the first, while the third has none."""
    texts = [prompt(8, seed=seed) for seed in range(3)]
    num_tokens = [0, 0, 0]
    finished = []
    with client_for(model, num_blocks=5) as client:
        for index, _ in cached_model(model, client).stream(texts, NEW):
            num_tokens[index] += 1
            if num_tokens[index] == NEW:
                finished.append(index)
            if index == 2:
                assert num_tokens[0] == NEW
        assert client.stats().resumed_requests > 0
    assert finished == [0, 1, 2]


def test_preempted_samples_go_on_with_the_same_tokens(
    cached_model: MakeModel, model: PreTrainedModel, client: Client
) -> None:
    arguments = (prompts(), NEW, Sampling(1.2, top_k=30, seed=11))
    wanted = tokens_of(cached_model(model, client), *arguments, num_return_sequences=3)
    with client_for(model, num_blocks=12) as small:
        made = tokens_of(cached_model(model, small), *arguments, num_return_sequences=3)
        assert small.stats().resumed_requests > 0
        assert small.list_sequences() == []
    assert made == wanted


def test_a_preempted_sequence_finds_its_tokens_in_the_cache(
    cached_model: MakeModel, model: PreTrainedModel
) -> None:
    """What was given up for the older one's last block is there when that has finished."""
    counter = TokenCounter(model)
    texts = [prompt(8, seed=1), prompt(8, seed=2)]
    with client_for(model, num_blocks=7) as client:
        cached_model(model, client).generate(texts, 8)
        stats = client.stats()
    assert stats.resumed_requests == 1
    assert (
        counter.take() == 2 * (8 + 7) + stats.resumed_queries_tokens - stats.resumed_hit_tokens - 1
    )
    assert stats.resumed_hit_tokens > 0


@pytest.mark.parametrize("length", [4 * BLOCK_SIZE + 1, 4 * BLOCK_SIZE - 2])
def test_one_that_can_never_fit_raises(
    cached_model: MakeModel, length: int, model: PreTrainedModel
) -> None:
    """With its prompt, or when it has grown."""
    with client_for(model, num_blocks=4) as client:
        with pytest.raises(ExceedsPoolError):
            cached_model(model, client).generate([prompt(3), prompt(length)], NEW)
        assert client.list_sequences() == []


def test_room_that_others_hold_is_waited_for(
    cached_model: MakeModel,
    model: PreTrainedModel,
    plain: PlainModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with two_clients(model, num_blocks=8) as (client, other):
        held = other.sequence(prompt(20, seed=9))
        waits: list[float] = []

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 3:
                held.free()

        monkeypatch.setattr(generation, "sleep", sleep)
        made = tokens_of(cached_model(model, client), [prompt(17)], NEW)
    assert len(waits) == 3
    assert made == [plain.greedy(prompt(17), NEW)]


def test_room_that_others_hold_for_too_long(
    cached_model: MakeModel, model: PreTrainedModel
) -> None:
    with two_clients(model, num_blocks=8) as (client, other):
        cached = cached_model(model, client, wait_room_s=0.0)
        with other.sequence(prompt(20, seed=9)), pytest.raises(NoRoomError):
            cached.generate([prompt(17)], NEW)


# ---- errors


def test_an_error_in_between_frees_everything(
    model: PreTrainedModel, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = CachedModel(model, client)
    stream = cached.stream(prompts(), NEW)
    for _ in range(6):
        next(stream)

    def gone(*arguments: object) -> None:
        raise UnavailableError("gone")

    monkeypatch.setattr(client, "decode", gone)
    with pytest.raises(UnavailableError):
        list(stream)
    assert client.list_sequences() == []


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"num_return_sequences": 0}, "num_return_sequences"),
        ({"prompts": [[1], []]}, "prompts"),
    ],
)
def test_bad_arguments_are_refused_at_once(
    arguments: dict[str, object], field: str, model: PreTrainedModel, client: Client
) -> None:
    cached = CachedModel(model, client)
    with pytest.raises(InvalidArgumentError) as refused:
        cached.stream(**{"prompts": [[1]], "max_new_tokens": 1, **arguments})
    assert refused.value.field == field


def test_a_pass_has_at_least_one_token(model: PreTrainedModel, client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="max_pass_tokens"):
        CachedModel(model, client, max_pass_tokens=0)

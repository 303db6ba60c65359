"""Whatever changes K/V changes the name under which they are kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from prefixcache import Client
from prefixcache.errors import FailedPreconditionError, InvalidArgumentError
from prefixcache.integrations.transformers import CachedModel, Completion, Row, weights_revision
from prefixcache.types import ExtraKeys, Lora
from tests.integrations.transformers.models import (
    BLOCK_SIZE,
    CONFIGS,
    MakeModel,
    PlainModel,
    client_for,
    prompt,
    tiny_model,
)

PROMPT = prompt(5 * BLOCK_SIZE + 1)
CACHED = 5 * BLOCK_SIZE
NEW = 8


# ---- weights and config


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_has_its_revision_wherever_it_is_loaded(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    assert weights_revision(loaded) == weights_revision(model)


def test_one_changed_parameter_changes_the_revision() -> None:
    model = tiny_model("llama")
    before = weights_revision(model)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight += 1e-3
    assert weights_revision(model) != before


def test_the_dtype_changes_the_revision() -> None:
    single, half = tiny_model("llama"), tiny_model("llama", torch.bfloat16)
    assert weights_revision(single) != weights_revision(half) != weights_revision(half.float())


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        ),
        ("llama", {"rms_norm_eps": 1e-3}),
        ("llama", {"hidden_act": "gelu"}),
        ("mistral_window", {"sliding_window": 7}),
        ("mistral_window", {"sliding_window": None}),
        ("gemma2", {"attn_logit_softcapping": 3.0}),
        ("gemma2", {"query_pre_attn_scalar": 16}),
        ("gemma2", {"layer_types": ["full_attention"] * 3}),
        ("gpt_oss", {"num_experts_per_tok": 1}),
    ],
)
def test_equal_weights_that_are_used_otherwise_have_another_revision(
    family: str, options: dict[str, Any]
) -> None:
    model = tiny_model(family)
    config = copy.deepcopy(CONFIGS[family])
    for name, value in options.items():
        setattr(config, name, value)
    other = AutoModelForCausalLM.from_config(config).eval()
    other.load_state_dict(model.state_dict())
    assert weights_revision(other) != weights_revision(model)


def test_what_says_nothing_of_kv_leaves_the_revision() -> None:
    model = tiny_model("llama")
    before = weights_revision(model)
    model.config.name_or_path = "somewhere/else"
    model.config.eos_token_id = 5
    model.config.use_cache = False
    assert weights_revision(model) == before


def test_weights_that_are_not_loaded_have_no_revision() -> None:
    with pytest.raises(InvalidArgumentError, match="not loaded"):
        weights_revision(tiny_model("llama").to("meta"))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.lm_head.weight.add_(1.0),
        lambda model: model.load_state_dict(tiny_model("llama", seed=1).state_dict()),
        lambda model: model.double(),
    ],
    ids=["in_place", "loaded", "cast"],
)
def test_weights_that_change_later_are_noticed(
    change: Callable[[PreTrainedModel], object], cached_model: MakeModel
) -> None:
    model = tiny_model("llama")
    with client_for(model) as client:
        cached = cached_model(model, client)
        cached.generate([PROMPT], NEW)
        with torch.no_grad():
            change(model)
        with pytest.raises(FailedPreconditionError, match="weights have changed"):
            cached.generate([PROMPT], NEW)
        assert client.list_sequences() == []


# ---- adapters


class Adapted:
    """A model with the adapters "one" and "two", of random weights; "one" is active."""

    def __init__(self, seed: int = 0) -> None:
        self.peft: PeftModel = get_peft_model(tiny_model("llama"), _lora(), adapter_name="one")
        self.peft.add_adapter("two", _lora())
        self.peft.set_adapter("one")
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.peft.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape) / 4)
        self.peft.eval()
        self.model: PreTrainedModel = self.peft.get_base_model()

    def plain_tokens(self) -> list[int]:
        """With the adapters that are active."""
        return PlainModel(self.model).greedy(PROMPT, NEW)


def _lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "up_proj"])


@pytest.fixture
def client() -> Iterator[Client]:
    with client_for(tiny_model("llama")) as opened:
        yield opened


def ask(cached: CachedModel, **options: Any) -> Completion:
    (answer,) = cached.generate([PROMPT], NEW, **options)
    return answer


def test_each_adapter_has_its_own_blocks(cached_model: MakeModel, client: Client) -> None:
    adapted = Adapted()
    assert weights_revision(adapted.model) == weights_revision(tiny_model("llama"))
    cached = cached_model(adapted.model, client)
    answers = set()
    for num_cached in (0, CACHED):
        for name in ("one", "two"):
            adapted.peft.set_adapter(name)
            answer = ask(cached)
            assert list(answer.token_ids) == adapted.plain_tokens()
            assert answer.num_cached_tokens == num_cached
            answers.add(answer.token_ids)
        with adapted.peft.disable_adapter():
            answer = ask(cached)
            assert list(answer.token_ids) == adapted.plain_tokens()
            assert answer.num_cached_tokens == num_cached
            answers.add(answer.token_ids)
    assert len(answers) == 3
    # Without adapters it is the model that it was.
    assert ask(cached_model(tiny_model("llama"), client)).num_cached_tokens == CACHED


def test_an_adapter_is_the_same_in_every_process_and_others_do_not_matter(client: Client) -> None:
    adapted, alone = Adapted(), Adapted()
    alone.peft.delete_adapter("two")
    one = CachedModel(adapted.model, client).lora
    assert one is not None and one.name == "one"
    assert CachedModel(alone.model, client).lora == one
    adapted.peft.set_adapter("two")
    assert CachedModel(adapted.model, client).lora != one


def test_other_weights_of_an_adapter_of_the_same_name(client: Client) -> None:
    first, second = (CachedModel(Adapted(seed).model, client) for seed in (1, 2))
    assert ask(first).num_cached_tokens == 0
    assert ask(second).num_cached_tokens == 0
    assert ask(first).num_cached_tokens == CACHED


def test_another_scale_of_an_adapter(client: Client) -> None:
    adapted = Adapted()
    cached = CachedModel(adapted.model, client)
    before = cached.lora
    adapted.model.model.layers[0].self_attn.q_proj.set_scale("one", 3.0)
    assert cached.lora != before


def test_adapters_that_are_loaded_later(cached_model: MakeModel, client: Client) -> None:
    model = tiny_model("llama")
    cached = cached_model(model, client)
    assert ask(cached).num_cached_tokens == 0
    peft = get_peft_model(model, _lora())
    assert cached.lora is not None and cached.lora.name == "default"
    assert ask(cached).num_cached_tokens == 0
    peft.unload()
    assert ask(cached).num_cached_tokens == CACHED


def test_a_pass_is_told_of_the_adapters_of_its_sequences(
    cached_model: MakeModel, client: Client
) -> None:
    adapted = Adapted()
    plain = PlainModel(adapted.model)
    cached = cached_model(adapted.model, client)
    with client.sequence(PROMPT) as sequence:
        with pytest.raises(FailedPreconditionError, match="of no adapter, and the model has the"):
            cached.forward([Row(sequence, PROMPT)])
        assert sequence.num_computed_tokens == 0
    lora = cached.lora
    with client.sequence(PROMPT, extra_keys=ExtraKeys(lora)) as sequence:
        plain.assert_close(cached.forward([Row(sequence, PROMPT)], lora=lora), [PROMPT])
        sequence.append([5])
        adapted.peft.set_adapter("two")
        with pytest.raises(FailedPreconditionError, match="adapter two"):
            cached.forward([Row(sequence, [5])], lora=lora)
        adapted.peft.set_adapter("one")
        plain.assert_close(cached.forward([Row(sequence, [5])], lora=lora), [[*PROMPT, 5]])


def test_adapters_that_change_between_two_tokens_end_the_stream(client: Client) -> None:
    adapted = Adapted()
    stream = CachedModel(adapted.model, client).stream([PROMPT], NEW)
    next(stream)
    adapted.peft.set_adapter("two")
    with pytest.raises(FailedPreconditionError, match="adapter two"):
        list(stream)
    assert client.list_sequences() == []


def test_a_merged_adapter_makes_other_weights(client: Client) -> None:
    adapted = Adapted()
    cached = CachedModel(adapted.model, client)
    adapted.peft.merge_adapter()
    with pytest.raises(FailedPreconditionError, match="weights have changed"):
        ask(cached)
    with pytest.raises(InvalidArgumentError, match="has weights of the revision"):
        CachedModel(adapted.model, client)


# ---- names that the caller gives


def test_a_name_for_what_the_model_adds_in_its_own_way(
    cached_model: MakeModel, client: Client
) -> None:
    cached = cached_model(tiny_model("llama"), client)
    own = (None, Lora("own"), Lora("own", "2"))
    for num_cached in (0, CACHED):
        for lora in own:
            assert ask(cached, lora=lora).num_cached_tokens == num_cached
    with pytest.raises(FailedPreconditionError, match="the model has no adapter"):
        ask(cached, lora=Lora("own", "weights-0"))


@pytest.mark.parametrize("num_blocks", [128, 14])
def test_salts_keep_prompts_apart(cached_model: MakeModel, num_blocks: int) -> None:
    """Also where sequences are preempted, and found again under their salts."""
    model = tiny_model("llama")
    wanted = PlainModel(model).greedy(PROMPT, NEW)
    with client_for(model, num_blocks) as client:
        cached = cached_model(model, client)
        salts = ["a", "b", "", "a"]
        answers = cached.generate([PROMPT] * 4, NEW, num_return_sequences=2, cache_salts=salts)
        assert [list(answer.token_ids) for answer in answers] == [wanted] * 8
        num_cached = [answer.num_cached_tokens for answer in answers[::2]]
        assert num_cached[:3] == [0, 0, 0]
        if num_blocks == 128:
            assert num_cached[3] == CACHED
            for salt, num_found in (("a", CACHED), ("c", 0)):
                assert ask(cached, cache_salts=[salt]).num_cached_tokens == num_found
            streamed = cached.stream([PROMPT], NEW, cache_salts=["b"])
            assert [token for _, token in streamed] == wanted
        with pytest.raises(InvalidArgumentError, match="cache_salts"):
            ask(cached, cache_salts=["a", "b"])
        assert client.list_sequences() == []

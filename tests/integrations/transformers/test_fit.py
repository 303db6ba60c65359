"""Models and daemons that do not fit are refused before anything runs."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BloomConfig,
    DeepseekV3Config,
    Gemma3TextConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    PreTrainedModel,
    T5Config,
)

from prefixcache import Client
from prefixcache.attached import attach
from prefixcache.errors import FingerprintMismatchError, InvalidArgumentError, NoStorageError
from prefixcache.integrations.transformers import (
    CachedModel,
    kv_layout,
    serve_flags,
    weights_revision,
)
from prefixcache.integrations.transformers.__main__ import main as print_flags
from prefixcache.server.daemon import CacheOptions
from prefixcache.storage.layout import KVLayout
from tests.integrations.transformers.models import (
    CONFIGS,
    client_for,
    daemon_for,
    tiny_model,
)
from tests.support.daemon import running_daemon

SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
EXPERTS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}


def causal(config: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(config).eval()


UNFIT = {
    "chunked_attention": lambda: causal(Llama4TextConfig(**SHAPE, num_local_experts=2)),
    "conv": lambda: causal(Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"])),
    "latent attention": lambda: causal(DeepseekV3Config(**SHAPE, **LATENT, **EXPERTS)),
    "'dynamic'": lambda: causal(
        LlamaConfig(
            **SHAPE,
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        )
    ),
    "'longrope'": lambda: causal(
        LlamaConfig(
            **SHAPE,
            rope_parameters={
                **LONG,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 64,
            },
        )
    ),
    "not causal": lambda: causal(Gemma3TextConfig(**SHAPE, use_bidirectional_attention=True)),
    "past AttentionInterface": lambda: causal(
        # Of the layout that the daemon has: it is refused for its attention alone.
        BloomConfig(hidden_size=32, n_head=2, n_layer=3, vocab_size=32)
    ),
    "no causal language model": lambda: AutoModel.from_config(LlamaConfig(**SHAPE)).eval(),
    "encoder and decoder": lambda: AutoModelForSeq2SeqLM.from_config(
        T5Config(vocab_size=32, d_model=32, d_kv=16, d_ff=32, num_layers=2, num_heads=2)
    ),
}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with client_for(tiny_model("llama")) as opened:
        yield opened


@pytest.mark.parametrize("kind", UNFIT)
def test_a_model_that_cannot_be_computed_exactly_is_refused_by_its_kind(
    kind: str, client: Client
) -> None:
    model = UNFIT[kind]()
    before = model.config._attn_implementation
    with pytest.raises(InvalidArgumentError, match=kind):
        CachedModel(model, client, revision=client.server_info().model_revision)
    assert model.config._attn_implementation == before


def test_something_else_than_a_model(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="no model of transformers"):
        CachedModel(torch.nn.Linear(1, 1), client)


# ---- the daemon


@pytest.mark.parametrize("family", CONFIGS)
def test_the_layout_of_a_family(family: str) -> None:
    num_kv_heads = 4 if family == "gpt2" else 2
    layout = kv_layout(tiny_model(family, torch.bfloat16), 4)
    assert layout == KVLayout(3, num_kv_heads, 16, 4, "bfloat16")


def test_a_daemon_of_another_layout_is_refused_with_the_flags_that_fit(client: Client) -> None:
    model = tiny_model("llama", torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match="float32") as refused:
        CachedModel(model, client)
    assert " ".join(serve_flags(model)) in str(refused.value)


def test_the_flags_name_layout_and_weights() -> None:
    model = tiny_model("llama")
    flags = serve_flags(model)
    assert dict(zip(flags[::2], flags[1::2], strict=True)) == {
        "--num-layers": "3",
        "--num-kv-heads": "2",
        "--head-dim": "16",
        "--dtype": "float32",
        "--model-name": "llama",
        "--model-revision": weights_revision(model),
    }


def test_the_flags_are_printed_for_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "own name")
    command = ["prefixcache.integrations.transformers", str(tmp_path / "own name")]
    monkeypatch.setattr("sys.argv", command)
    print_flags()
    words = shlex.split(capsys.readouterr().out)
    flags = dict(zip(words[::2], words[1::2], strict=True))
    assert flags["--model-name"] == "own name"
    assert flags["--dtype"] == "float32"
    assert flags["--model-revision"] == weights_revision(model)


def test_a_daemon_without_kv_memory() -> None:
    cache = CacheOptions(num_blocks=4)
    with running_daemon(cache) as running, Client(running.target) as client:
        model = tiny_model("llama")
        with pytest.raises(NoStorageError):
            CachedModel(model, client)


def test_other_weights_than_those_that_the_daemon_names(client: Client) -> None:
    CachedModel(tiny_model("llama"), client)
    other = tiny_model("llama", seed=1)
    with pytest.raises(InvalidArgumentError, match="has weights of the revision") as refused:
        CachedModel(other, client)
    assert " ".join(serve_flags(other)) in str(refused.value)


def test_a_view_that_does_not_fit(client: Client) -> None:
    model, elsewhere = tiny_model("llama"), tiny_model("llama").to("meta")
    with (
        attach(client, writable=False) as view,
        pytest.raises(InvalidArgumentError, match="reading only"),
    ):
        CachedModel(model, client, view=view)
    with (
        attach(client) as view,
        daemon_for(model, revision="2") as running,
        Client(running.target) as other,
    ):
        with pytest.raises(InvalidArgumentError, match="the model is on meta"):
            CachedModel(elsewhere, client, view=view, revision=weights_revision(model))
        with pytest.raises(FingerprintMismatchError):
            CachedModel(model, other, view=view, revision="2")
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("own", ["v2", ""])
def test_a_revision_of_the_operators_own_choice_is_the_callers_to_say(own: str) -> None:
    model = tiny_model("llama")
    with daemon_for(model, revision=own) as running, Client(running.target) as client:
        for said in (None, "v1"):
            with pytest.raises(InvalidArgumentError, match=f"the daemon's blocks are of '{own}'"):
                CachedModel(model, client, revision=said)
        CachedModel(model, client, revision=own)

"""Tiny models of each family with random weights, and what plain transformers makes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    LogitsProcessorList,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from prefixcache import Client
from prefixcache.integrations.transformers import CachedModel, kv_layout, weights_revision
from prefixcache.server.daemon import CacheOptions, ModelOptions
from prefixcache.types import PoolAccess
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.tolerances import assert_logits_close

MakeModel = Callable[..., CachedModel]
"""The fixture `cached_model`."""
BLOCK_SIZE = 4
VOCABULARY = 128
WINDOW = 6
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    # Large enough for attention to decide which token is the next one.
    "initializer_range": 0.3,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SHAPE),
    # Learned positions, other names in its config, and no groups of query heads.
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_positions=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "qwen3": Qwen3Config(**_SHAPE),
    "mistral": MistralConfig(**_SHAPE, sliding_window=None),
    "mistral_window": MistralConfig(**_SHAPE, sliding_window=WINDOW),
    "gemma": GemmaConfig(**_SHAPE),
    # Caps small enough to bend the scores of random weights.
    "gemma2": Gemma2Config(
        **_SHAPE,
        sliding_window=WINDOW,
        layer_types=_MIXED,
        attn_logit_softcapping=2.0,
        query_pre_attn_scalar=24,
    ),
    "gemma3": Gemma3TextConfig(
        **_SHAPE, sliding_window=WINDOW, layer_types=_MIXED, query_pre_attn_scalar=24
    ),
    "gpt_oss": GptOssConfig(
        **_SHAPE,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=_MIXED,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}


def tiny_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """With transformers' own attention, the one that every family has."""
    torch.manual_seed(seed)
    config = copy.deepcopy(CONFIGS[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    # Mixtures of experts have a form for float64 too.
    model.set_experts_implementation("eager")
    _fill_empty(model)
    return model.to(dtype).eval()


def _fill_empty(model: PreTrainedModel) -> None:
    """Parameters that begin as one number (norms, sinks) get numbers that differ."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and not bool((parameter != parameter.flatten()[0]).any()):
                parameter.add_(0.1 * torch.randn(parameter.shape))


@contextmanager
def daemon_for(
    model: PreTrainedModel, num_blocks: int = 128, revision: str | None = None
) -> Iterator[RunningDaemon]:
    """revision: None for that of the model's weights."""
    if revision is None:
        revision = weights_revision(model)
    layout = kv_layout(model, BLOCK_SIZE)
    cache = CacheOptions(num_blocks=num_blocks, block_size=BLOCK_SIZE)
    model_options = ModelOptions(layout, revision=revision)
    with running_daemon(cache, model_options, attach=PoolAccess.WRITE) as running:
        yield running


@contextmanager
def client_for(model: PreTrainedModel, num_blocks: int = 128) -> Iterator[Client]:
    with daemon_for(model, num_blocks) as running, Client(running.target) as client:
        yield client


class PlainModel:
    """The same model as transformers runs it, with no cache of any kind; a copy."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = copy.deepcopy(model)
        self.model.set_attn_implementation("eager")
        self._exact = copy.deepcopy(self.model).double()

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Of every token, [T, vocabulary]."""
        return _logits(self.model, tokens)

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """By the `generate` of transformers."""
        ids = self.model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        return ids[0, len(prompt) :].tolist()

    def sampled(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        processors: LogitsProcessorList,
        generator: torch.Generator,
    ) -> list[int]:
        """Drawn as transformers does, after its own processors, but with a generator."""
        tokens = list(prompt)
        for _ in range(max_new_tokens):
            scores = processors(torch.tensor([tokens]), self.logits(tokens)[-1:])
            tokens += torch.multinomial(scores.softmax(-1)[0], 1, generator=generator).tolist()
        return tokens[len(prompt) :]

    def assert_close(self, actual: torch.Tensor, prefixes: Sequence[Sequence[int]]) -> None:
        """actual: logits of the last token of each prefix, [S, vocabulary]."""
        plain = torch.stack([self.logits(tokens)[-1] for tokens in prefixes])
        exact = torch.stack([_logits(self._exact, tokens)[-1] for tokens in prefixes])
        assert_logits_close(actual, plain, exact)


@torch.inference_mode()
def _logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


class TokenCounter:
    """Counts the tokens that a model computes, pass by pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.passes: list[int] = []
        model.get_input_embeddings().register_forward_pre_hook(
            lambda _, given: self.passes.append(given[0].numel())
        )

    def take(self) -> int:
        """Those since the last time."""
        total = sum(self.passes)
        self.passes.clear()
        return total


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (length,), generator=generator).tolist()

"""A model with random weights and a tokenizer of bytes, in a folder as transformers has them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

END = "<|end|>"
NUM_BYTES = 256
_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def save(folder: Path) -> Path:
    """Token i is byte i, and after them comes the end of an answer."""
    _model().save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def plain_tokens(prompt: Sequence[int], max_tokens: int, end: int | None = None) -> list[int]:
    """What transformers' own greedy `generate` gives, without a cache of prefixes.

    end: the token that ends it, left out; None for none.
    """
    tokens = torch.tensor([list(prompt)])
    answer = _model().generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=end,
        pad_token_id=0,
    )
    found: list[int] = answer[0, tokens.shape[1] :].tolist()
    return found[:-1] if found[-1] == end else found


def plain_answer(prompt: str, max_tokens: int) -> str:
    """The same of a text."""
    tokens = plain_tokens(prompt.encode(), max_tokens, end=NUM_BYTES)
    return bytes(tokens).decode(errors="replace")


@cache
def _model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=NUM_BYTES + 1,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=NUM_BYTES,
        # Large enough for attention to decide which token is the next one.
        initializer_range=0.3,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def _tokenizer() -> PreTrainedTokenizerFast:
    # ByteLevel gives each byte a printable character: itself, or one from 256 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(NUM_BYTES + place) for place, byte in enumerate(others)}
    vocabulary = {character: byte for byte, character in characters.items()} | {END: NUM_BYTES}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    fast.chat_template = _TEMPLATE
    return fast

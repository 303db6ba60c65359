"""A prompt's request has the fields of its message, wherever the tokens come from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from prefixcache.client import messages
from prefixcache.client.columns import uint32_column
from prefixcache.client.prompt_request import PromptRequest
from prefixcache.rpc.requests import RequestReader
from prefixcache.rpc.wire import column32, methods, twin
from prefixcache.types import CacheUse, ExtraKeys, FullHit, Lora

METHODS = {method.name: method for method in methods()}
SIZES = [0, 1, 31, 32, 33, 4095, 4096, 4097, 131_072]
"""Of prompts: none, and where the length in bytes gets one byte longer on the wire."""


def random_fields(rng: random.Random) -> dict[str, Any]:
    keys = twin("ExtraKeys")(cache_salt="salt", lora=twin("Lora")(name="adapter"))
    fields = {
        "owner": rng.randbytes(16),
        "request_id": rng.randbytes(8).hex(),
        "extra_keys": keys,
        "num_lookahead_tokens": rng.randrange(2**32),
        "cache_use": rng.choice(list(CacheUse)),
        "full_hit": rng.choice(list(FullHit)),
        "resumed": True,
    }
    return {name: fields[name] for name in rng.sample(sorted(fields), rng.randrange(len(fields)))}


@pytest.mark.parametrize("num_tokens", SIZES)
def test_it_is_the_message_with_the_tokens_set(num_tokens: int) -> None:
    rng = random.Random(num_tokens)
    tokens = np.random.default_rng(num_tokens).integers(0, 2**32, num_tokens, dtype=np.uint32)
    for _ in range(20):
        fields = random_fields(rng)
        request = PromptRequest("AllocateRequest", tokens, **fields)
        expected = twin("AllocateRequest")(token_ids=column32(tokens), **fields)
        if rng.random() < 0.5:
            request.owner = expected.owner = rng.randbytes(24)
            for order in (request.order, expected.order):
                order.number, order.settled = 7, 3
        data = request.SerializeToString()
        method = METHODS["Allocate"]
        assert method.request.FromString(data) == method.request.FromString(
            expected.SerializeToString()
        )
        assert list(method.request.FromString(data).token_ids) == tokens.tolist()
        assert bytes(RequestReader(method).read(data).token_ids) == tokens.tobytes()
        assert request.whole() == expected


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        [5, 2**32 - 1],
        np.arange(100, dtype=np.uint32)[::7],
        np.arange(9, dtype=">u4"),
        np.arange(9, dtype=np.int64),
        np.arange(6, dtype=np.uint8),
    ],
    ids=["none", "a list", "every seventh", "big-endian", "int64", "uint8"],
)
def test_tokens_of_any_layout_arrive(tokens: Any) -> None:
    request = PromptRequest("LookupRequest", uint32_column(tokens, "token_ids"))
    sent = METHODS["Lookup"].request.FromString(request.SerializeToString())
    assert list(sent.token_ids) == list(tokens)


def test_a_lookup_and_an_explain_have_all_their_fields() -> None:
    keys = ExtraKeys(lora=Lora("adapter", "path"), cache_salt="salt")
    lookup = messages.lookup([1, 2, 3], keys, 4, FullHit.LAST_BLOCK, True)
    sent = METHODS["Lookup"].request.FromString(lookup.request.SerializeToString())
    assert list(sent.token_ids) == [1, 2, 3]
    assert sent.extra_keys.lora.path == "path"
    assert (sent.num_lookahead_tokens, sent.full_hit, sent.want_hashes) == (4, 2, True)
    explain = messages.explain([9], None, FullHit.LAST_TOKEN, CacheUse.NO_WRITE, "tenant")
    sent = METHODS["Explain"].request.FromString(explain.request.SerializeToString())
    assert (list(sent.token_ids), sent.cache_use, sent.tenant) == ([9], 3, "tenant")


def test_a_whole_message_has_a_copy_of_the_tokens() -> None:
    tokens = np.arange(5, dtype=np.uint32)
    request = PromptRequest("AllocateRequest", tokens)
    whole: Any = request.whole()
    tokens[:] = 0
    assert np.frombuffer(whole.token_ids, dtype="<u4").tolist() == [0, 1, 2, 3, 4]

"""A client that makes long calls without pause, for `bench rpc` to measure short ones beside it.

Run as `python -m prefixcache.bench.load TARGET lookup|prefill TOKENS`. It obeys single bytes on
standard input: `g` begins, `r` rests and prints how many calls there were, the end ends it. It runs
at a lower priority: see `fairness`.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable

import numpy as np

from prefixcache.bench.prompts import Prompts
from prefixcache.client import Client
from prefixcache.types import CacheUse

LOAD_NICENESS = 10
_TIMEOUT_S = 600.0
_QUERY_HEADS_A_KV_HEAD = 4
_STDIN = 0


def lookups(client: Client, num_tokens: int) -> Callable[[], object]:
    """A prompt that is cached whole, where clients may commit, so that all of it is walked."""
    token_ids = Prompts(num_tokens).next()
    if "commit" in client.server_info().capabilities:
        with client.sequence(token_ids) as sequence:
            sequence.commit(num_tokens - sequence.num_cached_tokens)
    return lambda: client.lookup(token_ids)


def prefills(client: Client, num_tokens: int) -> Callable[[], object]:
    """One layer of a prompt that nothing is cached of."""
    layout = client.server_info().layout
    assert layout is not None
    token_ids = Prompts(num_tokens).next()
    random = np.random.default_rng(0)
    num_heads = layout.num_kv_heads * _QUERY_HEADS_A_KV_HEAD
    q = random.standard_normal((num_tokens, num_heads, layout.head_dim), dtype=np.float32)
    k = random.standard_normal((num_tokens, layout.num_kv_heads, layout.head_dim), dtype=np.float32)

    def prefill() -> None:
        with client.sequence(token_ids, cache_use=CacheUse.NONE) as sequence:
            sequence.prefill(0, q, k, k)

    return prefill


def obey(call: Callable[[], object]) -> None:
    """Until standard input ends."""
    while os.read(_STDIN, 1) == b"g":
        call()
        count = 1
        while not select.select([_STDIN], [], [], 0)[0]:
            call()
            count += 1
        if os.read(_STDIN, 1) != b"r":
            return
        print(count, flush=True)


if __name__ == "__main__":
    _target, _kind, _tokens = sys.argv[1:]
    os.nice(LOAD_NICENESS)
    with Client(_target, timeout_s=_TIMEOUT_S) as _client:
        obey({"lookup": lookups, "prefill": prefills}[_kind](_client, int(_tokens)))

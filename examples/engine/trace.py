"""Prompts of a trace, and how many of their tokens are unique.

The trace is AIBrix' workload of shared prefixes: text prompts, 10 prefixes of about 1,000 tokens
with 32 requests each (https://github.com/vllm-project/aibrix, benchmarks, Apache-2.0).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

_SAME_PREFIX = 200
"""Characters by which prompts of one prefix are told."""


def read_prompts(path: Path, num_prefixes: int, num_each: int) -> list[str]:
    """In the order of the trace, the first `num_each` of each of the first prefixes."""
    prompts = []
    seen: Counter[str] = Counter()
    for line in path.read_text("utf-8").splitlines():
        for request in json.loads(line)["requests"]:
            prompt = request["prompt"]
            prefix = prompt[:_SAME_PREFIX]
            if prefix not in seen and len(seen) == num_prefixes:
                continue
            seen[prefix] += 1
            if seen[prefix] <= num_each:
                prompts.append(prompt)
    return prompts


def num_unique_tokens(prompts: Sequence[Sequence[int]], block_size: int) -> int:
    """Tokens that a cache of full blocks computes at least, if it never evicts.

    A block counts once for each chain of blocks before it, the tokens after the last full block
    each time. With a block size of 1: the different prefixes of all prompts.
    """
    known: set[int] = set()
    count = 0
    for prompt in prompts:
        chain = 0
        num_full = len(prompt) // block_size
        for block in range(num_full):
            chain = hash((chain, tuple(prompt[block * block_size : (block + 1) * block_size])))
            count += block_size * (chain not in known)
            known.add(chain)
        count += len(prompt) - num_full * block_size
    return count

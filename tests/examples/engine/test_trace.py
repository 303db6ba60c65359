"""Which prompts of a trace are asked, and how many of their tokens are unique."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.engine.trace import num_unique_tokens, read_prompts


@pytest.mark.parametrize(
    ("prompts", "block_size", "unique"),
    [
        ([], 4, 0),
        ([[1, 2, 3]], 4, 3),
        ([[1, 2, 3], [1, 2, 3]], 4, 6),
        ([[1, 2, 3], [1, 2, 3]], 1, 3),
        ([[1, 2, 3, 4], [1, 2, 3, 4]], 4, 4),
        ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], 4, 6),
        ([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], 1, 6),
        ([[1, 2, 3, 4], [0, 0, 0, 0, 1, 2, 3, 4]], 4, 12),  # a block counts with those before it
        ([[1, 2, 1, 2]], 2, 4),
    ],
)
def test_unique_tokens(prompts: list[list[int]], block_size: int, unique: int) -> None:
    assert num_unique_tokens(prompts, block_size) == unique


def test_the_first_prompts_of_each_prefix_are_read_in_order(tmp_path: Path) -> None:
    prefixes = ["a" * 300, "b" * 300, "c" * 300]
    prompts = [f"{prefix} {number}" for prefix in prefixes for number in range(3)]
    path = tmp_path / "trace.jsonl"
    lines = [json.dumps({"timestamp": 0, "requests": [{"prompt": prompt}]}) for prompt in prompts]
    path.write_text("\n".join(lines))
    assert read_prompts(path, num_prefixes=2, num_each=2) == [*prompts[:2], *prompts[3:5]]

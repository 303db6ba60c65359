"""Small traces of random prompts that share prefixes, as files of the format."""

from __future__ import annotations

import json
import random
from pathlib import Path

from prefixcache.replay import Trace, read_trace

Record = dict[str, object]


def random_records(seed: int, num_requests: int, trace_block: int, num_branches: int = 2) -> list:
    """Prompts of 1 to 7 trace blocks: full repeats, exact block multiples, partial tails with and
    without an id, prompts shorter than a block.
    """
    rng = random.Random(seed)
    records: list[Record] = []
    for index in range(num_requests):
        num_tokens = rng.choice((rng.randint(1, 7 * trace_block), rng.randint(1, 7) * trace_block))
        has_tail_id = rng.random() < 0.5
        num_ids = -(-num_tokens // trace_block) if has_tail_id else num_tokens // trace_block
        ids = [rng.randrange(num_branches) for _ in range(num_ids)]
        records.append({"timestamp": 100 * index, "input_length": num_tokens, "hash_ids": ids})
    return records


def trace_of(folder: Path, records: list, trace_block: int) -> Trace:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return read_trace(path, trace_block)

"""Make the cuts of the public traces in this folder, with the oracle's counts and tokens.

    python tests/data/traces/make.py ../shared/traces

The folder given holds the whole traces and oracle.py. `README.md` says where they come from.
Lines are taken over unchanged, in their order; requests that are long or share nothing are left
out, so that the tests take seconds and still have hits.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
TRACE_BLOCKS = {"edge_4": 4, "mooncake_conversation": 512, "mooncake_synthetic": 512,
                "agentic_64": 64}  # fmt: skip
RUNS = [
    ("edge_4", 4, "5,10,30,100,400,inf"),
    ("edge_4", 2, "10,60,200,inf"),
    ("edge_4", 1, "20,120,400,inf"),
    ("mooncake_conversation", 512, "10,20,60,100,200,500,inf"),
    ("mooncake_conversation", 16, "320,2000,6400,inf"),
    ("mooncake_synthetic", 512, "20,30,60,100,200,500,inf"),
    ("mooncake_synthetic", 16, "640,2000,6400,inf"),
    ("agentic_64", 64, "200,300,1000,3000,inf"),
    ("agentic_64", 16, "1200,4000,12000,inf"),
]


def cut(name: str, lines: list[str]) -> list[str]:
    if name == "edge_4":
        return lines[:600]
    if name == "agentic_64":
        return at_most(30_000, lines)[:80]
    if name == "mooncake_conversation":
        return with_shared_start(at_most(10_000, lines))[:120]
    return with_shared_start(at_most(20_000, lines))[:100]


def at_most(num_tokens: int, lines: list[str]) -> list[str]:
    return [line for line in lines if json.loads(line)["input_length"] <= num_tokens]


def with_shared_start(lines: list[str]) -> list[str]:
    """Requests of three blocks and more that share their first two blocks with another one."""
    starts = [tuple(json.loads(line)["hash_ids"][:3]) for line in lines]
    count = Counter(start[:2] for start in starts if len(start) == 3)
    return [line for line, start in zip(lines, starts, strict=True) if count[start[:2]] > 1]


def main(traces: Path) -> None:
    for name in TRACE_BLOCKS:
        lines = (traces / f"{name}.jsonl").read_text().splitlines(keepends=True)
        (HERE / f"{name}.jsonl").write_text("".join(cut(name, lines)))
    rows = []
    for name, block_size, pools in RUNS:
        command = [sys.executable, str(traces / "oracle.py"), str(HERE / f"{name}.jsonl"),
                   "--trace-block", str(TRACE_BLOCKS[name]), "--block-size", str(block_size),
                   "--preset", "radix", "--pool", pools]  # fmt: skip
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        head = {"trace": name, "trace_block": TRACE_BLOCKS[name]}
        rows += [json.dumps(head | json.loads(line)) + "\n" for line in output.splitlines()]
    (HERE / "expected.jsonl").write_text("".join(rows))
    command = [sys.executable, str(traces / "oracle.py"), str(HERE / "edge_4.jsonl"),
               "--trace-block", "4", "--tokens", "40"]  # fmt: skip
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (HERE / "edge_4_tokens.jsonl").write_text(output)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

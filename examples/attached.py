"""Two processes on one pool, without copies: one writes K/V and commits, the other reads them.

    python -m examples.attached --storage cuda

Starts a daemon, whose pool is on the GPU or, with `--storage cpu`, in shared memory. The first
process maps it, computes a prompt's K/V into its own blocks and commits. The second, a program of
its own, finds the prompt, attends over the first one's blocks, and compares with what the daemon
computes. On a GPU the memory comes by a CUDA IPC handle, and a commit says that the writes are
done: each call of a view waits for its stream.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from examples.daemon import start_daemon
from prefixcache import Client, attach

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 8, 2, 64
PROMPT = range(1000, 3048)


def new_tokens(num_tokens: int, layer: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """q, k and v of one layer: the same in both processes."""
    generator = torch.Generator().manual_seed(1000 * layer + num_tokens)
    return tuple(
        torch.randn(num_tokens, heads, HEAD_DIM, generator=generator).bfloat16().to(device)
        for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )


def write(target: str) -> None:
    with Client(target) as client, attach(client) as view, client.sequence(PROMPT) as sequence:
        for layer in range(NUM_LAYERS):
            q, k, v = new_tokens(len(PROMPT), layer, view.device)
            view.prefill(layer, [sequence], [len(PROMPT)], q, k, v)
        cached = sequence.commit(len(PROMPT)).num_cached_blocks
        print(f"wrote {len(PROMPT)} tokens on {view.device}: {cached} blocks can be found")
        subprocess.run([sys.executable, "-m", "examples.attached", "--read", target], check=True)


def read(target: str) -> None:
    with Client(target) as client, attach(client, writable=False) as view:
        here, there = client.sequence(PROMPT), client.sequence(PROMPT)
        print(f"another process finds {here.num_cached_tokens} of its {len(PROMPT)} tokens")
        for layer in range(NUM_LAYERS):
            q, k, v = new_tokens(1, layer, view.device)
            started_s = time.perf_counter()
            out = view.decode(layer, [here], q, k, v)
            view_s = time.perf_counter() - started_s
            expected = there.decode(layer, q, k, v)
            rpc_s = time.perf_counter() - started_s - view_s
            if not torch.equal(out, expected):
                sys.exit(f"layer {layer}: the view's output is not the daemon's")
            print(f"layer {layer}: equal; {1e3 * view_s:.2f} ms here, {1e3 * rpc_s:.2f} ms by RPC")


def main() -> None:
    parser = argparse.ArgumentParser(description="two processes on one pool")
    parser.add_argument("--storage", choices=("cpu", "cuda"), default="cpu", help="of the daemon")
    parser.add_argument("--read", metavar="TARGET", help="be the second process")
    arguments = parser.parse_args()
    if arguments.read:
        read(arguments.read)
        return
    options = {
        "--storage": arguments.storage,
        "--num-blocks": "256",
        "--num-layers": str(NUM_LAYERS),
        "--num-kv-heads": str(NUM_KV_HEADS),
        "--head-dim": str(HEAD_DIM),
        "--dtype": "bfloat16",
    }
    with tempfile.TemporaryDirectory() as folder, start_daemon(Path(folder), options) as target:
        write(target)


if __name__ == "__main__":
    main()

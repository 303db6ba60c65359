"""The real model through the Triton kernels, in Triton's interpreter: no GPU is needed, nor fast.

Starts a daemon whose attention runs the kernels in Python, on the CPU, asks it a short question,
and compares tokens and logits with the model as transformers runs it. float32 only: the interpreter
gets bfloat16 wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch

import plain
import smollm2
from daemon import start_daemon
from prefixcache.client import Client
from prefixcache.integrations.transformers import CachedModel, Row

QUESTION = "What is the capital of France?"
MAX_LOGIT_DIFFERENCE = 1e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--answer-tokens", type=int, default=4, help="tokens of the answer")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    smol = smollm2.load()
    prompt = smol.question(QUESTION)
    started = time.perf_counter()
    answer, logits = ask(smol, prompt, arguments.answer_tokens)
    seconds = time.perf_counter() - started
    result = plain.PlainModel(smol.model).compare(prompt, answer, torch.stack(logits))
    print(f"{QUESTION}\n{smol.text(answer)}")
    print(
        f"{len(prompt)} + {len(answer)} tokens through the kernels in {seconds:.0f} s; "
        f"logits differ by {result.largest_difference:.1e} at most, "
        f"the closest choice of a token had a margin of {result.smallest_margin:.1e}"
    )
    is_right = result.tokens_equal and result.largest_difference <= MAX_LOGIT_DIFFERENCE
    print("same answer as without a cache" if is_right else "FAILED: another answer")
    return 0 if is_right else 1


def ask(
    smol: smollm2.SmolLM2, prompt: list[int], answer_tokens: int
) -> tuple[list[int], list[torch.Tensor]]:
    """The answer, greedily, and the logits of each of its tokens."""
    with tempfile.TemporaryDirectory(prefix="prefixcache-kernels-") as name:
        folder = Path(name)
        options = {**smollm2.serve_options(smol.model), "--num-blocks": "16"}
        # The daemon inherits it; this process has no kernels.
        os.environ["TRITON_INTERPRET"] = "1"
        with start_daemon(folder, options) as target, Client(target) as client:
            model = CachedModel(smol.model, client)
            with client.sequence(prompt) as sequence:
                logits = [model.forward([Row(sequence, prompt)])[0]]
                answer = [int(logits[0].argmax())]
                while len(answer) < answer_tokens:
                    sequence.append(answer[-1:])
                    logits.append(model.forward([Row(sequence, answer[-1:])])[0])
                    answer.append(int(logits[-1].argmax()))
    return answer, logits


if __name__ == "__main__":
    sys.exit(main())

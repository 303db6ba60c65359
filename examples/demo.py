"""A real model on the daemon: shared prompts, a conversation, one decode batch, equal tokens.

    python examples/demo.py

Starts a daemon (or takes the one of --target), puts SmolLM2 on it (CachedModel of
prefixcache.integrations.transformers), asks eight questions that share a system prompt of about
2,000 tokens and then two more in one of the conversations. Does so twice: attached, where the
daemon's pool is mapped and attention runs here, and by RPC, where the daemon computes it. Prints
what was cached and what that saved, and compares every answer with the model run without any cache.
The exit code is 1 if a token differs, if a shared prefix was not found, or if finding it saved too
little time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

import plain
import smollm2
import workload
from daemon import start_daemon
from prefixcache.attached import attach
from prefixcache.client import Client, PoolStats, Sequence
from prefixcache.integrations.transformers import CachedModel, Row
from prefixcache.types import CacheUse, ResultCode
from smollm2 import SmolLM2

MODES = {
    "attached": "attached: K/V and attention in this process",
    "rpc": "by RPC: K/V and attention in the daemon",
}
MIN_CACHED_SHARE = 0.95
"""Of a prefix that was computed before."""
MAX_WARM_TO_COLD = 1 / 5
"""Time to first token."""
MAX_LOGIT_DIFFERENCE = 1e-3
"""Chunked and whole prefill add up in another order: about 1e-4 in float32."""


@dataclass(slots=True)
class Turn:
    """A prompt, what the daemon said about it, and the answer as it grows."""

    name: str
    sequence: Sequence
    prompt: list[int]
    num_cached: int
    num_shared: int
    """Leading tokens that were computed before, by this or another request; 0 for the first."""
    first_token_s: float = 0.0
    answer: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    """For each token of the answer the logits it was chosen by, [vocabulary]."""

    def take(self, logits: torch.Tensor) -> None:
        """Choose the next token of the answer, greedily."""
        self.answer.append(int(logits.argmax()))
        self.logits.append(logits)

    @property
    def row(self) -> Row:
        """What is left to compute."""
        tokens = self.prompt + self.answer
        return Row(self.sequence, tokens[self.sequence.num_computed_tokens :])


class NotAppendedError(Exception):
    """The daemon refused the next tokens of a sequence, most likely for want of free blocks."""


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Times to the first token of an answer: of the first prompt, and the median of the others."""

    cold_s: float
    warm_s: float

    def __str__(self) -> str:
        ratio = self.cold_s / self.warm_s
        return f"cold {self.cold_s:.3f} s, warm {self.warm_s:.3f} s (median), ratio 1/{ratio:.0f}"


def main() -> int:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    smol = smollm2.load()
    failures: list[str] = []
    turns: dict[str, list[Turn]] = {}
    times: dict[str, FirstTokens] = {}
    for mode in modes(arguments):
        with daemon(smol, arguments) as target, Client(target) as client:
            print(f"\n{MODES[mode]}, daemon at {target}\n")
            turns[mode] = run_mode(smol, client, mode, arguments.answer_tokens)
            stats = client.stats()
        print_turns(smol, turns[mode])
        print_stats(stats)
        times[mode] = first_tokens(turns[mode])
        failures += check_cache(mode, turns[mode])
    failures += check_answers(smol.model, turns)
    for mode, seconds in times.items():
        print(f"time to first token, {mode + ':':<9} {seconds}")
    for failure in failures:
        print(f"FAILED: {failure}")
    if not failures:
        print("\nall checks passed")
    return 1 if failures else 0


def modes(arguments: argparse.Namespace) -> list[str]:
    """Both with daemons of its own; one with a daemon that was named, and is warm after it."""
    if arguments.target is None:
        return list(MODES)
    return ["attached" if arguments.target.startswith("unix:") else "rpc"]


@contextmanager
def daemon(smol: SmolLM2, arguments: argparse.Namespace) -> Iterator[str]:
    """The address of a daemon for the model: the one that was named, or its own."""
    if arguments.target is not None:
        yield arguments.target
        return
    with tempfile.TemporaryDirectory(prefix="prefixcache-demo-") as name:
        options = {
            **smollm2.serve_options(smol.model),
            "--num-blocks": str(arguments.num_blocks),
            "--threads": str(arguments.threads),
        }
        with start_daemon(Path(name), options) as target:
            yield target


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--target",
        help="a daemon that runs already, with an empty cache: attached to on a Unix socket, else "
        "asked by RPC; left out, one is started for each",
    )
    parser.add_argument("--answer-tokens", type=int, default=32, help="tokens of each answer")
    parser.add_argument(
        "--num-blocks", type=int, default=256, help="blocks of its own daemon's pool"
    )
    # More threads than idle cores wait for each other, and that costs far more than they bring.
    parser.add_argument("--threads", type=int, default=1, help="of the model and of the daemon")
    return parser.parse_args()


def run_mode(smol: SmolLM2, client: Client, mode: str, answer_tokens: int) -> list[Turn]:
    if mode == "rpc":
        return run_workload(smol, CachedModel(smol.model, client), client, answer_tokens)
    with attach(client) as view:
        model = CachedModel(smol.model, client, view=view)
        return run_workload(smol, model, client, answer_tokens)


def run_workload(
    smol: SmolLM2, model: CachedModel, client: Client, answer_tokens: int
) -> list[Turn]:
    """Eight questions in one batch, then the first visitor's second and third question."""
    system = smol.message("system", workload.system_prompt())
    warm_up(model, client, system)
    visitors = []
    for i, text in enumerate(workload.QUESTIONS, start=1):
        prompt, num_shared = system + smol.question(text), len(system) if i > 1 else 0
        visitors.append(ask(model, client, f"question {i}", prompt, num_shared))
    generate(model, client, visitors, answer_tokens)
    first, *others = visitors
    client.free([turn.sequence for turn in others])

    # An engine that keeps the sequence open appends to it.
    second = go_on(model, "second turn", first, smol.follow_up(workload.SECOND_QUESTION))
    generate(model, client, [second], answer_tokens)
    num_computed = second.sequence.num_computed_tokens
    second.sequence.free()

    # One that does not sends the whole conversation as a new prompt, and most of it is cached.
    conversation = second.prompt + second.answer + smol.follow_up(workload.THIRD_QUESTION)
    third = ask(model, client, "third turn", conversation, num_computed)
    generate(model, client, [third], answer_tokens)
    third.sequence.free()
    return [*visitors, second, third]


def warm_up(model: CachedModel, client: Client, system: list[int]) -> None:
    """Let both processes load their kernels, so that the cold prompt is not blamed for it.

    Leaves nothing in the cache and in its hit rate.
    """
    with client.sequence(system[:64], cache_use=CacheUse.NONE) as sequence:
        model.forward([Row(sequence, system[:64])])


def ask(model: CachedModel, client: Client, name: str, prompt: list[int], num_shared: int) -> Turn:
    """Send a new prompt and wait for the first token of the answer."""
    started = time.perf_counter()
    sequence = client.sequence(prompt)
    turn = Turn(name, sequence, prompt, sequence.num_cached_tokens, num_shared)
    answer_first(model, turn, started)
    return turn


def go_on(model: CachedModel, name: str, before: Turn, follow_up: list[int]) -> Turn:
    """Append to the open sequence of a turn: the last token of its answer, and a new question."""
    started = time.perf_counter()
    sequence = before.sequence
    num_computed = sequence.num_computed_tokens
    sequence.append(before.answer[-1:] + follow_up)
    prompt = before.prompt + before.answer + follow_up
    turn = Turn(name, sequence, prompt, num_computed, num_computed)
    answer_first(model, turn, started)
    return turn


def answer_first(model: CachedModel, turn: Turn, started: float) -> None:
    logits = model.forward([turn.row])[0]
    turn.first_token_s = time.perf_counter() - started
    turn.take(logits)


def generate(model: CachedModel, client: Client, turns: list[Turn], answer_tokens: int) -> None:
    """Decode all answers greedily as one batch: one Append a step, one Decode a layer."""
    for _ in range(answer_tokens - 1):
        results = client.append(
            [turn.sequence for turn in turns], [turn.answer[-1:] for turn in turns]
        )
        for turn, result in zip(turns, results, strict=True):
            if result.code is not ResultCode.OK:
                raise NotAppendedError(f"{turn.sequence!r}: {result.code.name}")
        logits = model.forward([turn.row for turn in turns])
        for turn, row in zip(turns, logits, strict=True):
            turn.take(row)


def print_turns(smol: SmolLM2, turns: list[Turn]) -> None:
    print(f"{'request':<12} {'prompt':>7} {'cached':>7} {'first token':>12}   answer")
    for turn in turns:
        text = " ".join(smol.text(turn.answer).split())
        print(
            f"{turn.name:<12} {len(turn.prompt):>7} {turn.num_cached:>7} "
            f"{turn.first_token_s:>10.3f} s   {text[:48]}"
        )


def print_stats(stats: PoolStats) -> None:
    print(
        f"\nhit rate {stats.hit_rate:.1%} ({stats.hit_tokens} of {stats.queries_tokens} prompt "
        f"tokens), evictions {stats.evictions}"
    )


def first_tokens(turns: list[Turn]) -> FirstTokens:
    cold, *warm = turns
    return FirstTokens(cold.first_token_s, statistics.median(turn.first_token_s for turn in warm))


def check_cache(mode: str, turns: list[Turn]) -> list[str]:
    """Were the shared prefixes found, and did that save the time it should?"""
    cold, *warm = turns
    failures = [
        f"{mode}, {turn.name}: {turn.num_cached} tokens cached of {turn.num_shared} that were "
        f"computed"
        for turn in warm
        if turn.num_cached < MIN_CACHED_SHARE * turn.num_shared
    ]
    # Other work on the machine may have held up all but the fastest.
    fastest_s = min(turn.first_token_s for turn in warm)
    if fastest_s > MAX_WARM_TO_COLD * cold.first_token_s:
        failures.append(f"{mode}: a warm prompt saves too little time to its first token")
    return failures


def check_answers(model: PreTrainedModel, turns: dict[str, list[Turn]]) -> list[str]:
    """Does the model without any cache give the same answers?"""
    failures = []
    comparisons: dict[str, list[plain.Comparison]] = {mode: [] for mode in turns}
    plain_model = plain.PlainModel(model)
    num_turns = len(next(iter(turns.values())))
    with smollm2.progress(f"\nthe same {num_turns} prompts without any cache"):
        for mode, turn in [(mode, turn) for mode, all_of_it in turns.items() for turn in all_of_it]:
            result = plain_model.compare(turn.prompt, turn.answer, torch.stack(turn.logits))
            comparisons[mode].append(result)
            if not result.tokens_equal:
                failures.append(f"{mode}, {turn.name}: other tokens than without a cache")
            if result.largest_difference > MAX_LOGIT_DIFFERENCE:
                failures.append(
                    f"{mode}, {turn.name}: logits differ by {result.largest_difference:.1e}"
                )
    for mode, results in comparisons.items():
        num_equal = sum(result.tokens_equal for result in results)
        difference = max(result.largest_difference for result in results)
        margin = min(result.smallest_margin for result in results)
        print(
            f"{mode + ':':<9} {num_equal} of {len(results)} answers equal; logits differ by "
            f"{difference:.1e} at most, the closest choice of a token had a margin of {margin:.1e}"
        )
    return failures


if __name__ == "__main__":
    sys.exit(main())

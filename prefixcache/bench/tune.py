"""`bench attention --tune`: other tiles for each rule of the kernels' table, timed on the card.

For each rule a call that reaches it, and every tile size around the rule's own that the card has
room for. What comes out are lines for `prefixcache.attention.selection`; nothing is changed here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product

import torch

from prefixcache.attention.batch import AttentionBatch, make_batch
from prefixcache.attention.device_batch import upload
from prefixcache.attention.paged_attention import launch
from prefixcache.attention.selection import (
    LATENT_TABLES,
    TABLES,
    Rule,
    Shapes,
    Tiles,
    architecture_of,
    num_cores,
    plan_with,
)
from prefixcache.bench.attention import make_laps
from prefixcache.bench.attention_cases import Heads, Pool
from prefixcache.bench.machine import machine_facts
from prefixcache.bench.measure import Laps, OnRound, Progress, Rounds, run_rounds
from prefixcache.bench.report import Ratio, Report, Row
from prefixcache.storage.layout import LatentLayout, Layout, Quantization
from prefixcache.storage.pool_views import DTYPES
from prefixcache.types import AttentionOptions, BlockIds

_ROUNDS = Rounds(fewest=5, most=30, budget_s=10.0)
_LARGE_HEAD_DIM, _LARGE_LATENT_DIM = 512, 1024
_LATENT_HEADS, _ROPE_DIM = 128, 64
_DECODE_GROUP, _DRAFT_GROUP = 4, 8
_DECODE_ROWS = 16


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """sequences, context: of calls that decode. new, cached: tokens of a prompt.

    keys, num_warps, num_stages: the values that are tried, each with each.
    """

    device: str = "cuda"
    num_kv_heads: int = 8
    block_size: int = 16
    sequences: int = 64
    context: int = 8192
    new: int = 4096
    cached: int = 4096
    keys: tuple[int, ...] = (16, 32, 64, 128)
    num_warps: tuple[int, ...] = (4, 8)
    num_stages: tuple[int, ...] = (2, 3, 5)  # 4 gives the code of 3: the block table takes a stage
    rounds: Rounds = _ROUNDS


@dataclass(frozen=True, slots=True)
class Workload:
    """A call that reaches a rule: `new` tokens of each sequence, on top of `cached` ones.

    group: query heads of a KV head; of latents, which are one KV head, all of them.
    """

    layout: Layout
    group: int
    sequences: int
    new: int
    cached: int

    @property
    def shapes(self) -> Shapes:
        layout = self.layout
        return Shapes(
            num_tokens=self.sequences * self.new,
            num_sequences=self.sequences,
            longest_query=self.new,
            max_seq_len=-(-(self.new + self.cached) // layout.block_size) * layout.block_size,
            num_query_heads=layout.num_kv_heads * self.group,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.value_dim,
            dtype=getattr(torch, layout.dtype),
            stored=DTYPES[layout.stored_dtype],
            is_latent=isinstance(layout, LatentLayout),
        )


def workload_of(rule: Rule, settings: TuneSettings, *, is_latent: bool = False) -> Workload:
    """The largest call that the rule's limits allow: its head dim, its rows, its types."""
    dtype = "float32" if rule.max_element_bytes == 4 else "bfloat16"
    if is_latent:
        dim = rule.max_head_dim or _LARGE_LATENT_DIM
        latent = LatentLayout(1, dim, _ROPE_DIM, settings.block_size, dtype)
        heads = rule.max_rows or _LATENT_HEADS
        return Workload(latent, heads, settings.sequences, 1, settings.context - 1)
    layout = Heads(
        settings.num_kv_heads, 1, rule.max_head_dim or _LARGE_HEAD_DIM, settings.block_size
    ).layout(dtype, Quantization("float8_e4m3") if rule.max_stored_bytes == 1 else None)
    if rule.max_rows is None:
        return Workload(layout, _DECODE_GROUP, 1, settings.new, settings.cached)
    if rule.max_rows == _DECODE_ROWS:
        return Workload(layout, _DECODE_GROUP, settings.sequences, 1, settings.context - 1)
    drafts = rule.max_rows // _DRAFT_GROUP
    return Workload(layout, _DRAFT_GROUP, settings.sequences, drafts, settings.context - drafts)


def tiles_to_try(rule: Rule, settings: TuneSettings) -> list[Tiles]:
    """The rule's own first."""
    if rule.max_rows is None:
        rows: tuple[int, ...] = (rule.tiles.rows // 2, rule.tiles.rows, rule.tiles.rows * 2)
    else:
        rows = (rule.tiles.rows // 2, rule.tiles.rows)
    rows = tuple(count for count in rows if count >= _DECODE_ROWS)
    others = product(rows, settings.keys, settings.num_warps, settings.num_stages)
    return list(dict.fromkeys((rule.tiles, *(Tiles(*each) for each in others))))


def tune(settings: TuneSettings, progress: Progress) -> Report:
    """Time them all. The notes are the table with the fastest tiles."""
    start = time.perf_counter()
    rows: list[Row] = []
    notes = ["The tables with the fastest tiles of this card:"]
    architecture = architecture_of(torch.device(settings.device))
    for name, tables in (("TABLES", TABLES), ("LATENT_TABLES", LATENT_TABLES)):
        notes.append(f"{name}[{architecture!r}]")
        for index, rule in enumerate(tables[architecture], start=1):
            workload = workload_of(rule, settings, is_latent=tables is LATENT_TABLES)
            on_round = partial(progress, f"{name}, rule {index}")
            of_rule = list(_tune_rule(name, rule, workload, settings, on_round))
            rows += of_rule
            notes.append(_line(rule, of_rule))
    return Report(
        bench="attention --tune",
        machine=machine_facts(),
        settings=asdict(settings),
        rows=tuple(rows),
        notes=tuple(notes),
        seconds=time.perf_counter() - start,
    )


def _tune_rule(
    table: str, rule: Rule, workload: Workload, settings: TuneSettings, on_round: OnRound
) -> Iterator[Row]:
    """Rows of all tiles that run, fastest first."""
    call = Call(workload, settings.device)
    laps: Laps[Tiles] = make_laps(settings.device)
    fits = [tiles for tiles in tiles_to_try(rule, settings) if call.runs_with(tiles)]
    run_rounds(
        [partial(call.time, laps, tiles) for tiles in fits],
        settings.rounds,
        warmed_up=laps.clear,
        on_round=on_round,
    )
    present = laps.summary(rule.tiles).median
    for tiles in sorted(fits, key=lambda each: laps.summary(each).median):
        summary = laps.summary(tiles)
        yield Row(
            section=f"{table}: {limits_text(rule)}; now {tiles_text(rule.tiles)}",
            name=tiles_text(tiles),
            summary=summary,
            labels=asdict(tiles),
            ratios=(Ratio("the present tiles", summary.median / present),),
        )


class Call:
    """A workload's tensors on the device, and launches on them."""

    def __init__(self, workload: Workload, device: str) -> None:
        self._shapes, layout = workload.shapes, workload.layout
        length = workload.new + workload.cached
        blocks = workload.sequences * -(-length // layout.block_size)
        pool = Pool(layout, workload.group, blocks, device)
        self._cache = pool.cache
        self._options = AttentionOptions(scale=layout.head_dim**-0.5)
        tables = [pool.take(length) for _ in range(workload.sequences)]
        self._q = pool.queries(workload.sequences * workload.new)
        self._out = self._q.new_empty(*self._q.shape[:2], layout.value_dim)
        self._cores = num_cores(self._q.device)
        self._batch = upload(_batch(workload, tables), self._q.device)

    def launch(self, tiles: Tiles) -> torch.Tensor:
        plan = plan_with(tiles, self._shapes, self._cores)
        launch(self._q, self._cache, self._batch, self._options, plan, self._out)
        return self._out

    def time(self, laps: Laps[Tiles], tiles: Tiles) -> None:
        laps.time(tiles, partial(self.launch, tiles))

    def runs_with(self, tiles: Tiles) -> bool:
        """False for tiles that the card has too few registers or too little shared memory for."""
        from triton.runtime.errors import OutOfResources, PTXASError

        try:
            self.launch(tiles)
        except (OutOfResources, PTXASError):
            return False
        return True


def _batch(workload: Workload, tables: list[BlockIds]) -> AttentionBatch:
    count = workload.sequences
    return make_batch(
        tables,
        [workload.cached] * count,
        [workload.new] * count,
        [0] * count,
        workload.layout.block_size,
    )


def limits_text(rule: Rule) -> str:
    """What calls the rule is for."""
    limits = (
        ("rows", rule.max_rows),
        ("head dim", rule.max_head_dim),
        ("bytes an element", rule.max_element_bytes),
        ("bytes stored", rule.max_stored_bytes),
    )
    known = [f"{name} <= {limit}" for name, limit in limits if limit is not None]
    return ", ".join(known) or "all others"


def tiles_text(tiles: Tiles) -> str:
    """As the table has them."""
    return f"Tiles({tiles.rows}, {tiles.keys}, {tiles.num_warps}, {tiles.num_stages})"


def _line(rule: Rule, rows: list[Row]) -> str:
    """The rule as the source has it, with the fastest tiles, and what was timed as its reason."""
    limits = f"{rule.max_rows}, {rule.max_head_dim}, {rule.max_element_bytes}"
    stored = "" if rule.max_stored_bytes is None else f", {rule.max_stored_bytes}"
    best, gain = rows[0], 1 / rows[0].ratios[0].value
    reason = f"timed: {best.summary.median * 1e6:.0f} us, {gain:.2f}x as fast as"
    return f'Rule({limits}, {best.name}, "{reason} {tiles_text(rule.tiles)}"{stored}),'

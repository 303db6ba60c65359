"""Attention of some tokens of one sequence whose K/V are streamed in tiles: every option.

Softmax is computed as the tiles come, by a running maximum and sum (Milakov and Gimelshein, arXiv
1805.02867), so that memory does not grow with the context. The query heads that share a KV head
are rows of one matrix product, so that K/V are read once per group. All arithmetic is float32:
bfloat16 products are many times slower on CPUs without instructions for them, and less exact.

Threads: pure but for reading the cache.
"""

from __future__ import annotations

import copy

import numpy as np
import numpy.typing as npt
import torch

from prefixcache.attention.sequence_kv import KVReader, KVTile
from prefixcache.storage.kv_cache import KVCache
from prefixcache.types import AttentionOptions

TILE_ELEMENTS = 2**20
"""Of a K or V tile: 4 MiB in float32."""
MAX_SCORES = 2**22
"""Scores, heads x new tokens x tokens of a tile, that are held at a time: 16 MiB."""


def tile_blocks(cache: KVCache, num_query_heads: int) -> int:
    """The blocks of a tile, at least one."""
    _, num_kv_heads, block_size, head_dim = cache.keys.shape
    tokens = min(TILE_ELEMENTS // (num_kv_heads * head_dim), MAX_SCORES // num_query_heads)
    return max(1, tokens // block_size)


def first_seen(position: int, window: int | None) -> int:
    """The first position that the query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


def attend_streaming(
    q: torch.Tensor,
    reader: KVReader,
    block_table: npt.NDArray[np.int32],
    seq_len: int,
    options: AttentionOptions,
    out: torch.Tensor,
) -> None:
    """The last T tokens of a sequence of `seq_len` tokens.

    q: `[T, Hq, D]`, out: `[T, Hq, Dv]`, both of any dtype.
    """
    num_tokens, num_query_heads = q.shape[:2]
    context = seq_len - num_tokens
    step = max(1, MAX_SCORES // (num_query_heads * reader.tile_tokens))
    for first in range(0, num_tokens, step):
        end = min(first + step, num_tokens)
        rows = RunningSoftmax(
            q[first:end], reader, np.arange(context + first, context + end), options
        )
        seen = first_seen(context + first, options.window)
        seen_by_all = first_seen(context + end - 1, options.window)
        for tile in reader.tiles(block_table, seen, context + end):
            all_see_it = tile.first >= seen_by_all and tile.end <= context + first + 1
            rows.take(tile, masked=not all_see_it)
        out[first:end] = rows.result()


class RunningSoftmax:
    """Attention of T queries over the tiles so far. Row t * G + g of a KV head is query t's head g.

    With R = T * G, `maximum` and `total` are `[Hkv, R, 1]`, `weighted` is `[Hkv, R, Dv]`; nothing
    stands there before the first tile, unless a sink does, which is a score without a value.
    """

    def __init__(
        self,
        q: torch.Tensor,
        reader: KVReader,
        positions: npt.NDArray[np.int64],
        options: AttentionOptions,
    ) -> None:
        """q: `[T, Hq, D]` of any dtype; positions: `[T]`; reader: of the K/V to come."""
        self._options = options
        self._positions = positions
        num_tokens, num_query_heads, head_dim = q.shape
        self._num_kv_heads = reader.num_kv_heads
        self._value_dim = reader.value_dim
        self._group = num_query_heads // reader.num_kv_heads
        rows = q.view(num_tokens, reader.num_kv_heads, -1, head_dim).transpose(0, 1).float()
        rows = rows * options.scale_for(head_dim)
        self._queries = rows.reshape(reader.num_kv_heads, -1, head_dim)
        self._slopes = self._per_row(options.alibi_slopes) if options.alibi_slopes else None
        self._maximum: torch.Tensor | None = None
        if options.sinks:
            self._begin(self._per_row(options.sinks), 1.0)

    def _per_row(self, numbers: tuple[float, ...]) -> torch.Tensor:
        """A number of each query head, for each row: `[Hkv, R, 1]`."""
        column = self._queries.new_tensor(numbers).view(self._num_kv_heads, 1, self._group)
        return column.repeat(1, len(self._positions), 1).view(self._num_kv_heads, -1, 1)

    def _begin(self, maximum: torch.Tensor, total: float) -> None:
        self._maximum = maximum
        self._total = torch.full_like(maximum, total)
        self._weighted = maximum.new_zeros(*maximum.shape[:2], self._value_dim)

    def part(self, first: int, end: int) -> RunningSoftmax:
        """Queries [first, end), to take tiles that only they see: a view of this one's memory."""
        if self._maximum is None:
            self._begin(self._queries.new_full((*self._queries.shape[:2], 1), -torch.inf), 0.0)
        part = copy.copy(self)
        part._positions = self._positions[first:end]
        rows = slice(first * self._group, end * self._group)
        for name in ("_queries", "_slopes", "_maximum", "_total", "_weighted"):
            tensor = getattr(self, name)
            setattr(part, name, None if tensor is None else tensor[:, rows])
        return part

    def take(self, tile: KVTile, *, masked: bool) -> None:
        """All queries see the tile; masked: some of them only a part of it."""
        scores = torch.bmm(self._queries, tile.keys.transpose(1, 2))
        self._weigh(scores, tile, masked=masked)
        before, maximum = self._maximum, scores.amax(dim=2, keepdim=True)
        if before is not None:
            maximum = torch.maximum(before, maximum)
        weights = scores.sub_(maximum).exp_()
        total = weights.sum(dim=2, keepdim=True)
        if before is None:
            self._maximum, self._total = maximum, total
            self._weighted = torch.bmm(weights, tile.values)
        else:
            faded = before.sub(maximum).exp_()
            self._total.mul_(faded).add_(total)
            # Not baddbmm_, which takes a part's rows head by head.
            self._weighted.mul_(faded).add_(torch.bmm(weights, tile.values))
            before.copy_(maximum)

    def _weigh(self, scores: torch.Tensor, tile: KVTile, *, masked: bool) -> None:
        """Apply the options to the scores, in place."""
        options = self._options
        if options.soft_cap is not None:
            scores.div_(options.soft_cap).tanh_().mul_(options.soft_cap)
        if self._slopes is None and not masked:
            return
        positions = torch.from_numpy(self._positions.repeat(self._group))[:, None]
        keys = torch.arange(tile.first, tile.end, device=scores.device)
        distances = keys - positions.to(scores.device)
        if self._slopes is not None:
            scores.addcmul_(self._slopes, distances.float())
        if masked:
            hidden = distances > 0
            if options.window is not None:
                hidden |= distances <= -options.window
            # Finite, since a row may see nothing of its first tiles: what they leave fades to 0
            # when its own token comes.
            scores.masked_fill_(hidden, torch.finfo(scores.dtype).min)

    def result(self) -> torch.Tensor:
        """`[T, Hq, Dv] float32`."""
        out = (self._weighted / self._total).view(
            self._num_kv_heads, len(self._positions), self._group, -1
        )
        return out.transpose(0, 1).flatten(1, 2)

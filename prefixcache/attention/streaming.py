"""Attention of some tokens of one sequence whose K/V are streamed in tiles: every option.

Softmax is computed as the tiles come, by a running maximum and sum (Milakov and Gimelshein, arXiv
1805.02867), so that memory does not grow with the context. The query heads that share a KV head
are rows of one matrix product, so that K/V are read once per group. All arithmetic is float32:
bfloat16 products are many times slower on CPUs without instructions for them, and less exact.

Threads: pure but for reading the cache.
"""

from __future__ import annotations

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
        rows = _Rows(q[first:end], reader.num_kv_heads, context + first, options)
        seen = first_seen(rows.start, options.window)
        for tile in reader.tiles(block_table, seen, context + end):
            rows.take(tile)
        out[first:end] = rows.result()


class _Rows:
    """Running softmax of the queries of each KV head: row t * G + g is head g of token t.

    With R = T * G, `maximum` and `total` are `[Hkv, R, 1]`, `weighted` is `[Hkv, R, Dv]`.
    """

    def __init__(
        self, q: torch.Tensor, num_kv_heads: int, start: int, options: AttentionOptions
    ) -> None:
        self.start = start
        self._options = options
        num_tokens, num_query_heads, head_dim = q.shape
        self._shape = (num_kv_heads, num_tokens, num_query_heads // num_kv_heads)
        rows = q.view(num_tokens, num_kv_heads, -1, head_dim).transpose(0, 1).float()
        self._queries = (rows * options.scale_for(head_dim)).reshape(num_kv_heads, -1, head_dim)
        self._slopes = self._per_row(options.alibi_slopes) if options.alibi_slopes else None
        self._maximum: torch.Tensor | None = None

    def _per_row(self, numbers: tuple[float, ...]) -> torch.Tensor:
        """A number of each query head, for each row: `[Hkv, R, 1]`."""
        heads, num_tokens, group = self._shape
        column = self._queries.new_tensor(numbers).view(heads, 1, group)
        return column.repeat(1, num_tokens, 1).view(heads, -1, 1)

    def take(self, tile: KVTile) -> None:
        scores = torch.bmm(self._queries, tile.keys.transpose(1, 2))
        self._weigh(scores, tile.first)
        before, maximum = self._maximum, scores.amax(dim=2, keepdim=True)
        if before is None and self._options.sinks:
            before = self._per_row(self._options.sinks)
            self._total = torch.ones_like(before)
            self._weighted = before.new_zeros(*before.shape[:2], tile.values.shape[2])
        if before is not None:
            maximum = torch.maximum(before, maximum)
        weights = scores.sub_(maximum).exp_()
        total = weights.sum(dim=2, keepdim=True)
        if before is None:
            self._total, self._weighted = total, torch.bmm(weights, tile.values)
        else:
            faded = before.sub_(maximum).exp_()
            self._total.mul_(faded).add_(total)
            self._weighted.mul_(faded).baddbmm_(weights, tile.values)
        self._maximum = maximum

    def _weigh(self, scores: torch.Tensor, first: int) -> None:
        """Apply the options to the scores of the positions from `first` on, in place."""
        options = self._options
        _, num_tokens, group = self._shape
        if options.soft_cap is not None:
            scores.div_(options.soft_cap).tanh_().mul_(options.soft_cap)
        end = first + scores.shape[2]
        last = self.start + num_tokens - 1
        all_seen = end <= self.start + 1 and first >= first_seen(last, options.window)
        if all_seen and self._slopes is None:
            return
        positions = torch.arange(self.start, last + 1, device=scores.device)
        positions = positions.repeat_interleave(group)[:, None]
        distances = torch.arange(first, end, device=scores.device) - positions
        if self._slopes is not None:
            scores.addcmul_(self._slopes, distances.float())
        hidden = distances > 0
        if options.window is not None:
            hidden |= distances <= -options.window
        # Finite, since a row may see nothing of its first tiles: what they leave fades to 0 when
        # its own token comes.
        scores.masked_fill_(hidden, torch.finfo(scores.dtype).min)

    def result(self) -> torch.Tensor:
        """`[T, Hq, Dv] float32`."""
        heads, num_tokens, group = self._shape
        out = (self._weighted / self._total).view(heads, num_tokens, group, -1)
        return out.transpose(0, 1).reshape(num_tokens, heads * group, -1)

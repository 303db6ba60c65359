"""Attention on CPU by the compiled kernels of `native/`: any number of new tokens, every option.

`prefill` and `decode` come here where `device.uses_native` says so. Blocks that sequences share are
read once for all their queries. The GIL is let go meanwhile.

Threads: pure but for reading the cache; nobody may write those blocks meanwhile. A call uses as
many threads as torch would, from a pool that all calls share.
"""

from __future__ import annotations

import numpy as np
import torch

from prefixcache.attention.batch import AttentionBatch
from prefixcache.attention.checks import output_of
from prefixcache.attention.device import native_forms
from prefixcache.attention.selection import choose_shared_prefix
from prefixcache.storage.kv_cache import KVCache
from prefixcache.types import AttentionOptions


def native_attention(
    q: torch.Tensor,
    cache: KVCache,
    batch: AttentionBatch,
    options: AttentionOptions,
    form: str | None = None,
    *,
    in_background: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Checked arguments, and the result, as in `decode`.

    form: one of `native_forms()`; the best of them if left out. in_background: if it takes more
    than about 1 ms, threads of lower priority do it, so that short calls are delayed less.
    Raises MemoryError.
    """
    from prefixcache.attention.native.attention import attend

    out = output_of(q, cache, out)
    if len(q) > 0:
        attend(
            form or native_forms()[0],
            torch.get_num_threads(),
            q,
            cache,
            out,
            np.ascontiguousarray(batch.block_tables),
            np.ascontiguousarray(batch.query_start),
            np.ascontiguousarray(batch.seq_lens),
            choose_shared_prefix(cache, batch, options),
            options,
            in_background,
        )
    return out

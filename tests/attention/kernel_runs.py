"""`paged_attention` of a case with a plan that the test chooses."""

from __future__ import annotations

import torch

from prefixcache.attention.checks import check_attention
from prefixcache.attention.device_batch import upload
from prefixcache.attention.paged_attention import launch
from prefixcache.attention.selection import Plan, Tiles
from tests.attention.paged_cases import PagedCase


def run(
    case: PagedCase,
    *,
    rows: int = 16,
    keys: int = 16,
    num_splits: int = 1,
    group_part: int | None = None,
    min_split: int | None = None,
    checked: bool = True,
) -> torch.Tensor:
    """The kernel with the given plan, into memory full of NaN."""
    if checked:
        check_attention(case.q, case.cache, case.batch, case.options)
    plan = Plan(
        Tiles(rows, keys, num_warps=4, num_stages=1),
        group_part or case.q.shape[1] // case.cache.keys.shape[1],
        num_splits,
        min_split or keys,
    )
    out = case.q.new_full((*case.q.shape[:2], case.cache.values.shape[3]), torch.nan)
    launch(case.q, case.cache, upload(case.batch, case.q.device), case.options, plan, out)
    return out

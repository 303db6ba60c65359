"""After a replay through a daemon its metrics are GetStats' numbers and the oracle's."""

from __future__ import annotations

import pytest

from prefixcache.client import Client
from prefixcache.replay import Admission, DaemonTarget, replay_trace
from prefixcache.server.daemon import CacheOptions
from prefixcache.types import TokenIds
from tests.replay.cuts import (
    Row,
    assert_counts_equal,
    cut_trace,
    expected_rows,
    pool_size,
    row_name,
)
from tests.support.daemon import running_daemon
from tests.support.scrape import assert_agreement, scrape
from tests.support.stubs import connected

# Rejections, evictions, full hits, blocks of one token, and long prompts.
CASES = {"edge_4-4-30", "edge_4-1-20", "mooncake_conversation-512-60", "agentic_64-64-300"}
ROWS = [row for row in expected_rows() if row_name(row) in CASES]


class CountingTarget(DaemonTarget):
    """Also counts the prompts that were cached whole."""

    num_full_hits = 0

    def allocate(self, token_ids: TokenIds) -> Admission:
        admission = super().allocate(token_ids)
        is_whole = admission.num_hit_blocks * self.block_size == len(token_ids)
        self.num_full_hits += admission.is_admitted and is_whole
        return admission


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_blocks_are_the_oracles_and_tokens_but_for_the_one_that_each_full_hit_computes(
    row: Row,
) -> None:
    trace = cut_trace(row["trace"], row["trace_block"])
    cache = CacheOptions(pool_size(trace, row), row["block_size"])
    with running_daemon(cache) as running:
        with Client(running.target) as client:
            target = CountingTarget(client)
            # The digest: hits and evictions are the oracle's at every request.
            assert_counts_equal(replay_trace(trace, target), row)
        found = scrape(running)
        with connected(running.target) as stubs:
            assert_agreement(found, stubs.stats())

    assert found["prefixcache_requests_total"] == row["requests"] - row["rejected"]
    assert found["prefixcache_allocation_refused_total"] == row["rejected"]
    assert found["prefixcache_queries_blocks_total"] == row["query_blocks"]
    assert found["prefixcache_hit_blocks_total"] == row["hit_blocks"]
    assert found["prefixcache_queries_tokens_total"] == row["query_tokens"]
    hit_tokens = row["hit_tokens"] - target.num_full_hits
    assert found["prefixcache_hit_tokens_total"] == hit_tokens
    assert found["prefixcache_prefill_tokens_total", {"source": "cached"}] == hit_tokens
    computed = found["prefixcache_prefill_tokens_total", {"source": "computed"}]
    assert computed + hit_tokens == row["query_tokens"]
    assert found.total("prefixcache_evictions_total") == row["evictions"]
    assert found["prefixcache_cached_blocks"] == row["cached_end"]
    assert found["prefixcache_block_reuse_gap_seconds_count"] == row["hit_blocks"]
    missed = found["prefixcache_evict_to_reuse_seconds_count"]
    assert missed <= row["query_blocks"] - row["hit_blocks"]
    assert found["prefixcache_blocks", {"state": "referenced"}] == 0

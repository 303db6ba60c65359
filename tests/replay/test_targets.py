"""The contract of `Target`, for each implementation."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from prefixcache.client import Client
from prefixcache.errors import FailedPreconditionError
from prefixcache.replay import Admission, DaemonTarget, Target, TargetStats, replay_trace
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
from tests.replay.open_target import TARGETS, open_target
from tests.support.daemon import running_daemon

# Rejections, evictions, full hits, blocks of one token, and long prompts.
CASES = {"edge_4-4-30", "edge_4-1-20", "mooncake_conversation-512-60", "agentic_64-64-300"}
ROWS = [row for row in expected_rows() if row_name(row) in CASES]


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """5 blocks of 4 tokens."""
    with open_target(request.param, 5, 4) as opened:
        yield opened


def tokens(start: int, count: int) -> TokenIds:
    return np.arange(start, start + count, dtype=np.uint32)


def serve(target: Target, token_ids: TokenIds) -> Admission:
    admission = target.allocate(token_ids)
    if admission.is_admitted:
        target.commit()
        target.free()
    return admission


def test_a_fresh_target_is_empty(target: Target) -> None:
    assert (target.num_blocks, target.block_size) == (5, 4)
    assert target.stats() == TargetStats(num_evictions=0, num_cached_blocks=0)


def test_full_blocks_are_hit_once_committed_and_freed(target: Target) -> None:
    assert serve(target, tokens(0, 10)) == Admission(True, 0, 0)
    assert target.stats() == TargetStats(num_evictions=0, num_cached_blocks=2)
    assert serve(target, tokens(0, 11)) == Admission(True, 2, 8)


def test_a_request_that_was_not_committed_is_never_hit(target: Target) -> None:
    target.allocate(tokens(0, 10))
    target.free()
    assert target.stats() == TargetStats(num_evictions=0, num_cached_blocks=0)
    assert serve(target, tokens(0, 10)) == Admission(True, 0, 0)


def test_a_full_hit_leaves_one_token_to_compute(target: Target) -> None:
    serve(target, tokens(0, 8))
    assert serve(target, tokens(0, 8)) == Admission(True, 2, 7)
    assert target.stats() == TargetStats(num_evictions=0, num_cached_blocks=2)


def test_evictions_are_counted_since_the_start(target: Target) -> None:
    serve(target, tokens(0, 16))
    serve(target, tokens(100, 16))
    assert target.stats() == TargetStats(num_evictions=3, num_cached_blocks=5)


def test_a_request_as_large_as_the_pool_is_admitted(target: Target) -> None:
    assert serve(target, tokens(0, 20)) == Admission(True, 0, 0)
    assert serve(target, tokens(0, 20)) == Admission(True, 5, 19)


def test_a_request_that_exceeds_the_pool_changes_nothing(target: Target) -> None:
    serve(target, tokens(0, 8))
    serve(target, tokens(100, 12))
    before = target.stats()
    assert serve(target, tokens(0, 21)) == Admission(False, 2, 8)
    assert target.stats() == before
    # Had the refused request touched its hits, the other prompt would be evicted here.
    serve(target, tokens(200, 8))
    assert serve(target, tokens(100, 12)) == Admission(True, 3, 11)


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_every_target_gives_the_oracles_counts(kind: str, row: Row) -> None:
    trace = cut_trace(row["trace"], row["trace_block"])
    with open_target(kind, pool_size(trace, row), row["block_size"]) as target:
        assert_counts_equal(replay_trace(trace, target), row)


def test_a_daemon_whose_cache_is_not_empty_is_refused() -> None:
    with (
        running_daemon(CacheOptions(num_blocks=5, block_size=4)) as running,
        Client(running.target) as client,
    ):
        serve(DaemonTarget(client), tokens(0, 8))
        with pytest.raises(FailedPreconditionError, match="0 blocks referenced, 2 cached"):
            DaemonTarget(client)


def test_a_daemon_with_live_sequences_is_refused() -> None:
    with (
        running_daemon(CacheOptions(num_blocks=5, block_size=4)) as running,
        Client(running.target) as client,
        client.sequence(tokens(0, 9)),
        pytest.raises(FailedPreconditionError, match="3 blocks referenced, 0 cached"),
    ):
        DaemonTarget(client)

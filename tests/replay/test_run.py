from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from prefixcache.errors import InternalError
from prefixcache.replay import (
    Admission,
    InProcessTarget,
    TargetStats,
    Trace,
    TraceRequest,
    replay_trace,
)
from prefixcache.types import TokenIds
from tests.replay.cuts import (
    Row,
    assert_counts_equal,
    cut_trace,
    expected_rows,
    pool_size,
    row_name,
)

ROWS = expected_rows()
ROWS_AT_TRACE_BLOCK = [row for row in ROWS if row["block_size"] == row["trace_block"]]


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_counts_equal_the_oracles_at_every_request(row: Row) -> None:
    trace = cut_trace(row["trace"], row["trace_block"])
    target = InProcessTarget(pool_size(trace, row), row["block_size"])
    assert_counts_equal(replay_trace(trace, target), row)


@pytest.mark.parametrize("hash_algorithm", ["xxhash_cbor", "xxh3"])
@pytest.mark.parametrize("row", ROWS_AT_TRACE_BLOCK, ids=row_name)
def test_counts_do_not_depend_on_the_hash_algorithm(row: Row, hash_algorithm: str) -> None:
    trace = cut_trace(row["trace"], row["trace_block"])
    target = InProcessTarget(pool_size(trace, row), row["block_size"], hash_algorithm)
    assert_counts_equal(replay_trace(trace, target), row)


@pytest.mark.parametrize("hash_algorithm", ["sha256_cbor", "xxh3"])
@pytest.mark.parametrize("verify_hits", [False, True])
@pytest.mark.parametrize("row", ROWS_AT_TRACE_BLOCK[::3], ids=row_name)
def test_counts_do_not_depend_on_verified_hits(
    row: Row, verify_hits: bool, hash_algorithm: str
) -> None:
    trace = cut_trace(row["trace"], row["trace_block"])
    target = InProcessTarget(
        pool_size(trace, row), row["block_size"], hash_algorithm, verify_hits=verify_hits
    )
    assert_counts_equal(replay_trace(trace, target), row)


@pytest.mark.parametrize("name", ["edge_4", "mooncake_conversation", "agentic_64"])
def test_the_smallest_pool_that_never_evicts_is_the_one_given(name: str) -> None:
    trace = cut_trace(name, 64 if name == "agentic_64" else 512 if "mooncake" in name else 4)
    num_blocks = trace.num_blocks_without_eviction(trace.trace_block)
    ample = replay_trace(trace, InProcessTarget(num_blocks * 10, trace.trace_block))
    assert ample.evictions == 0
    assert replay_trace(trace, InProcessTarget(num_blocks, trace.trace_block)).digest == (
        ample.digest
    )


def test_cached_tokens_are_one_fewer_than_hit_tokens_for_each_full_hit() -> None:
    trace = trace_of_prompts([1, 2], [1, 2], [1, 2, 3], [1, 2])
    result = replay_trace(trace, InProcessTarget(10, 4))
    assert (result.query_tokens, result.query_blocks) == (36, 9)
    assert (result.hit_tokens, result.hit_blocks) == (24, 6)
    assert result.num_cached_tokens == 22
    assert result.hit_rate_blocks == pytest.approx(6 / 9)
    assert result.hit_rate_tokens == pytest.approx(24 / 36)


def test_rejected_requests_count_apart() -> None:
    trace = trace_of_prompts([1, 2], [1, 2, 3, 4], [1, 2])
    result = replay_trace(trace, InProcessTarget(3, 4))
    assert (result.requests, result.rejected) == (3, 1)
    assert (result.query_blocks, result.hit_blocks) == (4, 2)
    assert (result.rejected_query_blocks, result.rejected_hit_blocks) == (4, 2)
    assert result.evictions == 0


def test_a_trace_without_requests_has_no_hits_and_no_rate() -> None:
    result = replay_trace(Trace(4, (), 0), InProcessTarget(3, 4))
    assert (result.requests, result.query_blocks, result.hit_rate_blocks) == (0, 0, 0.0)
    assert result.hit_rate_tokens == 0.0


def test_each_request_is_reported_with_its_tokens() -> None:
    reported: list[int] = []
    trace = trace_of_prompts([1], [1, 2, 3, 4, 5], [2, 3])
    replay_trace(trace, InProcessTarget(4, 4), reported.append)
    assert reported == [4, 20, 8]


def test_a_request_whose_commit_fails_is_freed() -> None:
    target = FailingTarget()
    with pytest.raises(InternalError):
        replay_trace(trace_of_prompts([1], [2]), target)
    assert target.calls == ["allocate", "commit", "free"]


def trace_of_prompts(*chains: list[int]) -> Trace:
    """Prompts of full blocks of 4 tokens."""
    requests = tuple(
        TraceRequest(4 * len(chain), np.array(chain, dtype=np.uint32)) for chain in chains
    )
    return Trace(4, requests, max(map(max, chains)))


@dataclass
class FailingTarget:
    num_blocks: int = 10
    block_size: int = 4
    calls: list[str] = field(default_factory=list)

    def allocate(self, token_ids: TokenIds) -> Admission:
        self.calls.append("allocate")
        return Admission(True, 0, 0)

    def commit(self) -> None:
        self.calls.append("commit")
        raise InternalError("commit failed")

    def free(self) -> None:
        self.calls.append("free")

    def stats(self) -> TargetStats:
        return TargetStats(0, 0)

"""What a client knows of a sequence that an attached view and the daemon compute in turn."""

from __future__ import annotations

from array import array

from prefixcache.client.sequence_state import SequenceState
from prefixcache.types import AppendResult, BlockCopy, ResultCode, SequenceId

APPENDED = AppendResult(ResultCode.OK)


def state(num_tokens: int = 10, cached: int = 4, lookahead: int = 0) -> SequenceState:
    """Blocks of 4, two layers."""
    num_blocks = -(-(num_tokens + lookahead) // 4)
    return SequenceState(
        SequenceId(7),
        num_tokens=num_tokens,
        num_cached_tokens=cached,
        num_cached_blocks=-(-cached // 4),
        num_lookahead_tokens=lookahead,
        block_table=array("i", range(num_blocks)),
        block_size=4,
        num_layers=2,
    )


def test_what_a_view_has_written_is_committed_from_where_the_daemon_stands() -> None:
    one = state()
    one.written(0, 10)
    one.written(1, 8)
    assert (one.computed, one.known, one.num_committed) == ([10, 8], [4, 4], 4)
    one.committed(8)
    assert (one.computed, one.known, one.num_committed) == ([10, 8], [8, 8], 8)


def test_layers_that_the_daemon_computed_count_as_known() -> None:
    one = state()
    one.advanced(0, 10)
    one.written(1, 10)
    assert (one.computed, one.num_committed) == ([10, 10], 4)
    one.committed(10)
    assert one.num_committed == 10


def test_a_commit_of_what_was_written_elsewhere_moves_the_layers() -> None:
    one = state()
    one.committed(9)
    assert one.computed == one.known == [9, 9]


def test_the_blocks_of_a_full_hit_are_not_to_be_written_to() -> None:
    assert state(8, cached=7).first_writable == 8
    assert state(10, cached=8).first_writable == 8
    assert state(10, cached=0).first_writable == 0


def test_accepted_drafts_stay_and_others_are_cut() -> None:
    one = state(lookahead=6)
    for layer in range(2):
        one.written(layer, 10)
    one.committed(10)
    for layer in range(2):
        one.written(layer, 15)
    one.appended(4, 3, 2, APPENDED)
    assert (one.num_tokens, one.num_lookahead_tokens) == (14, 2)
    assert (one.computed, one.known) == ([13, 13], [10, 10])


def test_a_cut_takes_the_counts_the_lookahead_and_the_hits_with_it() -> None:
    one = state(10, cached=8, lookahead=6)
    one.advanced(0, 10)
    one.written(1, 9)
    one.truncated(6)
    assert (one.computed, one.known, one.first_writable) == ([6, 6], [6, 6], 6)
    assert (one.num_lookahead_tokens, list(one.block_table)) == (0, [0, 1])


def test_a_fork_shares_what_is_computed_and_nobody_writes_there() -> None:
    one = state()
    for layer in range(2):
        one.written(layer, 10)
    one.committed(10)
    (child,) = one.forked([SequenceId(8)])
    for side in (one, child):
        assert (side.computed, side.known) == ([10, 10], [10, 10])
        assert (side.first_writable, side.num_lookahead_tokens) == (10, 0)
    child.appended(1, 0, 0, AppendResult(ResultCode.OK, (), (BlockCopy(2, 9),)))
    assert list(child.block_table) == [0, 1, 9]
    assert list(one.block_table) == [0, 1, 2]

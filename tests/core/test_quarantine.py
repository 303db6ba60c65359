"""What a lost session's writers may still write to is given to nobody. The clock is the test's."""

from __future__ import annotations

from typing import Any

import pytest

from prefixcache.core.hashing import HashAlgorithm
from prefixcache.core.sessions import SessionLimits
from prefixcache.errors import NoRoomError, QuotaExceededError, SessionNotFoundError
from prefixcache.types import CacheUse, ResultCode
from tests.core.manager import ONE, A, Held, Manager, T, U, refused, room
from tests.support.invariants import check_invariants

TTL_S, GRACE_S = 10.0, 2.0
LIMITS = SessionLimits(reconnect_grace_s=GRACE_S)
PROCESS, OTHER = 7, 8


class Writers(Manager):
    """Blocks of 4 tokens."""

    def __init__(self, num_blocks: int = 16, num_layers: int = 1, **options: Any) -> None:
        super().__init__(num_blocks, num_layers=num_layers, session_limits=LIMITS, **options)
        self.session = self.attached(PROCESS)

    def attached(self, *attachments: int) -> bytes:
        session_id = self.sequences.live.sessions.open(TTL_S, "an engine").session_id
        for attachment in attachments:
            self.sequences.live.sessions.attach(session_id, attachment)
        return session_id

    def held(self, tokens: list[int], computed: int = 0, **options: object) -> Held:
        held = self.allocate(tokens, owner=self.session, **options)
        if computed:
            self.commit(held, computed)
        return held

    def lose(self) -> int:
        """All sessions are over."""
        self.clock_s += TTL_S
        ended = self.sequences.expire()
        check_invariants(self.sequences)
        return ended

    def process_ends(self, attachment: int = PROCESS) -> int:
        freed = self.sequences.live.end_writer(attachment)
        check_invariants(self.sequences)
        return freed

    @property
    def quarantined(self) -> list[int]:
        return sorted(self.sequences.live.quarantine.block_ids)


# ---- which blocks


@pytest.mark.parametrize(
    ("num_tokens", "computed", "num_kept"),
    [(1, 0, 1), (4, 0, 1), (4, 4, 0), (5, 4, 1), (12, 4, 2), (12, 7, 2), (12, 8, 1), (11, 11, 1)],
)
def test_the_blocks_that_were_not_committed_are_kept(
    num_tokens: int, computed: int, num_kept: int
) -> None:
    manager = Writers()
    held = manager.held(T(num_tokens), computed)
    assert manager.lose() == 1
    assert manager.quarantined == held.table[len(held.table) - num_kept :]
    assert manager.pool.num_cached == len(held.table) - num_kept
    assert manager.pool.num_referenced == 0
    assert manager.process_ends() == num_kept
    assert manager.pool.num_free == 16


def test_reserved_slots_are_kept_too() -> None:
    manager = Writers()
    held = manager.held(T(4), 4, num_lookahead_tokens=6)
    manager.lose()
    assert manager.quarantined == held.table[1:]


def test_what_only_some_layers_have_is_kept() -> None:
    manager = Writers(num_layers=2)
    held = manager.held(T(8))
    manager.end(manager.begin(0, held))
    manager.end(manager.begin(1, held, num_tokens=4))
    manager.lose()
    assert manager.quarantined == held.table[1:]
    assert manager.hit(T(9)) == 4


def test_hits_are_nobodys_to_write_to() -> None:
    manager = Writers()
    manager.fill(T(8))
    held = manager.held(T(8))
    assert held.cached == 7, "its last block is a hit, of which one token is computed again"
    manager.lose()
    assert manager.quarantined == []
    assert manager.hit(T(9)) == 8


def test_hits_that_a_forced_reset_made_unfindable_are_nobodys_to_write_to() -> None:
    manager = Writers()
    manager.fill(T(8))
    manager.held(T(8))
    manager.sequences.reset(force=True)
    manager.lose()
    assert manager.quarantined == []


def test_full_blocks_that_a_sequence_does_not_register_are_done_with() -> None:
    manager = Writers()
    held = manager.held(T(9), 9, cache_use=CacheUse.NO_WRITE)
    manager.lose()
    assert manager.quarantined == held.table[2:]
    assert manager.pool.num_cached == 0


def test_a_standby_is_committed_and_goes() -> None:
    manager = Writers()
    one, two = manager.held(T(8)), manager.held(T(8))
    manager.commit(one)
    manager.commit(two)
    manager.lose()
    assert manager.quarantined == []
    assert manager.pool.num_cached == 2


def test_a_block_that_a_fork_shares_is_kept_once_both_have_ended() -> None:
    manager = Writers()
    held = manager.held(T(6), 6)
    manager.fork(held, 2)
    manager.lose()
    assert manager.quarantined == held.table[1:]


def test_a_block_that_another_session_has_too_stays_with_that() -> None:
    manager = Writers()
    held = manager.held(T(8), 8)
    manager.truncate(held, 6)  # its last block stays cached, and is copied before it is written to
    other = manager.allocate(T(9), owner=ONE)
    manager.sequences.reset(force=True)
    manager.lose()
    assert manager.quarantined == []
    assert manager.refs(other.table[:2]) == [1, 1]


def test_the_source_of_a_copy_is_kept() -> None:
    manager = Writers()
    held = manager.held(T(6), 6)
    (child,) = manager.fork(held)
    result = manager.append(held, [1])
    (copy,) = result.copies
    manager.free(child)
    manager.lose()
    assert manager.quarantined == sorted([copy.source, copy.destination])
    manager.process_ends()
    assert manager.pool.num_free == 16


# ---- for how long


def test_kept_blocks_are_neither_free_nor_found_nor_taken() -> None:
    manager = Writers(num_blocks=4)
    manager.held(T(8), 4)
    manager.lose()
    stats = manager.sequences.stats()
    assert (stats.referenced, stats.quarantined, stats.evictable, stats.blank) == (0, 1, 1, 2)
    assert manager.hit(T(9)) == 4
    error = refused(manager, NoRoomError, lambda: manager.allocate(U(16)))
    assert room(error) == {"needed": 4, "free": 3, "referenced": 0, "quarantined": 1}
    assert "1 quarantined" in str(error)
    manager.process_ends()
    assert len(manager.allocate(U(16)).table) == 4


def test_kept_blocks_come_back_at_the_head_deepest_first() -> None:
    manager = Writers(num_blocks=6)
    held = manager.held(T(11))
    manager.lose()
    manager.process_ends()
    assert manager.free_order()[:3] == held.table[::-1]


def test_blocks_are_kept_until_the_last_process_that_could_write_to_them_has_ended() -> None:
    manager = Writers()
    manager.sequences.live.sessions.attach(manager.session, OTHER)
    manager.held(T(6))
    manager.lose()
    assert manager.process_ends() == 0
    assert len(manager.quarantined) == 2
    assert manager.process_ends(OTHER) == 2


def test_a_process_may_write_to_many_sessions_and_its_end_frees_what_it_alone_could_write() -> None:
    manager = Writers()
    shared = manager.attached(PROCESS, OTHER)
    manager.held(T(3))
    manager.allocate(U(3), owner=shared)
    manager.lose()
    assert manager.process_ends() == 1
    assert manager.process_ends() == 0
    assert manager.process_ends(OTHER) == 1


def test_nothing_is_kept_for_a_process_that_ended_before_its_session() -> None:
    manager = Writers()
    manager.held(T(6))
    assert manager.process_ends() == 0
    assert manager.lose() == 1
    assert (manager.quarantined, manager.pool.num_free) == ([], 16)


def test_of_two_processes_the_one_that_is_left_keeps_the_blocks() -> None:
    manager = Writers()
    manager.sequences.live.sessions.attach(manager.session, OTHER)
    manager.held(T(6))
    manager.process_ends()
    manager.lose()
    assert len(manager.quarantined) == 2
    assert manager.process_ends(OTHER) == 2


def test_an_unknown_process_ends_nothing() -> None:
    manager = Writers()
    manager.held(T(6))
    manager.lose()
    assert manager.process_ends(99) == 0
    assert len(manager.quarantined) == 2


# ---- which ends


def test_a_session_whose_stream_broke_is_lost_as_well() -> None:
    manager = Writers()
    manager.held(T(6))
    sessions = manager.sequences.live.sessions
    sessions.disconnect(manager.session, sessions.connect(manager.session))
    manager.clock_s = GRACE_S
    assert manager.sequences.expire() == 1
    assert len(manager.quarantined) == 2


def test_a_session_that_nobody_is_attached_to_leaves_nothing_behind() -> None:
    manager = Writers()
    manager.allocate(T(6), owner=manager.attached())
    assert manager.lose() == 1
    assert manager.quarantined == []


def test_what_the_client_frees_or_cuts_is_free_at_once() -> None:
    manager = Writers()
    freed, cut = manager.held(T(3)), manager.held(U(9), 9)
    assert manager.free(freed) == [ResultCode.OK]
    dropped = manager.truncate(cut, 3)
    assert (manager.quarantined, manager.refs(list(dropped))) == ([], [0, 0])


def test_a_session_that_is_closed_leaves_nothing_behind_if_its_writer_has_ended() -> None:
    manager = Writers()
    manager.held(T(6))
    manager.process_ends()
    assert manager.sequences.live.close_session(manager.session) == 1
    assert (manager.quarantined, manager.pool.num_free) == ([], 16)


def test_a_session_that_is_closed_while_a_writer_is_attached_is_lost_to_that_writer() -> None:
    """Another thread of its client may be in the middle of a write."""
    manager = Writers()
    manager.held(T(6))
    assert manager.sequences.live.close_session(manager.session) == 1
    check_invariants(manager.sequences)
    assert len(manager.quarantined) == 2
    assert manager.process_ends() == 2


def test_a_session_that_is_over_cannot_be_attached_to() -> None:
    manager = Writers()
    manager.lose()
    for owner in (manager.session, ONE):
        refused(
            manager,
            SessionNotFoundError,
            lambda owner=owner: manager.sequences.live.sessions.attach(owner, PROCESS),
        )


def test_attaching_renews_the_session() -> None:
    manager = Writers()
    manager.clock_s = TTL_S - 1
    manager.sequences.live.sessions.attach(manager.session, OTHER)
    manager.clock_s = 2 * TTL_S - 1.5
    assert manager.sequences.expire() == 0


# ---- calls that run, resets, tenants


def test_blocks_that_a_running_call_uses_are_kept_when_it_has_ended() -> None:
    manager = Writers(num_layers=1)
    held = manager.held(T(6))
    ticket = manager.begin(0, held)
    manager.lose()
    assert manager.quarantined == []
    assert manager.refs(held.table) == [1, 1]
    manager.end(ticket)
    assert manager.quarantined == held.table
    assert manager.hit(T(6)) == 0, "the call ended after its session"


def test_a_process_that_ends_while_the_call_still_runs_leaves_nothing_behind() -> None:
    manager = Writers(num_layers=1)
    held = manager.held(T(6))
    ticket = manager.begin(0, held)
    manager.lose()
    assert manager.process_ends() == 0
    manager.end(ticket)
    assert (manager.quarantined, manager.pool.num_free) == ([], 16)


def test_a_sequence_that_was_freed_while_its_call_ran_is_freed() -> None:
    manager = Writers(num_layers=1)
    held = manager.held(T(6))
    ticket = manager.begin(0, held)
    manager.free(held)
    manager.lose()
    manager.end(ticket)
    assert (manager.quarantined, manager.pool.num_free) == ([], 16)


def test_copies_that_run_keep_their_source_until_they_are_made_and_then_in_quarantine() -> None:
    manager = Writers(num_layers=1)
    held = manager.held(T(6))
    manager.attend(held)
    (child,) = manager.fork(held)
    manager.append(held, [1])
    ticket = manager.sequences.running.begin_copies(manager.session, [held.sequence_id])
    manager.free(child)
    manager.lose()
    assert manager.quarantined == []
    manager.sequences.running.end_copies(ticket)
    check_invariants(manager.sequences)
    (copy,) = ticket.copies
    assert manager.quarantined == sorted([copy.source, copy.destination])


@pytest.mark.parametrize("force", [False, True])
def test_a_reset_leaves_kept_blocks_where_they_are(force: bool) -> None:
    manager = Writers()
    manager.fill(A(8))
    held = manager.held(T(8), 4)
    manager.lose()
    assert manager.sequences.reset(force=force) == 3
    check_invariants(manager.sequences)
    assert manager.quarantined == held.table[1:]
    assert manager.process_ends() == 1
    assert manager.pool.num_blank == 16


def test_kept_blocks_stay_charged_to_their_account() -> None:
    manager = Writers()
    manager.pool.set_account(0, 0, 0, None)
    manager.pool.set_account(1, 1, 2, 4)
    manager.held(T(12), 4, account=1)
    manager.lose()
    use = manager.pool.account(1)
    assert (use.held, use.private, use.evictable) == (2, 2, 1)
    assert manager.pool.num_available(0) == 14
    manager.process_ends()
    assert manager.pool.account(1).held == 0


def test_accounts_that_are_kept_from_now_on_know_of_kept_blocks() -> None:
    manager = Writers()
    manager.held(T(12), 4)
    manager.lose()
    manager.pool.set_account(0, 0, 0, None)
    check_invariants(manager.sequences)
    assert manager.pool.account(0).held == 2
    manager.process_ends()
    assert manager.pool.account(0).held == 0


# ---- with quotas


@pytest.mark.parametrize("verify_hits", [False, True])
def test_a_tenant_that_dies_and_comes_back_gets_nothing_beyond_its_own(verify_hits: bool) -> None:
    """Of 16 blocks 6 are guaranteed to the other; this one may have 8. Its processes live on."""
    manager = Writers(verify_hits=verify_hits)
    manager.pool.set_account(0, 0, 0, None)
    manager.pool.set_account(1, 1, 2, 8)
    manager.pool.set_account(2, 2, 6, None)
    for process in (PROCESS, OTHER, 9):
        manager.session = manager.attached(process)
        free = 8 - manager.pool.num_held(1)
        for _ in range(free // 3):
            manager.held(T(12), account=1)
        refused(manager, QuotaExceededError, lambda: manager.held(T(12), account=1))
        manager.lose()
        assert manager.pool.num_held(1) == len(manager.quarantined) <= 8
        assert manager.pool.num_available(2) >= 6
    assert len(manager.quarantined) == 6
    held = manager.allocate(U(24), account=2)
    assert len(held.table) == 6
    assert not set(held.table) & set(manager.quarantined)
    assert [manager.process_ends(process) for process in (PROCESS, OTHER, 9)] == [6, 0, 0]
    manager.session = manager.attached(10)
    assert len(manager.held(T(32), account=1).table) == 8


def test_kept_blocks_that_a_lowered_limit_no_longer_admits_stay_and_no_more_are_given() -> None:
    manager = Writers()
    manager.pool.set_account(0, 0, 0, None)
    manager.pool.set_account(1, 1, 0, 8)
    manager.held(T(24), account=1)
    manager.lose()
    manager.pool.set_account(1, 1, 0, 4)
    manager.session = manager.attached(OTHER)
    refused(manager, QuotaExceededError, lambda: manager.held(T(1), account=1))
    assert manager.process_ends() == 6
    assert len(manager.held(T(16), account=1).table) == 4


def test_a_refused_tenant_is_told_of_its_own_kept_blocks_only() -> None:
    manager = Writers()
    manager.pool.set_account(0, 0, 0, None)
    for account in (1, 2):
        manager.pool.set_account(account, account, 8, None)
    manager.held(T(32), account=1)
    manager.lose()
    manager.session = manager.attached(OTHER)
    manager.held(U(8), account=2)
    with pytest.raises(NoRoomError) as theirs:
        manager.held(U(32), account=2)
    assert theirs.value.fields.keys() & {"referenced", "quarantined"} == {"referenced"}
    assert (theirs.value.fields["free"], theirs.value.fields["referenced"]) == (6, 2)
    with pytest.raises(NoRoomError) as own:
        manager.held(T(4), account=1)
    assert (own.value.fields["free"], own.value.fields["referenced"]) == (0, 8)


def test_a_hit_is_verified_also_where_a_writer_was_lost_in_the_middle() -> None:
    """All hashes collide: what stands in the index is the lost one's first block, or nothing."""
    algorithm = HashAlgorithm("collides", 32, lambda data: bytes(32), True, False)
    manager = Writers(verify_hits=True, algorithm=algorithm)
    manager.held(T(12), 4)
    manager.lose()
    assert manager.hit(T(9)) == 4, "its first block, which was committed"
    assert manager.hit(U(9)) == 0
    manager.fill(U(8))
    assert manager.hit(U(9)) == 0, "the hash is taken by other content"
    manager.process_ends()
    assert manager.hit(T(9)) == 4

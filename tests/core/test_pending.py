"""What other sequences are computing of a prompt, and who is told when that changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from prefixcache.core.hashing import HashAlgorithm
from prefixcache.core.pending import Waiter
from prefixcache.core.sessions import SessionLimits
from prefixcache.errors import SessionNotFoundError, TooManySequencesError
from prefixcache.types import NO_EXTRA_KEYS, CacheUse, ExtraKeys, FullHit
from tests.core.manager import ONE, TWO, A, Held, Manager, T, U, image


def pending(manager: Manager, tokens: list[int], **options: Any) -> int:
    return manager.lookup(tokens, **options).num_pending_tokens


class Call:
    """An Allocate that waits: how often it was told to look again."""

    def __init__(self, manager: Manager, tokens: list[int], owner: bytes = TWO) -> None:
        self.num_woken = 0
        self._sequences = manager.sequences
        self._owner = owner
        self._prompt = self._sequences.prepare(np.array(tokens, dtype=np.uint32), NO_EXTRA_KEYS)
        self.waiter: Waiter | None = None
        self.look()

    def look(self) -> bool:
        """Whether it goes on waiting."""
        self.stop()
        self.waiter = self._sequences.wait_for_pending(self._owner, "", self._prompt, self._wake)
        return self.waiter is not None

    def stop(self) -> None:
        if self.waiter is not None:
            self._sequences.pending.stop_waiting(self.waiter)
            self.waiter = None

    def _wake(self) -> None:
        self.num_woken += 1


# ---- how much


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, 0), (3, 0), (4, 3), (5, 4), (8, 7), (9, 8), (20, 8), (80, 8)]
)
def test_full_blocks_of_a_live_prompt_are_pending(num_tokens: int, expected: int) -> None:
    """One token is left to compute, as with hits; the other prompt has two full blocks."""
    manager = Manager(40)
    manager.allocate(T(11))
    assert pending(manager, T(num_tokens)) == expected
    assert (
        manager.sequences.allocate(
            TWO,
            "",
            manager.sequences.prepare(np.array(T(num_tokens), dtype=np.uint32), NO_EXTRA_KEYS),
        ).num_pending_tokens
        == expected
    )


def test_the_last_block_of_a_full_hit_is_not_pending_where_it_is_no_hit() -> None:
    manager = Manager(8)
    manager.allocate(T(8))
    assert pending(manager, T(8), full_hit=FullHit.LAST_BLOCK) == 4
    assert pending(manager, T(9), full_hit=FullHit.LAST_BLOCK) == 8


def test_what_is_cached_is_not_pending() -> None:
    manager = Manager(16)
    manager.fill(T(8))
    assert pending(manager, T(20)) == 0
    held = manager.allocate(T(16))
    assert (manager.hit(T(20)), pending(manager, T(20))) == (8, 8)
    manager.commit(held, until=12)
    assert (manager.hit(T(20)), pending(manager, T(20))) == (12, 4)
    manager.commit(held)
    assert (manager.hit(T(20)), pending(manager, T(20))) == (16, 0)


def test_the_longest_of_all_counts() -> None:
    manager = Manager(40)
    for tokens in (T(4) + U(8), T(12) + A(4), T(8) + U(4), U(12), T(12) + U(8)):
        manager.allocate(tokens)
    assert pending(manager, T(20)) == 12
    assert pending(manager, T(12) + A(4) + U(4)) == 16
    assert pending(manager, T(5)) == 4


def test_a_sequence_behind_what_another_has_cached_counts_from_the_hits_on() -> None:
    manager = Manager(40)
    ahead, behind = manager.allocate(T(16)), manager.allocate(T(16))
    manager.commit(ahead, until=8)
    manager.free(ahead)
    assert manager.record(behind).num_cached_blocks == 0
    assert (manager.hit(T(20)), pending(manager, T(20))) == (8, 8)


@pytest.mark.parametrize("end", ["free", "expire", "truncate", "reset", "close"])
def test_nothing_is_pending_of_a_sequence_that_will_not_compute_it(end: str) -> None:
    manager = Manager(16)
    owner = manager.sequences.live.sessions.open(5.0, "").session_id if end == "close" else ONE
    held = manager.allocate(T(12), owner=owner)
    assert pending(manager, T(12)) == 11
    ENDS[end](manager, held)
    assert pending(manager, T(12)) == (4 if end == "truncate" else 0)


def _expire(manager: Manager, held: Held) -> None:
    manager.clock_s += 601
    assert manager.sequences.expire() == 1


ENDS: dict[str, Callable[[Manager, Held], object]] = {
    "free": lambda manager, held: manager.free(held),
    "expire": _expire,
    "truncate": lambda manager, held: manager.truncate(held, 6),
    "reset": lambda manager, held: manager.sequences.reset(force=True),
    "close": lambda manager, held: manager.sequences.live.close_session(held.owner),
}


def test_a_sequence_that_ended_under_a_running_call_commits_nothing_more() -> None:
    manager = Manager(16)
    held = manager.allocate(T(12))
    ticket = manager.begin(0, held)
    manager.free(held)
    assert pending(manager, T(12)) == 0
    manager.end(ticket)
    assert pending(manager, T(12)) == manager.hit(T(12)) == 0


@pytest.mark.parametrize("use", [CacheUse.NO_WRITE, CacheUse.NONE])
def test_what_will_not_be_registered_is_not_pending(use: CacheUse) -> None:
    manager = Manager(16)
    manager.allocate(T(12), cache_use=use)
    assert pending(manager, T(12)) == 0


@pytest.mark.parametrize("use", [CacheUse.NO_READ, CacheUse.NONE])
def test_who_takes_no_hits_has_nothing_pending(use: CacheUse) -> None:
    manager = Manager(16)
    manager.allocate(T(12))
    prompt = manager.sequences.prepare(np.array(T(12), dtype=np.uint32), NO_EXTRA_KEYS)
    reply = manager.sequences.allocate(TWO, "", prompt, cache_use=use)
    assert reply.num_pending_tokens == 0


def test_without_caching_nothing_is_pending() -> None:
    manager = Manager(16, caching=False)
    manager.allocate(T(12))
    assert pending(manager, T(12)) == 0


def test_extra_keys_tell_blocks_apart() -> None:
    manager = Manager(16)
    manager.allocate(T(12), image("x", 5, 2))
    assert pending(manager, T(12)) == 4
    assert pending(manager, T(12), extra_keys=image("x", 5, 2)) == 11
    assert pending(manager, T(12), extra_keys=ExtraKeys(cache_salt="s")) == 0


def test_a_second_turn_is_pending_and_what_decoding_adds_is_not() -> None:
    manager = Manager(16)
    held = manager.allocate(T(6))
    manager.commit(held)
    manager.append(held, T(13)[6:])
    assert pending(manager, T(20)) == 8
    manager.commit(held)
    assert (manager.hit(T(20)), pending(manager, T(20))) == (12, 0)
    manager.append(held, T(16)[13:])
    assert pending(manager, T(20)) == 0


def test_a_fork_computes_nothing_that_its_parent_has_not() -> None:
    manager = Manager(16)
    held = manager.allocate(T(12))
    manager.commit(held)
    manager.fork(held)
    assert pending(manager, T(16)) == 0


def test_a_repeated_allocate_is_answered_with_what_was_pending_at_first() -> None:
    manager = Manager(16)
    first = manager.allocate(T(9))
    prompt = manager.sequences.prepare(np.array(T(9), dtype=np.uint32), NO_EXTRA_KEYS)
    replies = []
    for _ in range(2):
        replies.append(manager.sequences.allocate(TWO, "r", prompt))
        manager.free(first)
    assert replies[0] is replies[1]
    assert replies[0].num_pending_tokens == 8


# ---- waiting


def test_who_waits_is_told_once_all_of_it_is_cached_and_holds_nothing() -> None:
    manager = Manager(16)
    held = manager.allocate(T(12))
    call = Call(manager, T(20))
    assert call.waiter is not None
    assert len(manager.sequences.live) == 1
    for position in (3, 5, 10):
        manager.commit(held, until=position)
        assert call.num_woken == 0
    assert call.look()
    manager.commit(held)
    assert call.num_woken == 1
    assert not call.look()
    assert manager.hit(T(20)) == 12


def test_attention_of_all_layers_tells_too() -> None:
    manager = Manager(16, num_layers=2)
    held = manager.allocate(T(12))
    call = Call(manager, T(20))
    manager.end(manager.begin(0, held))
    assert call.num_woken == 0
    manager.end(manager.begin(1, held))
    assert call.num_woken == 1
    assert not call.look()


@pytest.mark.parametrize("end", ENDS)
def test_who_waits_is_told_when_it_waits_in_vain(end: str) -> None:
    manager = Manager(16)
    owner = manager.sequences.live.sessions.open(5.0, "").session_id if end == "close" else ONE
    held = manager.allocate(T(12), owner=owner)
    manager.commit(held, until=8)
    call = Call(manager, T(20))
    ENDS[end](manager, held)
    assert call.num_woken >= 1
    assert not call.look()


def test_one_that_has_the_same_block_takes_over() -> None:
    manager = Manager(16)
    first, second = manager.allocate(T(12)), manager.allocate(T(12))
    call = Call(manager, T(20))
    manager.free(first)
    assert call.num_woken == 1
    assert call.look()
    manager.commit(second)
    assert call.num_woken == 2
    assert not call.look()


def test_one_that_waits_is_told_of_another_with_the_same_block_that_is_faster() -> None:
    manager = Manager(16)
    first, second = manager.allocate(T(12)), manager.allocate(T(12))
    call = Call(manager, T(20))
    manager.commit(first, until=8)
    assert call.num_woken == 0
    manager.commit(second)
    assert call.num_woken == 1
    assert not call.look()


def test_others_are_not_told() -> None:
    manager = Manager(32)
    first, second = manager.allocate(T(12)), manager.allocate(U(12))
    one, other = Call(manager, T(12)), Call(manager, U(12))
    manager.commit(first)
    manager.free(first)
    assert (one.num_woken, other.num_woken) == (1, 0)
    manager.free(second)
    assert other.num_woken == 1


def test_what_is_named_already_does_not_wait() -> None:
    manager = Manager(16)
    manager.allocate(T(12), request_id="r")
    prompt = manager.sequences.prepare(np.array(T(12), dtype=np.uint32), NO_EXTRA_KEYS)
    assert manager.sequences.wait_for_pending(ONE, "r", prompt, print) is None
    waiter = manager.sequences.wait_for_pending(ONE, "s", prompt, print)
    assert waiter is not None
    manager.sequences.pending.stop_waiting(waiter)


def test_what_never_fits_does_not_wait() -> None:
    manager = Manager(4)
    manager.allocate(T(12))
    assert not Call(manager, T(17)).look()


def test_a_session_ends_with_its_waiting_calls_and_takes_no_more_than_it_may_have() -> None:
    manager = Manager(16, session_limits=SessionLimits(max_sequences=1))
    owner = manager.sequences.live.sessions.open(5.0, "").session_id
    manager.allocate(T(12))
    call = Call(manager, T(12), owner)
    manager.sequences.live.close_session(owner)
    assert call.num_woken == 1
    with pytest.raises(SessionNotFoundError):
        call.look()
    owner = manager.sequences.live.sessions.open(5.0, "").session_id
    manager.allocate(U(4), owner=owner)
    with pytest.raises(TooManySequencesError):
        Call(manager, T(12), owner)


def test_an_owner_does_not_expire_while_it_waits() -> None:
    manager = Manager(16)
    manager.allocate(T(12))
    manager.allocate(U(4), owner=TWO)
    call = Call(manager, T(12), TWO)
    manager.clock_s += 601
    assert manager.sequences.expire() == 1  # the other owner's
    assert call.num_woken == 1
    assert not call.look()
    assert manager.sequences.expire() == 0


def test_what_decoding_caches_is_told_too() -> None:
    manager = Manager(16)
    slow, fast = manager.allocate(T(12)), manager.allocate(T(5))
    for token in T(8)[5:]:
        manager.append(fast, [token])
    call = Call(manager, T(9))
    manager.commit(fast, until=4)
    assert call.num_woken == 0
    manager.commit(fast)
    assert call.num_woken == 1
    assert not call.look()
    manager.free(slow)


# ---- digests that collide


def test_a_collision_is_no_hit_and_does_not_hold_up_a_call_for_ever() -> None:
    """All digests are equal: the only block that is registered is no hit for another content."""

    def digest(data: bytes) -> bytes:
        return bytes(32)

    algorithm = HashAlgorithm("colliding", 32, digest, True, False)
    manager = Manager(32, verify_hits=True, algorithm=algorithm)
    first = manager.allocate(T(12))
    call = Call(manager, U(12))
    assert call.waiter is not None  # it cannot be told before
    manager.commit(first)
    assert call.num_woken
    assert not call.look()
    assert manager.hit(U(12)) == 0

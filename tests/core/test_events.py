"""The log of events by itself, and snapshots of large pools."""

from __future__ import annotations

import numpy as np
import pytest

from prefixcache.core.events import (
    MAX_EVENT_BYTES,
    MIN_BUFFER_BYTES,
    Cleared,
    EventLog,
    Removed,
    Stored,
)
from prefixcache.types import ExtraKeys, Lora
from tests.core.manager import Manager, T, U
from tests.support.mirror import snapshot_of

WIDTH = 32


def digests(count: int) -> bytes:
    return b"".join(number.to_bytes(WIDTH, "big") for number in range(count))


def tokens(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.uint32)


def test_numbers_go_up_from_0_and_a_reader_reads_from_where_it_is() -> None:
    log = EventLog(MIN_BUFFER_BYTES, clock=lambda: 5.0)
    assert log.read(0) == []
    log.cleared()
    log.removed(digests(2), WIDTH)
    assert [(event.number, event.change) for event in log.read(0)] == [
        (0, Cleared()),
        (1, Removed(digests(2))),
    ]
    assert [event.number for event in log.read(1)] == [1]
    assert log.read(2) == []
    assert log.read(0)[0].time_s == 5.0


@pytest.mark.parametrize("num_blocks", [1, 1365, 1366, 4000])
def test_a_long_run_makes_events_that_follow_each_other(num_blocks: int) -> None:
    log = EventLog(MIN_BUFFER_BYTES)
    log.stored(digests(num_blocks), WIDTH, b"parent", tokens(16 * num_blocks), None)
    events = log.read(0, 2**30)
    runs = [event.change for event in events]
    assert all(event.num_bytes <= MAX_EVENT_BYTES + 1024 for event in events)
    assert b"".join(run.hashes for run in runs) == digests(num_blocks)
    assert np.concatenate([run.token_ids for run in runs]).tolist() == list(range(16 * num_blocks))
    parents = [b"parent", *(run.hashes[-WIDTH:] for run in runs)][: len(runs)]
    assert [run.parent for run in runs] == parents
    assert len(runs) == -(-num_blocks // 1365)


@pytest.mark.parametrize("num_blocks", [4096, 4097])
def test_many_removed_blocks_make_several_events(num_blocks: int) -> None:
    log = EventLog(MIN_BUFFER_BYTES)
    log.removed(digests(num_blocks), WIDTH)
    runs = [event.change.hashes for event in log.read(0, 2**30)]
    assert b"".join(runs) == digests(num_blocks)
    assert len(runs) == -(-num_blocks // 4096)


def test_extra_keys_are_cut_with_their_blocks_and_left_out_where_there_are_none() -> None:
    log = EventLog(MIN_BUFFER_BYTES)
    keys = [b"x" * 8000] + [b""] * 99
    log.stored(digests(100), WIDTH, None, tokens(100), keys)
    runs = [event.change for event in log.read(0, 2**30)]
    assert isinstance(runs[0], Stored)
    assert runs[0].extra_keys == keys[: len(runs[0].hashes) // WIDTH]
    assert len(runs) > 1
    assert all(run.extra_keys is None for run in runs[1:])


def test_the_buffer_forgets_the_oldest_and_never_grows_beyond_its_limit() -> None:
    log = EventLog(MIN_BUFFER_BYTES)
    for number in range(3000):
        log.stored(digests(10), WIDTH, None, tokens(160), None)
        assert log.num_bytes <= MIN_BUFFER_BYTES
        assert log.next_number == number + 1
    events = log.read(0, 2**30)
    assert events[0].number == log.first_number > 0
    assert [event.number for event in events] == list(range(log.first_number, 3000))
    assert sum(event.num_bytes for event in events) == log.num_bytes > MIN_BUFFER_BYTES - 2048


def test_a_read_is_cut_to_the_bytes_asked_for_but_has_one_event_at_least() -> None:
    log = EventLog(MIN_BUFFER_BYTES)
    for _ in range(10):
        log.removed(digests(8), WIDTH)
    size = log.read(0)[0].num_bytes
    assert len(log.read(0, 3 * size)) == 3
    assert len(log.read(0, 1)) == 1


def test_who_waits_is_woken_once_and_not_when_it_has_left() -> None:
    log = EventLog(MIN_BUFFER_BYTES)
    woken: list[str] = []
    first, second = lambda: woken.append("first"), lambda: woken.append("second")
    log.wake_at_next(first)
    log.wake_at_next(first)
    log.wake_at_next(second)
    log.forget(second)
    log.cleared()
    log.cleared()
    assert woken == ["first"]


def test_a_buffer_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="buffer"):
        EventLog(MIN_BUFFER_BYTES - 1)


# ---- what the pool tells


def changes(manager: Manager) -> list[object]:
    log = manager.pool.events
    assert log is not None
    return [event.change for event in log.read(log.first_number, 2**30)]


def test_a_commit_of_many_blocks_is_one_event() -> None:
    manager = Manager(12, events=EventLog(MIN_BUFFER_BYTES))
    held = manager.allocate(T(21), ExtraKeys(Lora("poet")))
    manager.commit(held)
    (stored,) = changes(manager)
    hashes = [manager.pool.hash_of(block) for block in held.table[:5]]
    assert stored.hashes == b"".join(block_hash or b"" for block_hash in hashes)
    assert (stored.parent, stored.token_ids.tolist()) == (None, T(20))
    assert len(stored.extra_keys) == 5


def test_what_continues_a_cached_prefix_names_its_parent() -> None:
    manager = Manager(12, events=EventLog(MIN_BUFFER_BYTES))
    manager.fill(T(8))
    manager.fill(T(14))
    first, second = changes(manager)
    assert second.parent == first.hashes[-WIDTH:]
    assert second.token_ids.tolist() == T(12)[8:]


def test_a_standby_that_takes_over_is_no_event() -> None:
    manager = Manager(6, events=EventLog(MIN_BUFFER_BYTES))
    one, two = manager.allocate(T(5)), manager.allocate(T(5))
    manager.commit(one)
    manager.commit(two)
    manager.free(one)
    assert len(changes(manager)) == 1
    filler = manager.allocate(U(16))
    assert manager.hit(T(5)) == 4, "the standby has taken over"
    assert len(changes(manager)) == 1
    manager.free(two, filler)
    manager.allocate(U(24))
    assert changes(manager)[1:] == [Removed(changes(manager)[0].hashes)]


def test_evicted_blocks_are_told_children_first() -> None:
    manager = Manager(4, events=EventLog(MIN_BUFFER_BYTES))
    manager.fill(T(16))
    (stored,) = changes(manager)
    manager.allocate(U(16))
    removed = changes(manager)[1]
    hashes = [stored.hashes[at : at + WIDTH] for at in range(0, 4 * WIDTH, WIDTH)]
    assert removed == Removed(b"".join(reversed(hashes)))


def test_a_pool_without_a_log_keeps_no_chain_nodes() -> None:
    assert Manager(4).pool.events is None


def test_a_snapshot_of_many_blocks_is_in_few_events() -> None:
    manager = Manager(3000, 1, events=EventLog(MIN_BUFFER_BYTES))
    manager.fill(list(range(1, 2501)))
    manager.fill([*range(1, 1501), *range(5000, 5100)])
    assert len(snapshot_of(manager.pool).parent_of) == 2600

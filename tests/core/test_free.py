"""Free gives each block back once."""

from __future__ import annotations

import random
import threading

from prefixcache.errors import NoRoomError
from prefixcache.types import ResultCode
from tests.core.manager import ONE, TWO, Held, Manager, T, U
from tests.support.invariants import check_invariants


def test_free_is_idempotent_and_gives_each_block_back_once() -> None:
    manager = Manager(4)
    held = manager.allocate(T(8))
    codes = manager.sequences.free(ONE, [held.sequence_id, held.sequence_id, 12345])
    assert codes == [ResultCode.OK, ResultCode.NOT_FOUND, ResultCode.NOT_FOUND]
    assert sorted(manager.free_order()) == [0, 1, 2, 3]
    assert not manager.pool.ref_cnt.any()


def test_sequences_are_freed_by_their_request_ids_too() -> None:
    manager = Manager(8)
    by_id = manager.allocate(T(4), request_id="a")
    manager.allocate(U(4), request_id="b")
    parent = manager.allocate(T(8), request_id="parent")
    manager.commit(parent)
    manager.fork(parent, request_ids=["c", "d"])
    codes = manager.sequences.free(ONE, [by_id.sequence_id, 12345], ["c", "b", "unknown", "d"])
    check_invariants(manager.sequences)
    ok, unknown = ResultCode.OK, ResultCode.NOT_FOUND
    assert codes == [ok, unknown, ok, ok, unknown, ok]
    assert manager.sequences.stats().sequences == 1
    assert manager.sequences.free(ONE, [], ["parent"]) == [ok]
    assert not manager.pool.ref_cnt.any()


def test_a_sequence_named_in_two_ways_is_freed_once() -> None:
    manager = Manager(4)
    held = manager.allocate(T(8), request_id="r")
    ok, unknown = ResultCode.OK, ResultCode.NOT_FOUND
    assert manager.sequences.free(ONE, [held.sequence_id], ["r", "r"]) == [ok, unknown, unknown]
    manager.allocate(T(8), request_id="r")
    assert manager.sequences.free(ONE, [], ["r", "r"]) == [ok, unknown]
    assert manager.sequences.free(ONE, [], ["r"]) == [unknown]
    check_invariants(manager.sequences)
    assert manager.pool.num_free == 4


def test_a_request_id_names_its_owners_sequence_only() -> None:
    manager = Manager(8)
    mine, theirs = (manager.allocate(T(4), owner=owner, request_id="r") for owner in (ONE, TWO))
    assert manager.sequences.free(ONE, [], ["r"]) == [ResultCode.OK]
    assert manager.sequences.free(ONE, [], ["r"]) == [ResultCode.NOT_FOUND]
    assert manager.refs(mine.table) == [0]
    assert manager.refs(theirs.table) == [1]
    manager.allocate(U(4))
    assert manager.sequences.free(ONE, [], [""]) == [ResultCode.NOT_FOUND], "no retry key"


def test_two_threads_that_free_one_sequence_free_it_once() -> None:
    manager = Manager(4)
    for _ in range(20):
        held = manager.allocate(T(8))
        start, codes = threading.Barrier(2), []

        def free(held: Held = held, start: threading.Barrier = start, codes: list = codes) -> None:
            start.wait()
            with manager.sequences.lock:
                codes.extend(manager.sequences.free(ONE, [held.sequence_id]))

        threads = [threading.Thread(target=free) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(codes) == [ResultCode.OK, ResultCode.NOT_FOUND]
        check_invariants(manager.sequences)


def test_blocks_come_back_after_every_request() -> None:
    manager = Manager(8)
    for number in range(20):
        manager.fill([number * 100 + step for step in range(10)])
        stats = manager.sequences.stats()
        assert stats.referenced == 0
        assert stats.evictable + stats.blank == 8
    assert manager.sequences.stats().evictions > 0


def test_idle_books_balance_after_random_clients_of_a_common_prefix() -> None:
    rng = random.Random(3)
    manager = Manager(40)
    live: list[Held] = []
    for step in range(600):
        if live and rng.random() < 0.5:
            held = live.pop(rng.randrange(len(live)))
            if rng.random() < 0.5:
                manager.commit(held)
            manager.free(held)
            continue
        prompt = T(12) + [step % 7] * rng.randrange(1, 9)
        try:
            live.append(manager.allocate(prompt, owner=bytes([step % 64])))
        except NoRoomError:
            manager.free(live.pop(0))
    manager.free(*live)
    stats = manager.sequences.stats()
    assert (stats.referenced, stats.evictable + stats.blank) == (0, 40)

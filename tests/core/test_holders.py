"""Refusals for want of room say who holds most."""

from __future__ import annotations

from prefixcache.core.holders import MAX_AGE_S
from prefixcache.core.sessions import owner_digest
from prefixcache.errors import ExceedsPoolError, NoRoomError
from tests.core.manager import ONE, TWO, A, C, Manager, T, U, refused


def holders(manager: Manager) -> list[tuple[object, object, object]]:
    """What a refusal names now."""
    manager.clock_s += MAX_AGE_S
    error = refused(manager, NoRoomError, lambda: manager.allocate(C(64), owner=b"none of them"))
    fields = error.fields
    assert (fields["needed"], fields["free"]) == (16, manager.pool.num_free)
    named = []
    for place in (1, 2, 3, 4):
        if f"holder_{place}_blocks" in fields:
            named.append(
                (
                    fields[f"holder_{place}_name"],
                    fields[f"holder_{place}_digest"],
                    fields[f"holder_{place}_blocks"],
                )
            )
            assert f"{named[-1][2]} by " in error.message
            assert str(named[-1][1]) in error.message
    return named


def test_the_three_with_the_most_blocks_are_named_largest_first() -> None:
    manager = Manager(16)
    assert manager.allocate(T(4), owner=ONE)
    named = manager.sequences.live.sessions.open(60.0, "engine 3").session_id
    manager.allocate(U(12), owner=named)
    manager.allocate(A(8), owner=TWO)
    second = manager.allocate(C(4), owner=named)
    manager.allocate(C(8), owner=b"the smallest")
    manager.free(second)
    assert holders(manager) == [
        ("engine 3", owner_digest(named), 3),
        ("", owner_digest(TWO), 2),
        ("", owner_digest(b"the smallest"), 2),
    ]


def test_with_nobody_to_name_a_refusal_has_its_numbers() -> None:
    manager = Manager(16)
    held = manager.allocate(T(4))
    ticket = manager.begin(0, held)
    manager.free(held)
    assert holders(manager) == []
    manager.end(ticket)


def test_shared_blocks_count_for_each_sequence_and_lookahead_counts() -> None:
    manager = Manager(16)
    held = manager.allocate(T(8), num_lookahead_tokens=4)
    assert holders(manager) == [("", owner_digest(ONE), 3)]
    manager.commit(held)
    manager.fork(held, 2)
    assert holders(manager) == [("", owner_digest(ONE), 6)]


def test_refusals_close_together_name_the_same() -> None:
    manager = Manager(16)
    held = manager.allocate(T(8))
    assert holders(manager) == [("", owner_digest(ONE), 2)]
    manager.free(held)
    manager.allocate(U(12), owner=TWO)
    manager.clock_s -= MAX_AGE_S / 2
    assert holders(manager) == [("", owner_digest(ONE), 2)]
    assert holders(manager) == [("", owner_digest(TWO), 3)]


def test_what_never_fits_names_nobody() -> None:
    manager = Manager(4)
    manager.allocate(T(8))
    error = refused(manager, ExceedsPoolError, lambda: manager.allocate(C(17)))
    assert set(error.fields) == {"field", "needed", "num_blocks"}


def test_only_holders_of_the_own_account_are_named() -> None:
    manager = Manager(16)
    for account in (1, 2):
        manager.pool.set_account(account, account, 0, None)
    manager.allocate(T(8), owner=ONE, account=1)
    manager.allocate(U(12), owner=TWO, account=2)

    def named(account: int) -> list[object]:
        error = refused(
            manager,
            NoRoomError,
            lambda: manager.allocate(C(64), owner=b"none of them", account=account),
        )
        return [value for name, value in error.fields.items() if name.endswith("_digest")]

    assert named(1) == [owner_digest(ONE)]
    assert named(2) == [owner_digest(TWO)]
    assert named(0) == []

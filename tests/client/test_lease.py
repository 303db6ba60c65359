"""Which calls of a lease are under way, and what of that every request says."""

from __future__ import annotations

from typing import Any

from prefixcache.client.lease import Lease
from prefixcache.rpc.wire import twin


def order_of(request: Any) -> tuple[int, int]:
    order = (request.batch if hasattr(request, "batch") else request).order
    return order.number, order.settled


def begun(lease: Lease, *names: str) -> tuple[int, list[tuple[int, int]]]:
    requests = [twin(f"{name}Request")() for name in names]
    return lease.begin(*requests), [order_of(request) for request in requests]


def test_every_call_has_a_number_of_its_own_and_says_what_was_settled_before() -> None:
    lease = Lease(bytes(24), ttl_s=60.0, boot_id=bytes(16))
    for name in ("Allocate", "Append", "Commit", "Fork", "Truncate", "Free", "Prefill", "Decode"):
        number, orders = begun(lease, name)
        assert orders == [(number, number - 1)]
        lease.end(number)
    assert number == 8


def test_a_call_that_is_under_way_is_not_settled_nor_is_any_after_it() -> None:
    lease = Lease(bytes(24), ttl_s=60.0, boot_id=bytes(16))
    (first, _), (second, _), (third, _) = (begun(lease, "Append") for _ in range(3))
    lease.end(second)
    assert begun(lease, "Append") == (4, [(4, 0)])
    lease.end(first)
    assert begun(lease, "Append") == (5, [(5, 2)])
    lease.end(third)
    lease.end(third)
    assert begun(lease, "Append") == (6, [(6, 3)])


def test_the_calls_of_a_step_have_one_number() -> None:
    lease = Lease(bytes(24), ttl_s=60.0, boot_id=bytes(16))
    assert begun(lease, "Append", "Commit", "Allocate") == (1, [(1, 0)] * 3)


def test_calls_without_a_session_are_not_numbered() -> None:
    lease = Lease.without_session()
    request = twin("AppendRequest")()
    lease.end(lease.begin(request))
    assert not request.HasField("order")

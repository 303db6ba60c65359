"""Explain over the wire: every field, bad requests, and whose cache an operator may ask about."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from prefixcache.rpc._pb import admin_pb2, cache_pb2
from prefixcache.server.access import AccessControl
from prefixcache.server.auth_file import parse_auth_rules
from prefixcache.server.daemon import CacheOptions
from prefixcache.server.peer_tickets import PeerTickets
from prefixcache.types import KeyKind, MissReason
from tests.support.bearer import bearing, hash_of
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.stubs import Peer, Stubs, connected

SIZE = 4
PROMPT = list(range(1, 10))
INVALID = grpc.StatusCode.INVALID_ARGUMENT
ROLES = {
    "a": ["client"],
    "sharing-c": ["client"],
    "sharing-d": ["client"],
    "ops": ["admin", "client"],
}
RULES = {
    "identities": [
        {"token_sha256": hash_of(name), "tenant": name, "roles": roles}
        for name, roles in ROLES.items()
    ],
    "tenants": {"sharing-c": {"namespace": "shared"}, "sharing-d": {"namespace": "shared"}},
}


@pytest.fixture
def running() -> Iterator[RunningDaemon]:
    with running_daemon(CacheOptions(16, SIZE)) as running:
        yield running


@pytest.fixture
def stubs(running: RunningDaemon) -> Iterator[Stubs]:
    with connected(running.target) as stubs:
        yield stubs


def explain(stubs: Stubs, token_ids: list[int], **fields: Any) -> admin_pb2.ExplainResponse:
    request = admin_pb2.ExplainRequest(token_ids=token_ids, **fields)
    reply: admin_pb2.ExplainResponse = stubs.call("Explain", request)
    return reply


def fill(stubs: Stubs, token_ids: list[int], **fields: Any) -> None:
    """Allocate, commit, free."""
    peer = Peer(stubs)
    reply = peer.allocate(token_ids, **fields)
    peer.commit(reply.sequence_id, reply.num_cached_tokens, len(token_ids))
    peer.free(reply.sequence_id)


@pytest.mark.parametrize(
    ("ours", "wire", "prefix"),
    [
        (MissReason, admin_pb2.MissReason, "MISS_REASON_"),
        (KeyKind, admin_pb2.KeyKind, "KEY_KIND_"),
    ],
)
def test_the_enums_of_the_wire_are_ours(ours: type[enum.IntEnum], wire: Any, prefix: str) -> None:
    named = {name.removeprefix(prefix): value for name, value in wire.items()}
    assert named == {"UNSPECIFIED": 0} | {one.name: one.value for one in ours}


def test_a_miss_says_which_block_and_why(stubs: Stubs) -> None:
    hashes = stubs.lookup(PROMPT, want_hashes=True).block_hashes
    found = explain(stubs, PROMPT)
    assert found == admin_pb2.ExplainResponse(
        reason=admin_pb2.MISS_REASON_NEVER_CACHED, block_hash=hashes[0]
    )
    fill(stubs, PROMPT[:4])
    found = explain(stubs, PROMPT)
    assert found == admin_pb2.ExplainResponse(
        num_cached_tokens=4,
        num_cached_blocks=1,
        reason=admin_pb2.MISS_REASON_NEVER_CACHED,
        block_hash=hashes[1],
    )
    Peer(stubs).allocate(PROMPT)
    found = explain(stubs, PROMPT)
    assert (found.reason, found.num_pending_tokens) == (admin_pb2.MISS_REASON_PENDING, 4)


def test_how_long_ago_is_there_only_if_something_happened(stubs: Stubs) -> None:
    fill(stubs, PROMPT)
    assert not explain(stubs, PROMPT).HasField("age_s")
    stubs.reset()
    found = explain(stubs, PROMPT)
    assert found.reason == admin_pb2.MISS_REASON_RESET
    assert 0 <= found.age_s < 60
    for first in range(100, 172, 8):  # one more than there is room for
        fill(stubs, list(range(first, first + 8)))
    found = explain(stubs, list(range(100, 109)))
    assert found.reason == admin_pb2.MISS_REASON_EVICTED
    assert 0 <= found.age_s < 60


def test_a_divergence_has_the_token_or_the_keys() -> None:
    with (
        running_daemon(CacheOptions(16, SIZE, verify_hits=True)) as running,
        connected(running.target) as stubs,
    ):
        fill(stubs, PROMPT, extra_keys=cache_pb2.ExtraKeys(lora=cache_pb2.Lora(name="adapter")))
        found = explain(stubs, PROMPT)
        assert found.keeps_content
        assert found.divergence == admin_pb2.Divergence(
            key_differences=[
                admin_pb2.KeyDifference(kind=admin_pb2.KEY_KIND_LORA, in_cache="adapter")
            ]
        )
        fill(stubs, PROMPT)
        found = explain(stubs, [*PROMPT[:4], 0, 0, 0, 0])
        assert found.divergence == admin_pb2.Divergence(first_different_token=4)
        assert not explain(stubs, PROMPT).HasField("divergence")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1], "full_hit": 9}, "full_hit"),
        ({"token_ids": [1], "cache_use": 9}, "cache_use"),
        ({"token_ids": [1], "tenant": "a"}, "tenant"),
        (
            {"token_ids": [1], "extra_keys": cache_pb2.ExtraKeys(lora=cache_pb2.Lora(path="p"))},
            "extra_keys.lora.name",
        ),
    ],
)
def test_bad_requests_are_refused(stubs: Stubs, fields: dict[str, Any], field: str) -> None:
    refusal = stubs.refused("Explain", admin_pb2.ExplainRequest(**fields))
    assert (refusal.code, refusal.field) == (INVALID, field)


def test_a_prompt_of_more_tokens_than_a_call_may_have_is_refused(
    running: RunningDaemon, stubs: Stubs
) -> None:
    limit = running.daemon.info.limits.max_tokens_per_call
    request = admin_pb2.ExplainRequest(token_ids=range(limit + 1))
    assert stubs.refused("Explain", request).field == "token_ids"


def test_asking_changes_nothing_but_the_count_of_calls(stubs: Stubs) -> None:
    fill(stubs, PROMPT)
    before = stubs.stats()
    for _ in range(3):
        explain(stubs, [*PROMPT, 1, 2, 3])
    after = stubs.stats()
    for stats in (before, after):
        del stats.calls[:]
        stats.uptime_s = 0
    assert after == before


# ---- tenants


@pytest.fixture
def guarded() -> Iterator[RunningDaemon]:
    tickets = PeerTickets()
    access = AccessControl(parse_auth_rules(RULES), tickets)
    options = CacheOptions(64, SIZE, verify_hits=True)
    with running_daemon(options, access=access) as running:
        yield running


@pytest.mark.parametrize("kind", ["stored", "live"])
def test_an_operator_sees_a_tenants_cache_only_by_naming_it(
    guarded: RunningDaemon, kind: str
) -> None:
    target = guarded.target
    with bearing(target, "a") as client, bearing(target, "ops") as ops:
        if kind == "stored":
            fill(client, PROMPT)
        else:
            Peer(client).allocate(PROMPT)
        other = [*PROMPT[:3], 0, 0]
        for tokens in (PROMPT, other):
            found = explain(ops, tokens)
            assert found.reason == admin_pb2.MISS_REASON_NEVER_CACHED
            assert found == explain(ops, tokens, tenant="ops")
            found = explain(ops, tokens, tenant="sharing-c")
            assert found.reason == admin_pb2.MISS_REASON_NEVER_CACHED
        if kind == "stored":
            assert explain(ops, PROMPT, tenant="a").num_cached_tokens == 8
            assert explain(ops, other, tenant="a").divergence.first_different_token == 3
        else:
            assert explain(ops, PROMPT, tenant="a").reason == admin_pb2.MISS_REASON_PENDING


def test_a_namespace_is_looked_at_by_the_name_of_any_of_its_tenants(
    guarded: RunningDaemon,
) -> None:
    with bearing(guarded.target, "sharing-c") as client, bearing(guarded.target, "ops") as ops:
        fill(client, PROMPT)
        assert explain(ops, PROMPT, tenant="sharing-d").num_cached_tokens == 8
        refusal = ops.refused("Explain", admin_pb2.ExplainRequest(token_ids=[1], tenant="shared"))
        assert (refusal.code, refusal.field) == (INVALID, "tenant")


def test_it_takes_the_role_admin(guarded: RunningDaemon) -> None:
    with bearing(guarded.target, "a") as client:
        for tenant in ("", "a", "ops"):
            request = admin_pb2.ExplainRequest(token_ids=PROMPT, tenant=tenant)
            refusal = client.refused("Explain", request)
            assert refusal.code is grpc.StatusCode.PERMISSION_DENIED

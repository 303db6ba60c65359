"""What a scrape says: the names, and that each number is the one that GetStats gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields

import pytest
from prometheus_client.core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics

from prefixcache import __version__
from prefixcache.core.form import FORM
from prefixcache.core.stats import Counters
from prefixcache.core.tenants import TenantQuota
from prefixcache.rpc import wire
from prefixcache.rpc._pb import session_pb2
from prefixcache.server.call_counts import DURATION_BOUNDS_S
from prefixcache.server.daemon import CacheOptions
from prefixcache.server.metrics import COUNTERS, make_registry
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.scrape import Scrape, assert_agreement, scrape
from tests.support.stubs import Peer, Refused, Stubs, connected

NUM_BLOCKS, BLOCK_SIZE = 8, 4


@pytest.fixture
def running() -> Iterator[RunningDaemon]:
    with running_daemon(CacheOptions(NUM_BLOCKS, BLOCK_SIZE)) as running:
        yield running


@pytest.fixture
def stubs(running: RunningDaemon) -> Iterator[Stubs]:
    with connected(running.target) as stubs:
        yield stubs


def agreed(running: RunningDaemon, stubs: Stubs) -> Scrape:
    """A scrape, after its comparison with GetStats."""
    found, stats = scrape(running), stubs.stats()
    assert_agreement(found, stats)
    return found


def test_a_fresh_daemon_says_zeros(running: RunningDaemon, stubs: Stubs) -> None:
    found = agreed(running, stubs)
    assert found["prefixcache_blocks", {"state": "blank"}] == NUM_BLOCKS
    assert found.total("prefixcache_rpc_total") == 0


def test_blocks_that_a_lost_writer_may_still_write_to_are_a_state_of_their_own(
    running: RunningDaemon, stubs: Stubs
) -> None:
    sequences = running.daemon.sequences
    opened = stubs.call("OpenSession", session_pb2.OpenSessionRequest(ttl_s=60))
    with sequences.lock:
        sequences.live.sessions.attach(opened.session_id, 1)
    Peer(stubs, owner=opened.session_id).allocate(range(6))
    with sequences.lock:
        sequences.live.end_session(sequences.live.sessions.find(opened.session_id))
    found = agreed(running, stubs)
    assert found["prefixcache_blocks", {"state": "quarantined"}] == 2
    assert found["prefixcache_blocks", {"state": "referenced"}] == 0
    with sequences.lock:
        sequences.live.end_writer(1)
    assert agreed(running, stubs)["prefixcache_blocks", {"state": "blank"}] == NUM_BLOCKS


def test_numbers_are_those_of_get_stats(running: RunningDaemon, stubs: Stubs) -> None:
    peer = Peer(stubs)
    for start in (0, 0, 100, 200, 0):
        reply = peer.allocate(range(start, start + 14))
        cached = reply.num_cached_tokens
        peer.commit(reply.sequence_id, cached, 14 - cached)
        assert agreed(running, stubs)["prefixcache_sequences"] == 1
        peer.free(reply.sequence_id)
    peer.allocate(range(5), resumed=True)
    with pytest.raises(Refused):
        peer.allocate(range(500, 531))
    found = agreed(running, stubs)
    assert found["prefixcache_hit_tokens_total"] == 12 + 4
    assert found["prefixcache_allocation_refused_total"] == 1
    assert found["prefixcache_evictions_total", {"reason": "room"}] > 0
    stubs.reset(force=True)
    assert agreed(running, stubs)["prefixcache_resets_total"] == 1


def test_every_counter_of_the_core_has_a_metric() -> None:
    shown = {value.field for family in COUNTERS for value in family.values}
    assert {field.name for field in fields(Counters)} | {"evictions"} == shown


def test_calls_are_there_by_rpc_and_code(running: RunningDaemon, stubs: Stubs) -> None:
    peer = Peer(stubs)
    peer.allocate(range(4))
    with pytest.raises(Refused):
        peer.allocate(range(1000))
    found = scrape(running)
    for code in ("OK", "INVALID_ARGUMENT"):
        assert found["prefixcache_rpc_total", {"method": "Allocate", "code": code}] == 1
    allocate = {"method": "Allocate"}
    assert found["prefixcache_rpc_duration_seconds_count", allocate] == 2
    assert 0 < found["prefixcache_rpc_duration_seconds_sum", allocate] < 60
    for method in wire.methods():
        assert ("prefixcache_rpc_total", {"method": method.name, "code": "OK"}) in found


def test_buckets_are_cumulative_and_end_with_all(running: RunningDaemon, stubs: Stubs) -> None:
    for _ in range(5):
        stubs.lookup(range(4))
    buckets = scrape(running).buckets("prefixcache_rpc_duration_seconds", {"method": "Lookup"})
    assert [bound for bound, _ in buckets] == [*DURATION_BOUNDS_S, float("inf")]
    counts = [count for _, count in buckets]
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_what_runs_and_what_it_holds_are_labels(running: RunningDaemon) -> None:
    found = scrape(running)
    assert found.labels("prefixcache_build_info") == {
        "version": __version__,
        "api_version": "v1",
        "core": FORM,
    }
    pool = found.labels("prefixcache_pool_info")
    assert (pool["device"], pool["block_size"], pool["num_blocks"]) == ("none", "4", "8")
    assert pool["layout_fingerprint"] == running.daemon.info.layout_fingerprint.hex()


def test_the_process_and_its_collector_of_garbage_are_there(running: RunningDaemon) -> None:
    found = scrape(running)
    assert found["process_resident_memory_bytes"] > 0
    assert ("python_gc_collections_total", {"generation": "0"}) in found


def families(running: RunningDaemon) -> Mapping[str, Metric]:
    registry = make_registry(running.daemon, running.server.call_counts)
    text = generate_openmetrics(registry).decode()
    return {family.name: family for family in read_openmetrics(text)}


def test_openmetrics_reads_as_the_standard_says(running: RunningDaemon) -> None:
    """The parser checks types, suffixes, units, the order of buckets and the end."""
    found = families(running)
    assert found["prefixcache_rpc_duration_seconds"].type == "histogram"
    assert found["prefixcache_requests"].type == "counter"
    assert found["prefixcache_build"].type == "info"
    assert all(family.documentation for family in found.values())


def test_clients_cannot_make_labels(running: RunningDaemon, stubs: Stubs) -> None:
    """The samples of a daemon that thousands of owners and names have used are the same."""
    peer = Peer(stubs)
    peer.free(peer.allocate(range(3), request_id="first").sequence_id)
    before = scrape(running).names()
    for number in range(50):
        peer = Peer(stubs)
        peer.free(peer.allocate(range(3), request_id=f"request {number}").sequence_id)
    after = scrape(running)
    assert after.names() == before
    assert len(after) < 1000


# ---- ages of blocks


def test_ages_of_blocks_are_seconds_since_their_last_use() -> None:
    now_s = 0.0
    with (
        running_daemon(CacheOptions(2, BLOCK_SIZE), clock=lambda: now_s) as running,
        connected(running.target) as stubs,
    ):
        peer = Peer(stubs)

        def serve(start: int) -> None:
            reply = peer.allocate(range(start, start + 8))
            peer.commit(reply.sequence_id, reply.num_cached_tokens, 8 - reply.num_cached_tokens)
            peer.free(reply.sequence_id)

        serve(0)
        now_s = 50.0
        serve(0)  # two blocks hit, after 50 s
        now_s = 90.0
        serve(100)  # evicts both, 90 s old and unused for 40 s
        now_s = 290.0
        serve(0)  # asks for them again after 200 s, and evicts those of 100
        found = agreed(running, stubs)
    for name, count, seconds in (
        ("block_reuse_gap", 2, 100),
        ("block_lifetime", 4, 2 * 90 + 2 * 200),
        ("block_idle_before_evict", 4, 2 * 40 + 2 * 200),
        ("evict_to_reuse", 2, 2 * 200),
    ):
        assert found[f"prefixcache_{name}_seconds_count"] == count
        assert found[f"prefixcache_{name}_seconds_sum"] == seconds
    buckets = dict(found.buckets("prefixcache_block_idle_before_evict_seconds", {}))
    assert (buckets[30.0], buckets[60.0], buckets[300.0]) == (0, 2, 4)


# ---- tenants


def test_tenants_that_the_operator_named_are_labels(running: RunningDaemon) -> None:
    assert not any("tenant" in name for name, _ in scrape(running).names())
    quotas = [TenantQuota("a", "shared", 3, 5), TenantQuota("b", "b")]
    with running.daemon.sequences.lock:
        running.daemon.sequences.tenants.apply(quotas)
    found = scrape(running)
    a = {"tenant": "a", "namespace": "shared"}
    assert found["prefixcache_tenant_quota_blocks", {**a, "limit": "guaranteed"}] == 3
    assert found["prefixcache_tenant_quota_blocks", {**a, "limit": "max"}] == 5
    b = {"tenant": "b", "namespace": "b"}
    assert ("prefixcache_tenant_quota_blocks", {**b, "limit": "max"}) not in found
    for state in ("held", "evictable"):
        assert found["prefixcache_tenant_blocks", {**b, "state": state}] == 0
    for name in ("refused", "evictions"):
        assert found[f"prefixcache_tenant_{name}_total", b] == 0

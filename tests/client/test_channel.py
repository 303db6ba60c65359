"""Repeats, deadlines, sizes and targets: how calls travel."""

from __future__ import annotations

import json
import time

import grpc
import numpy as np
import pytest

from prefixcache.client.channel import REPEATABLE, channel_options, service_config
from prefixcache.errors import (
    DeadlineExceededError,
    DrainingError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from prefixcache.rpc import wire
from prefixcache.rpc._pb import admin_pb2, cache_pb2
from prefixcache.storage.layout import KVLayout, LatentLayout, Quantization
from tests.client.fake_daemon import (
    BLOCK_SIZE,
    HANG,
    NUM_LAYERS,
    allocated,
    fake_daemon,
    info_reply,
)
from tests.client.twins import next_event, once_it_is_back, open_client
from tests.support.arrivals import ends_too_early
from tests.support.waiting import WAIT_S

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
Q = np.ones((1, 2, 8), dtype=np.float32)


def _call_everything(client, fake) -> None:
    """One call of each RPC."""
    fake.will("Allocate", allocated(7, blocks=(0, 1)))
    fake.will(
        "Append", cache_pb2.AppendResponse(result_codes=[1], num_new_blocks=[0], num_copies=[0])
    )
    fake.will("Explain", admin_pb2.ExplainResponse(reason=admin_pb2.MISS_REASON_PENDING))
    fake.will("Commit", cache_pb2.CommitResponse(result_codes=[1], num_cached_blocks=[1]))
    fake.will("Fork", cache_pb2.ForkResponse(sequence_ids=[8]))
    client.server_info()
    client.lookup([1])
    client.explain([1])
    sequence = client.sequence([1, 2, 3, 4, 5])
    sequence.append([6])
    sequence.commit(5)
    sequence.fork()
    sequence.truncate(3)
    sequence.prefill(0, Q, Q, Q)
    sequence.decode(0, Q, Q, Q)
    sequence.free()
    client.stats()
    client.list_sequences()
    client.list_sessions()
    client.reset_cache()
    with client.steps() as steps:
        steps.run(steps.new_step())
    change = admin_pb2.CacheEvent(cleared=admin_pb2.CacheCleared())
    fake.will("WatchEvents", admin_pb2.WatchEventsResponse(events=[change]))
    with client.watch_events() as stream:
        next_event(stream)


def test_every_rpc_is_classified_as_safe_to_repeat_or_not():
    assert REPEATABLE | {"ResetCache", "Step", "KeepAlive"} == {
        method.name for method in wire.methods()
    }
    (config,) = json.loads(service_config())["methodConfig"]
    assert {name["method"] for name in config["name"]} == REPEATABLE
    assert config["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]


def test_calls_that_are_safe_to_repeat_are_while_the_daemon_is_unavailable(client_kind, fake):
    for method in REPEATABLE:
        fake.will(method, UNAVAILABLE)
    with open_client(client_kind, fake.target) as client:
        _call_everything(client, fake)
    attempts = {method: len(requests) for method, requests in fake.requests.items()}
    attempts.pop("KeepAlive", None)  # from a thread or task of its own
    assert attempts == dict.fromkeys(REPEATABLE, 2) | {"ResetCache": 1, "Step": 1}
    for method in REPEATABLE:
        first, *others = fake.raw[method]
        assert all(raw == first for raw in others), method


def test_a_reset_is_not_repeated(client, fake):
    fake.will("ResetCache", UNAVAILABLE)
    with pytest.raises(UnavailableError):
        client.reset_cache()
    assert len(fake.requests["ResetCache"]) == 1


def test_repeats_end_after_four_attempts(client, fake):
    fake.will("Lookup", *[UNAVAILABLE] * 5)
    with pytest.raises(UnavailableError):
        client.lookup([1])
    assert len(fake.requests["Lookup"]) == 4


def test_a_call_that_a_draining_daemon_refused_is_not_repeated(client, fake):
    fake.will("Lookup", DrainingError())
    with pytest.raises(DrainingError):
        client.lookup([1])
    assert len(fake.requests["Lookup"]) == 1


@pytest.mark.parametrize(
    "status", [code for code in grpc.StatusCode if code not in (grpc.StatusCode.OK, UNAVAILABLE)]
)
def test_no_other_status_is_repeated(client, fake, status):
    fake.will("Lookup", status)
    with pytest.raises(Exception, match=status.name):
        client.lookup([1])
    assert len(fake.requests["Lookup"]) == 1


def test_a_large_request_is_repeated_too(client, fake):
    fake.will("Allocate", UNAVAILABLE, allocated(7, blocks=(0,)))
    fake.will("Prefill", UNAVAILABLE)
    q = np.ones((2**15, 4, 8), dtype=np.float32)
    sequence = client.sequence(np.arange(2**20))
    out = sequence.prefill(0, q, q, q)
    assert len(fake.raw["Allocate"][1]) > 4 * 2**20
    assert len(fake.raw["Prefill"][1]) > 12 * 2**20
    np.testing.assert_array_equal(out, q)


def test_messages_over_the_limit_of_the_client_are_refused_before_the_daemon(client_kind, fake):
    with open_client(client_kind, fake.target, max_message_bytes=1000) as client:
        client.lookup(range(200))
        with pytest.raises(Exception, match="larger than max"):
            client.lookup(range(300))
    assert len(fake.requests["Lookup"]) == 1


def test_a_call_ends_at_the_deadline_of_the_client(client_kind, fake):
    fake.will("Lookup", HANG, HANG, HANG)
    with open_client(client_kind, fake.target, timeout_s=50.0) as client:
        client.server_info()
        started = time.monotonic()
        ends_too_early(
            lambda limit_s: client.lookup([1], timeout_s=limit_s), lambda: fake.requests["Lookup"]
        )
        assert time.monotonic() - started < 40
    (deadline,) = fake.deadlines_s["GetServerInfo"]
    assert 25 < deadline < 51
    assert fake.deadlines_s["Lookup"][0] < 21


def test_every_call_has_a_deadline_of_its_own_or_the_one_of_the_client(client_kind, fake):
    with open_client(client_kind, fake.target, timeout_s=100.0) as client:
        _call_everything(client, fake)
    # From a thread or task of its own, without a limit, as long as the session lives.
    fake.deadlines_s.pop("KeepAlive", None)
    assert set(fake.deadlines_s) == {method.name for method in wire.methods()} - {"KeepAlive"}
    # A stream lives as long as its engine; each wait on it has its own limit.
    for name in ("Step", "WatchEvents"):
        (of_the_stream,) = fake.deadlines_s.pop(name)
        assert of_the_stream > 1e9
    (of_the_end,) = fake.deadlines_s.pop("CloseSession")
    assert 0 < of_the_end < WAIT_S + 1, "the daemon may be gone, and a client closes all the same"
    assert all(WAIT_S + 10 < deadline < 101 for [deadline] in fake.deadlines_s.values())


def test_repeats_count_towards_the_deadline(client_kind, fake):
    fake.will("Lookup", UNAVAILABLE, HANG)
    with open_client(client_kind, fake.target) as client:
        client.server_info()
        with pytest.raises(DeadlineExceededError):
            client.lookup([1], timeout_s=0.7)


def test_a_daemon_that_is_not_there_is_unavailable(client_kind, tmp_path):
    target = f"unix:{tmp_path / 'none.sock'}"
    with open_client(client_kind, target) as client, pytest.raises(UnavailableError):
        client.stats()


def test_nothing_connects_before_the_first_call(client_kind, tmp_path):
    with open_client(client_kind, f"unix:{tmp_path / 'none.sock'}"):
        pass


@pytest.mark.parametrize("target", ["", "localhost", "unix:", "host:port", "http://host:1", ":1"])
def test_a_target_that_is_no_address_is_refused(client_kind, target):
    with pytest.raises(InvalidArgumentError) as caught, open_client(client_kind, target):
        pass
    assert caught.value.field == "target"


def test_a_client_needs_a_target_or_a_channel_and_not_both(client_kind, fake):
    with pytest.raises(InvalidArgumentError), open_client(client_kind):
        pass
    with (
        grpc.insecure_channel(fake.target) as channel,
        pytest.raises(InvalidArgumentError),
        open_client(client_kind, fake.target, channel=channel),
    ):
        pass


def test_a_channel_that_was_given_stays_open(fake):
    with grpc.insecure_channel(fake.target, options=channel_options()) as channel:
        for _ in range(2):
            with open_client("sync", channel=channel) as client:
                client.stats()
    assert len(fake.requests["GetStats"]) == 2


def test_a_proxy_of_the_environment_is_not_used(client_kind, fake, monkeypatch):
    for name in ("grpc_proxy", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    with open_client(client_kind, fake.target) as client:
        client.stats()


def test_a_closed_client_says_so(client_kind, fake):
    with open_client(client_kind, fake.target) as client:
        client.stats()
        client.close()
        with pytest.raises(FailedPreconditionError, match="closed"):
            client.stats()
        client.close()


def test_the_first_call_asks_once_what_the_daemon_is(client, fake):
    client.stats()
    client.lookup([1])
    client.stats()
    assert len(fake.requests["GetServerInfo"]) == 1
    assert fake.requests["GetServerInfo"][0].expected_fingerprint == b""
    client.server_info()
    # A daemon that came back with another layout refuses.
    assert fake.requests["GetServerInfo"][1].expected_fingerprint == bytes(range(32))


def test_the_expected_fingerprint_goes_with_the_first_call(client_kind, fake):
    with open_client(client_kind, fake.target, expected_fingerprint=b"f" * 32) as client:
        client.stats()
    assert fake.requests["GetServerInfo"][0].expected_fingerprint == b"f" * 32


def test_a_first_call_that_failed_is_made_again(client, fake):
    fake.will("GetServerInfo", grpc.StatusCode.INTERNAL)
    with pytest.raises(InternalError):
        client.stats()
    client.stats()
    assert len(fake.requests["GetStats"]) == 1


def test_server_info_has_all_of_the_reply(client, fake):
    fake.will("GetServerInfo", info_reply(verify_hits=True, model_name="m", model_revision="r"))
    info = client.server_info()
    assert (info.version, info.boot_id, info.num_blocks) == ("9.9.9", bytes(range(16)), 100)
    assert (info.layout.num_layers, info.layout.block_size, info.layout.dtype) == (2, 4, "float32")
    assert (info.fingerprint, info.verify_hits) == (bytes(range(32)), True)
    assert (info.model_name, info.model_revision) == ("m", "r")
    assert (info.max_message_bytes, info.max_fork_children) == (2**28, 256)
    assert info.max_step_allocates == 3
    assert info.capabilities == ("attention",)
    without = info_reply(device="none")
    without.ClearField("layout")
    fake.will("GetServerInfo", without)
    assert client.server_info().layout is None


@pytest.mark.parametrize(
    ("message", "layout"),
    [
        (
            {"num_kv_heads": 2, "head_dim": 8, "value_dim": 8},
            KVLayout(NUM_LAYERS, 2, 8, BLOCK_SIZE, "float16"),
        ),
        (
            {
                "num_kv_heads": 2,
                "head_dim": 8,
                "value_dim": 8,
                "quantization": cache_pb2.Quantization(dtype="int8", scales="tensor"),
            },
            KVLayout(NUM_LAYERS, 2, 8, BLOCK_SIZE, "float16", Quantization("int8", "tensor")),
        ),
        (
            {"num_kv_heads": 1, "head_dim": 24, "value_dim": 16, "latent_dim": 16, "rope_dim": 8},
            LatentLayout(NUM_LAYERS, 16, 8, BLOCK_SIZE, "float16"),
        ),
    ],
    ids=["heads", "quantised", "latent"],
)
def test_server_info_says_how_kv_are_stored(client, fake, message, layout):
    described = cache_pb2.KVLayout(num_layers=NUM_LAYERS, dtype="float16", **message)
    fake.will("GetServerInfo", info_reply(layout=described))
    assert client.server_info().layout == layout


def test_a_client_outlives_a_restart_of_the_daemon(client_kind, tmp_path):
    address = f"unix:{tmp_path / 'd.sock'}"
    with open_client(client_kind, address) as client:
        with fake_daemon(address):
            client.stats()
        with pytest.raises(UnavailableError):
            client.reset_cache()
        with fake_daemon(address) as second:
            once_it_is_back(client.stats)
        assert len(second.requests["GetStats"]) == 1

"""What is done for a call before it has a thread: its request is asked for, and not too early."""

from __future__ import annotations

import contextvars
import threading
import tomllib
from collections.abc import Iterator
from types import GeneratorType, SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc import _server

from prefixcache.errors import UnauthenticatedError
from prefixcache.rpc._pb import cache_pb2
from prefixcache.server.access import AccessControl
from prefixcache.server.arrivals import REQUEST_TIMEOUT_S
from prefixcache.server.auth_file import parse_auth_rules
from prefixcache.server.daemon import CacheOptions
from prefixcache.server.handlers import run_in
from prefixcache.server.incoming_calls import let_ask_early, with_request_asked_for
from prefixcache.server.peer_tickets import PeerTickets
from prefixcache.server.rpc_server import make_server
from prefixcache.server.workers import Workers
from tests.support.bearer import bearing, hash_of
from tests.support.daemon import running_daemon
from tests.support.stubs import METHODS, call_without_request, connected
from tests.support.waiting import until

_TIMEOUT_S = 20.0


@pytest.fixture
def workers() -> Iterator[Workers]:
    """One thread, which has nothing to do."""
    made = Workers(1, "test")
    made.submit(int).result(_TIMEOUT_S)
    assert made.wait_until_idle(_TIMEOUT_S)
    yield made
    made.shutdown()


@pytest.fixture
def warm() -> Iterator[Any]:
    """A daemon whose only thread has answered before; the clock is `now_s`."""
    now_s = [0.0]
    with (
        running_daemon(CacheOptions(16, 4), max_workers=1, clock=lambda: now_s[0]) as running,
        connected(running.target) as stubs,
    ):
        stubs.stats()
        assert running.server._workers.wait_until_idle(_TIMEOUT_S)
        yield SimpleNamespace(running=running, stubs=stubs, now_s=now_s)


class Requests:
    """What grpcio gives a handler that takes a stream, as far as it is looked into."""

    def __init__(self, message: str) -> None:
        self.message, self.times_asked = message, 0

    def _raise_or_start_receive_message(self) -> None:
        self.times_asked += 1

    def _look_for_request(self) -> str:
        return self.message

    def __iter__(self) -> Iterator[str]:
        return iter(())


def anyone(context: grpc.ServicerContext) -> None:
    """Admits all."""


def nobody(context: grpc.ServicerContext) -> None:
    raise UnauthenticatedError("the call has none")


def submit(workers: Workers, requests: Requests, admit: Any = anyone) -> Any:
    """As grpcio submits a call; its result is what the handler finds."""

    def handler(requests: Iterator[str]) -> list[str]:
        return list(requests)

    if admit is not None:
        let_ask_early(handler, admit)
    state = SimpleNamespace(condition=threading.Condition())
    run = contextvars.Context().run

    def respond(event: object, state: object, handler: Any, get_requests: Any) -> list[str]:
        found: list[str] = handler(get_requests())
        return found

    return workers.submit(run, respond, object(), state, handler, lambda: requests)


def test_grpcio_lets_the_request_be_asked_for_before_a_thread_runs(workers: Workers) -> None:
    """If not, grpcio was changed: each call takes longer by the time to wake a thread."""
    kinds = []

    def echo(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        kinds.append(type(requests))
        return next(requests) + b"".join(requests)

    run_in(workers, echo)
    let_ask_early(echo, anyone)
    server = make_server(workers, 2**20, 4)
    server.add_registered_method_handlers(
        "Echo", {"Echo": grpc.stream_unary_rpc_method_handler(echo)}
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_unary("/Echo/Echo")
        for messages in ([b"one"], [b"one", b"two", b"three"], [bytes(2**19)]):
            assert workers.wait_until_idle(_TIMEOUT_S)
            assert call(iter(messages), timeout=_TIMEOUT_S) == b"".join(messages)
    server.stop(None).wait()
    assert kinds == [GeneratorType] * 3


def test_a_call_that_gets_a_thread_at_once_has_its_request_asked_for(workers: Workers) -> None:
    requests = Requests("a request")
    assert submit(workers, requests).result(_TIMEOUT_S) == ["a request"]
    assert requests.times_asked == 1


def test_nothing_asks_for_the_request_of_a_call_that_waits_for_a_thread(workers: Workers) -> None:
    """It would lie in memory, however large, while its sender makes the next call."""
    busy = threading.Event()
    workers.submit(busy.wait)
    requests = Requests("a request")
    later = submit(workers, requests)
    assert workers.num_waiting == 1
    busy.set()
    assert later.result(_TIMEOUT_S) == []
    assert requests.times_asked == 0


def test_only_handlers_that_say_so_are_helped(workers: Workers) -> None:
    requests = Requests("a request")
    assert submit(workers, requests, admit=None).result(_TIMEOUT_S) == []
    assert requests.times_asked == 0


def test_nothing_asks_for_the_request_of_a_caller_who_is_refused(workers: Workers) -> None:
    """It would fill memory for callers without credentials."""
    requests = Requests("a request")
    assert submit(workers, requests, nobody).result(_TIMEOUT_S) == []
    assert requests.times_asked == 0


def test_a_daemon_asks_for_requests_of_known_callers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = f"[[identities]]\ntoken_sha256 = '{hash_of('known')}'\ntenant = 'a'\n"
    access = AccessControl(parse_auth_rules(tomllib.loads(rules)), PeerTickets())
    asked = []
    ask = _server._RequestIterator._raise_or_start_receive_message
    monkeypatch.setattr(
        _server._RequestIterator,
        "_raise_or_start_receive_message",
        lambda requests: (asked.append(requests), ask(requests))[1],
    )
    with (
        running_daemon(CacheOptions(16, 4), max_workers=1, access=access) as running,
        bearing(running.target, "known") as known,
        connected(running.target) as unknown,
    ):
        known.lookup([1])  # starts the thread
        for stubs, name in ((unknown, "Lookup"), (known, "ResetCache")):
            asked.clear()
            assert running.server._workers.wait_until_idle(_TIMEOUT_S)
            assert stubs.refused(name, b"").code.name in ("UNAUTHENTICATED", "PERMISSION_DENIED")
            assert asked == []
        assert running.server._workers.wait_until_idle(_TIMEOUT_S)
        known.lookup([1])
        assert len(asked) == 1


@pytest.mark.parametrize(
    "args",
    [(), (1,), (int, None, None, None, None), (print, object(), object(), let_ask_early, list)],
    ids=len,
)
def test_what_is_no_call_as_grpcio_submits_it_stays_as_it_is(args: tuple[Any, ...]) -> None:
    assert with_request_asked_for(args) is args


def test_a_silent_peer_of_a_warm_thread_is_cut(warm: Any) -> None:
    over = threading.Event()
    call = call_without_request(warm.stubs, "Lookup", over)
    until(lambda: len(warm.running.server._arrivals) == 1)
    warm.now_s[0] = REQUEST_TIMEOUT_S
    warm.running.sweep()
    assert call.exception(timeout=_TIMEOUT_S).code() is grpc.StatusCode.CANCELLED
    assert warm.stubs.stats().num_blocks == 16
    over.set()


def test_a_call_without_a_request_is_refused_by_a_warm_thread(warm: Any) -> None:
    call = warm.stubs.channel.stream_unary(METHODS["Lookup"].path)
    with pytest.raises(grpc.RpcError, match="request: is missing") as refused:
        call(iter(()), timeout=_TIMEOUT_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_call_that_is_cancelled_before_its_request_came_frees_its_warm_thread(warm: Any) -> None:
    over = threading.Event()
    for _ in range(5):
        call = call_without_request(warm.stubs, "Allocate", over)
        until(lambda: len(warm.running.server._arrivals) == 1)
        call.cancel()
        until(lambda: len(warm.running.server._arrivals) == 0)
        assert warm.stubs.stats().sequences == 0
    over.set()


def test_a_request_larger_than_the_flow_control_window_comes_whole(warm: Any) -> None:
    request = cache_pb2.LookupRequest(token_ids=range(1, 200_001))
    assert warm.stubs.call("Lookup", request).num_blocks_needed == 200_000 // 4

"""The daemon's RPCs without our client: declared messages in, declared messages out.

`Stubs` calls any RPC by its name, with a message or with hand-made bytes; `Peer` is one owner's
calls with plain values. A status other than OK raises `Refused`, read from the wire here and not
by the code under test.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from prefixcache.rpc import wire
from prefixcache.rpc._pb import admin_pb2, attention_pb2, cache_pb2
from prefixcache.types import PLAIN_ATTENTION, AttentionOptions

TIMEOUT_S = 60.0
"""Far above what any call takes: a test that hangs fails instead."""

METHODS = {method.name: method for method in wire.methods() if not method.is_stream}
"""The unary RPCs."""
STREAMS = {method.name: method for method in wire.methods() if method.is_stream}


class PartRefused(Exception):
    """A call that was refused, and what its status carries."""

    def __init__(self, status: status_pb2.Status) -> None:
        self.code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
        self.message: str = status.message
        super().__init__(f"{self.code.name}: {self.message}")
        self.infos: list[error_details_pb2.ErrorInfo] = []
        self.retry_delay_s: float | None = None
        for detail in status.details:
            info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                self.infos.append(info)
            elif detail.Unpack(retry):
                self.retry_delay_s = retry.retry_delay.ToTimedelta().total_seconds()

    @property
    def reason(self) -> str:
        return self.infos[0].reason if self.infos else ""

    @property
    def numbers(self) -> dict[str, str]:
        return dict(self.infos[0].metadata) if self.infos else {}

    @property
    def field(self) -> str:
        return self.numbers.get("field", "")


class Refused(PartRefused):
    """A call that ended with a status other than OK."""

    def __init__(self, error: grpc.RpcError) -> None:
        plain = status_pb2.Status(code=error.code().value[0], message=error.details() or "")
        status = plain
        for key, value in error.trailing_metadata() or ():
            if key == "grpc-status-details-bin":
                status = status_pb2.Status.FromString(value)
        assert status.code == plain.code, "the two codes of a status differ"
        assert status.message == plain.message, "the two messages of a status differ"
        super().__init__(status)


class Stubs:
    """Every RPC of every service over one channel; `stream` opens those that are streams."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self._calls = {
            name: channel.unary_unary(
                method.path,
                request_serializer=_bytes_of,
                response_deserializer=method.response.FromString,
            )
            for name, method in METHODS.items()
        }

    def call(self, name: str, request: Message | bytes, timeout_s: float = TIMEOUT_S) -> Any:
        """The reply of RPC `name`; raises Refused."""
        try:
            return self._calls[name](request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise Refused(error) from error

    def start(self, name: str, request: Message | bytes, timeout_s: float = TIMEOUT_S) -> Any:
        """Begin a call and return its future at once; `finish` it."""
        return self._calls[name].future(request, timeout=timeout_s)

    def finish(self, future: Any) -> Any:
        try:
            return future.result(timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise Refused(error) from error

    def refused(self, name: str, request: Message | bytes) -> Refused:
        """Like `call` for one that must be refused; returns how."""
        try:
            reply = self.call(name, request)
        except Refused as refusal:
            return refusal
        raise AssertionError(f"{name} was not refused: {reply}")

    @contextmanager
    def steps(self, timeout_s: float = TIMEOUT_S) -> Iterator[StreamCall]:
        """An open Step stream, half-closed at the end."""
        with self.stream("Step", timeout_s) as call:
            yield call

    @contextmanager
    def stream(self, name: str, timeout_s: float = TIMEOUT_S) -> Iterator[StreamCall]:
        """An open stream of that RPC, half-closed at the end."""
        method = STREAMS[name]
        open_stream = self.channel.stream_stream(
            method.path,
            request_serializer=_bytes_of,
            response_deserializer=method.response.FromString,
        )
        messages: SimpleQueue[Message | bytes | None] = SimpleQueue()
        call = StreamCall(messages, open_stream(iter(messages.get, None), timeout=timeout_s))
        try:
            yield call
        finally:
            call.close()

    def stats(self) -> admin_pb2.GetStatsResponse:
        reply: admin_pb2.GetStatsResponse = self.call("GetStats", admin_pb2.GetStatsRequest())
        return reply

    def info(self) -> cache_pb2.GetServerInfoResponse:
        reply: cache_pb2.GetServerInfoResponse = self.call(
            "GetServerInfo", cache_pb2.GetServerInfoRequest()
        )
        return reply

    def reset(self, *, force: bool = False) -> int:
        return int(self.call("ResetCache", admin_pb2.ResetCacheRequest(force=force)).num_dropped)

    def lookup(self, token_ids: Iterable[int], **fields: Any) -> cache_pb2.LookupResponse:
        request = cache_pb2.LookupRequest(token_ids=token_ids, **fields)
        reply: cache_pb2.LookupResponse = self.call("Lookup", request)
        return reply


class StreamCall:
    """One stream: what is sent, and the replies in order."""

    def __init__(self, messages: SimpleQueue[Message | bytes | None], replies: Any) -> None:
        self._messages = messages
        self.replies = replies

    def send(self, request: Message | bytes) -> None:
        self._messages.put(request)

    def receive(self) -> Any:
        """The next reply. Raises Refused; StopIteration if the stream has ended well."""
        try:
            return next(self.replies)
        except grpc.RpcError as error:
            raise Refused(error) from error

    def run(self, request: Message | bytes) -> Any:
        self.send(request)
        return self.receive()

    def ended(self) -> Refused:
        """How the stream ends, which it must now."""
        try:
            reply = self.receive()
        except Refused as refusal:
            return refusal
        raise AssertionError(f"the stream goes on: {reply}")

    def close(self) -> None:
        """No more requests."""
        self._messages.put(None)


def refusals(reply: cache_pb2.StepResponse) -> dict[tuple[str, int], PartRefused]:
    """The parts of a step that were refused, by name and index."""
    found = {}
    for error in reply.errors:
        assert (error.call, error.index) not in found
        found[error.call, error.index] = PartRefused(status_pb2.Status.FromString(error.status))
    return found


@contextmanager
def connected(target: str) -> Iterator[Stubs]:
    """Stubs over a channel of its own, without a limit on messages."""
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(target, options=unlimited) as channel:
        yield Stubs(channel)


def call_without_request(stubs: Stubs, name: str, over: threading.Event) -> Any:
    """A call whose headers are sent, and no request as long as `over` is not set."""

    def nothing() -> Iterator[bytes]:
        over.wait()
        yield from ()

    return stubs.channel.stream_unary(METHODS[name].path).future(nothing())


@dataclass(frozen=True)
class Appended:
    """One row of an Append's reply."""

    code: int
    new_block_ids: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Row:
    """One sequence's part of an Append or of an attention call."""

    sequence_id: int
    start: int
    token_ids: tuple[int, ...] = ()
    num_kv_valid: int = 0
    num_lookahead_tokens: int = 0


class Peer:
    """One owner's calls, with plain values."""

    def __init__(self, stubs: Stubs, owner: bytes | None = None) -> None:
        self.stubs = stubs
        self.owner = os.urandom(16) if owner is None else owner

    def allocate(self, token_ids: Iterable[int], **fields: Any) -> cache_pb2.AllocateResponse:
        request = cache_pb2.AllocateRequest(owner=self.owner, token_ids=token_ids, **fields)
        reply: cache_pb2.AllocateResponse = self.stubs.call("Allocate", request)
        return reply

    def append_request(self, rows: Sequence[Row]) -> cache_pb2.AppendRequest:
        return cache_pb2.AppendRequest(
            owner=self.owner,
            sequence_ids=[row.sequence_id for row in rows],
            start_positions=[row.start for row in rows],
            num_tokens=[len(row.token_ids) for row in rows],
            token_ids=[token for row in rows for token in row.token_ids],
            num_kv_valid=[row.num_kv_valid for row in rows],
            num_lookahead_tokens=[row.num_lookahead_tokens for row in rows],
        )

    def commit_request(self, rows: Sequence[tuple[int, int, int]]) -> cache_pb2.CommitRequest:
        """rows: sequence id, start position and count of computed tokens of each."""
        return cache_pb2.CommitRequest(
            owner=self.owner,
            sequence_ids=[row[0] for row in rows],
            start_positions=[row[1] for row in rows],
            num_computed_tokens=[row[2] for row in rows],
        )

    def append_rows(self, rows: Sequence[Row]) -> list[Appended]:
        return read_append(self.stubs.call("Append", self.append_request(rows)))

    def append(
        self, sequence_id: int, start: int, token_ids: Iterable[int], **counts: int
    ) -> Appended:
        return self.append_rows([Row(sequence_id, start, tuple(token_ids), **counts)])[0]

    def commit(self, sequence_id: int, start: int, count: int) -> int:
        """The result code; the count of cached blocks is not looked at."""
        request = self.commit_request([(sequence_id, start, count)])
        return int(self.stubs.call("Commit", request).result_codes[0])

    def fork(
        self, sequence_id: int, num_tokens: int, request_ids: Sequence[str] = ("",)
    ) -> list[int]:
        request = cache_pb2.ForkRequest(
            owner=self.owner,
            sequence_id=sequence_id,
            num_tokens=num_tokens,
            request_ids=request_ids,
        )
        return list(self.stubs.call("Fork", request).sequence_ids)

    def truncate(self, sequence_id: int, before: int, after: int) -> list[int]:
        request = cache_pb2.TruncateRequest(
            owner=self.owner,
            sequence_id=sequence_id,
            num_tokens_before=before,
            num_tokens_after=after,
        )
        return list(self.stubs.call("Truncate", request).dropped_block_ids)

    def free(self, *sequence_ids: int) -> list[int]:
        request = cache_pb2.FreeRequest(owner=self.owner, sequence_ids=sequence_ids)
        return list(self.stubs.call("Free", request).result_codes)

    def batch(
        self,
        layer: int,
        rows: Sequence[tuple[int, int, int]],
        options: AttentionOptions = PLAIN_ATTENTION,
    ) -> attention_pb2.AttentionBatch:
        """rows: sequence id, start position and count of new tokens of each."""
        return attention_pb2.AttentionBatch(
            owner=self.owner,
            layer=layer,
            sequence_ids=[row[0] for row in rows],
            start_positions=[row[1] for row in rows],
            num_tokens=[row[2] for row in rows],
            scale=options.scale,
            window=options.window,
            soft_cap=options.soft_cap,
            alibi_slopes=options.alibi_slopes,
            sinks=options.sinks,
        )


def read_append(reply: cache_pb2.AppendResponse) -> list[Appended]:
    """The reply's columns, row by row; every value belongs to some row."""
    new_ids = iter(reply.new_block_ids)
    copies = iter(zip(reply.copy_sources, reply.copy_destinations, strict=True))
    rows = [
        Appended(
            code,
            tuple(next(new_ids) for _ in range(num_new)),
            tuple(next(copies) for _ in range(num_copies)),
        )
        for code, num_new, num_copies in zip(
            reply.result_codes, reply.num_new_blocks, reply.num_copies, strict=True
        )
    ]
    assert not list(new_ids) and not list(copies)
    return rows


def _bytes_of(request: Message | bytes) -> bytes:
    return request if isinstance(request, bytes) else request.SerializeToString()

"""The RPCs that `bench rpc` measures: requests are bytes before the clock starts.

A kind of call makes as many calls as are asked for, does untimed what they need before, and what
is left after. One object a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import grpc
import numpy as np

from prefixcache.bench.prompts import Prompts
from prefixcache.client import messages, sequence_calls
from prefixcache.client.messages import Call, ResultT
from prefixcache.client.results import ServerInfo
from prefixcache.client.sequence_state import SequenceState
from prefixcache.rpc import wire
from prefixcache.types import CacheUse, FullHit, TokenIds

BATCH = 64
"""Rows of the larger Append."""
SHORT_PROMPT = 32
"""Tokens of the sequences that decode, or are freed."""
_ONE_TOKEN = np.array([7], dtype=np.uint32)
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one call's messages."""

    request: int
    reply: int


class Kind(Protocol):
    """One kind of call, made by one thread."""

    def make(self, count: int) -> Sequence[Callable[[], object]]:
        """So many calls, ready to be timed, each once and in this order."""

    def clean_up(self) -> None:
        """Undo what the last calls have made."""


class Connection:
    """An owner of sequences on a channel, who sends bytes and gets bytes."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self.owner = messages.new_owner()
        self.info = self.send(messages.server_info(None))

    def stub(self, method: str) -> Callable[[bytes], bytes]:
        (path,) = (found.path for found in wire.methods() if found.name == method)
        send: Callable[..., bytes] = self._channel.unary_unary(path)
        return partial(send, timeout=_TIMEOUT_S)

    def send(self, call: Call[ResultT]) -> ResultT:
        """Make a call as a client does."""
        return self.read(call, self.stub(call.method)(call.request.SerializeToString()))

    def read(self, call: Call[ResultT], reply: bytes) -> ResultT:
        (method,) = (found for found in wire.methods() if found.name == call.method)
        return call.read(wire.twin(method.response.DESCRIPTOR.name).FromString(reply))

    def allocate(self, token_ids: TokenIds) -> Call[SequenceState]:
        return allocate_call(self.owner, self.info, token_ids)

    def free(self, states: list[SequenceState]) -> Call[Any]:
        return sequence_calls.free(self.owner, states)


def allocate_call(owner: bytes, info: ServerInfo, token_ids: TokenIds) -> Call[SequenceState]:
    """As a client makes it that asks for nothing special."""
    return sequence_calls.allocate(
        owner,
        info,
        token_ids,
        extra_keys=None,
        num_lookahead_tokens=0,
        cache_use=CacheUse.READ_WRITE,
        full_hit=FullHit.LAST_TOKEN,
        resumed=False,
        request_id=None,
    )


class Lookups:
    """The same prompt each time."""

    def __init__(self, connection: Connection, token_ids: TokenIds) -> None:
        call = messages.lookup(token_ids, None, 0, FullHit.LAST_TOKEN, False)
        self._call = Sent(connection.stub("Lookup"), call)

    def make(self, count: int) -> list[Sent]:
        return [self._call] * count

    def clean_up(self) -> None:
        pass


class Allocates:
    """The same prompt each time; freed afterwards."""

    def __init__(self, connection: Connection, token_ids: TokenIds) -> None:
        self._connection, self._token_ids = connection, token_ids
        self._stub = connection.stub("Allocate")
        self._made: list[Sent] = []

    def make(self, count: int) -> list[Sent]:
        calls = [self._connection.allocate(self._token_ids) for _ in range(count)]
        self._made = [Sent(self._stub, call) for call in calls]
        return self._made

    def clean_up(self) -> None:
        states = [self._connection.read(sent.call, sent.reply) for sent in self._made]
        self._connection.send(self._connection.free(states))


class Appends:
    """One token to each of `num_rows` sequences, which live on until `ended` ends."""

    def __init__(self, connection: Connection, num_rows: int, ended: ExitStack) -> None:
        self._owner, self._stub = connection.owner, connection.stub("Append")
        prompts = Prompts(SHORT_PROMPT)
        calls = [connection.allocate(prompts.next()) for _ in range(num_rows)]
        self._states = [connection.send(call) for call in calls]
        ended.callback(connection.send, connection.free(self._states))
        self._tokens = [_ONE_TOKEN] * num_rows

    def make(self, count: int) -> list[Sent]:
        return [self._next() for _ in range(count)]

    def _next(self) -> Sent:
        call = sequence_calls.append(self._owner, self._states, self._tokens, None, None, None)
        for state in self._states:
            state.num_tokens += 1  # the reply would say no more that a request needs
        return Sent(self._stub, call)

    def clean_up(self) -> None:
        pass


class Frees:
    """One short sequence a call."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._stub = connection, connection.stub("Free")
        self._prompts = Prompts(SHORT_PROMPT)

    def make(self, count: int) -> list[Sent]:
        allocate, send = self._connection.allocate, self._connection.send
        states = [send(allocate(self._prompts.next())) for _ in range(count)]
        return [Sent(self._stub, self._connection.free([state])) for state in states]

    def clean_up(self) -> None:
        pass


class Sent:
    """One call, its request already bytes; `reply` once it was made."""

    reply = b""

    def __init__(self, stub: Callable[[bytes], bytes], call: Call[Any]) -> None:
        self.call = call
        self.data: bytes = call.request.SerializeToString()
        self._stub = stub

    def __call__(self) -> None:
        self.reply = self._stub(self.data)


def make_kinds(connection: Connection, num_tokens: int, ended: ExitStack) -> dict[str, Kind]:
    """Each kind of call, for one thread. The long prompt is cached whole, if clients may commit.

    ended: frees what they hold.
    """
    prompt = Prompts(num_tokens).next()
    state = connection.send(connection.allocate(prompt))
    if "commit" in connection.info.capabilities:
        rest = num_tokens - state.num_cached_tokens
        connection.send(sequence_calls.commit(connection.owner, [state], [rest]))
    connection.send(connection.free([state]))
    return {
        "Lookup": Lookups(connection, prompt),
        "Allocate": Allocates(connection, prompt),
        "Append, 1 row": Appends(connection, 1, ended),
        f"Append, {BATCH} rows": Appends(connection, BATCH, ended),
        "Free": Frees(connection),
    }


def message_sizes(kinds: dict[str, Kind]) -> dict[str, Sizes]:
    """Of one call of each kind, which is made here."""
    sizes = {}
    for name, kind in kinds.items():
        (sent,) = kind.make(1)
        sent()
        assert isinstance(sent, Sent)
        sizes[name] = Sizes(len(sent.data), len(sent.reply))
        kind.clean_up()
    return sizes

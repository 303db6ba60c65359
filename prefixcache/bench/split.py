"""Where the time of a call goes: the client, transport, parsing, the core, the reply.

Transport is the echo of the same sizes, in its process. The rest runs in this process, through the
servicer of a daemon that is made for it, with the bytes that the client sends. The core is timed
in calls of its own, on the same content.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import grpc
import numpy as np

from prefixcache.bench.calls import BATCH, Sizes, allocate_call
from prefixcache.bench.echo import echo_stub
from prefixcache.bench.measure import Laps, Progress, Rounds, run_rounds, summarize
from prefixcache.bench.prompts import Prompts
from prefixcache.bench.report import Ratio, Row
from prefixcache.client import messages, sequence_calls
from prefixcache.client.messages import Call
from prefixcache.client.sequence_state import SequenceState
from prefixcache.core.append_batch import AppendBatch
from prefixcache.core.sequence import AppendRow, CommitRow, Prompt
from prefixcache.rpc import wire
from prefixcache.rpc.requests import RequestReader
from prefixcache.server.cache_service import CacheService
from prefixcache.server.callers import ANYONE
from prefixcache.server.daemon import CacheOptions, Daemon
from prefixcache.types import NO_EXTRA_KEYS, AllocateResult, FullHit, TokenIds

_SHORT_PROMPT = 32
_NUM_BLOCKS = 20_000
_CALLS_A_ROUND = 50
_ONE_TOKEN = np.array([7], dtype=np.uint32)

TRANSPORT, CORE, CHECKS, SUM = "transport (echo)", "core", "checks and messages", "sum"
SERVICER = "servicer"
PARTS = ("client: request", TRANSPORT, "parse", CORE, CHECKS, "reply", "client: reply")
"""In the order of a call."""


@dataclass(frozen=True, slots=True)
class Key:
    call: str
    part: str


class Subject(Protocol):
    """One kind of call, taken apart. What it makes is undone before the next."""

    method: str

    def call(self) -> Call[Any]:
        """As the client makes it."""

    def core(self) -> Callable[[], object]:
        """The core's part of an equal call."""

    def undo(self, made: object) -> None:
        """made: what `call` or `core` gave."""


def measure_split(
    num_tokens: int,
    channel: grpc.Channel,
    sizes: Mapping[str, Sizes],
    rounds: Rounds,
    progress: Progress,
) -> tuple[Row, ...]:
    """Rows of Lookup, Allocate and the large Append.

    channel: to the echo. sizes: of the calls' messages.
    """
    daemon = Daemon(CacheOptions(_NUM_BLOCKS))
    client = InProcessClient(daemon)
    subjects: dict[str, Subject] = {
        "Lookup": LookupSubject(client, num_tokens),
        "Allocate": AllocateSubject(client, num_tokens),
        f"Append, {BATCH} rows": AppendSubject(client, BATCH),
    }
    laps: Laps[Key] = Laps()
    run_rounds(
        [
            partial(_round, laps, name, subject, daemon, _echo(channel, sizes[name]))
            for name, subject in subjects.items()
        ],
        rounds,
        warmed_up=laps.clear,
        on_round=partial(progress, "parts of a call"),
    )
    return tuple(_row(laps, name, part) for name in subjects for part in (*PARTS, SUM))


def _echo(channel: grpc.Channel, sizes: Sizes) -> Callable[[], object]:
    return partial(echo_stub(channel, sizes.reply), bytes(sizes.request))


def _round(
    laps: Laps[Key], name: str, subject: Subject, daemon: Daemon, echo: Callable[[], object]
) -> None:
    method = next(method for method in wire.methods() if method.name == subject.method)
    servicer = getattr(CacheService(daemon), subject.method.lower())
    reader, twin_reply = RequestReader(method), wire.twin(method.response.DESCRIPTOR.name)

    def timed(part: str, work: Callable[[], Any]) -> Any:
        return laps.time(Key(name, part), work)

    for _ in range(_CALLS_A_ROUND):
        timed(TRANSPORT, echo)
        call, data = timed(PARTS[0], partial(_serialized, subject))
        request = timed("parse", partial(reader.read, data))
        reply = timed(SERVICER, partial(servicer, request, ANYONE))
        data = timed("reply", reply.SerializeToString)
        subject.undo(timed("client: reply", partial(_read, call, twin_reply, data)))
        subject.undo(timed(CORE, subject.core()))
        laps.add_sum(
            Key(name, SUM), *(Key(name, part) for part in (*PARTS[:3], SERVICER, *PARTS[5:]))
        )


def _serialized(subject: Subject) -> tuple[Call[Any], bytes]:
    call = subject.call()
    return call, call.request.SerializeToString()


def _read(call: Call[Any], reply: Any, data: bytes) -> Any:
    return call.read(reply.FromString(data))


def _row(laps: Laps[Key], name: str, part: str) -> Row:
    if part == CHECKS:  # what the servicer does besides the core
        medians = [laps.summary(Key(name, each)).median for each in (SERVICER, CORE)]
        summary = summarize([medians[0] - medians[1]])
    else:
        summary = laps.summary(Key(name, part))
    share = summary.median / laps.summary(Key(name, SUM)).median
    return Row(
        section=f"Parts of a call: {name}",
        name=part,
        summary=summary,
        ratios=(Ratio("the sum", share),) if part != SUM else (),
    )


class InProcessClient:
    """What a client knows, for a daemon in this process, and the core behind it."""

    def __init__(self, daemon: Daemon) -> None:
        self.sequences = daemon.sequences
        self.info = messages.server_info(None).read(daemon.info)
        self.owner = messages.new_owner()
        self.core_owner = secrets.token_bytes(16)

    def prepare(self, token_ids: TokenIds) -> Prompt:
        return self.sequences.prepare(token_ids, NO_EXTRA_KEYS)

    def allocate(self, owner: bytes, token_ids: TokenIds) -> AllocateResult:
        prompt = self.prepare(token_ids)
        with self.sequences.lock:
            return self.sequences.allocate(owner, messages.new_request_id(), prompt)

    def free(self, owner: bytes, sequence_id: int) -> None:
        with self.sequences.lock:
            self.sequences.free(owner, [sequence_id])

    def cached_prompt(self, num_tokens: int) -> TokenIds:
        """A prompt that is cached whole."""
        token_ids = Prompts(num_tokens).next()
        sequence_id = self.allocate(self.owner, token_ids).sequence_id
        with self.sequences.lock:
            self.sequences.rows.commit(self.owner, [CommitRow(sequence_id, 0, num_tokens)])
        self.free(self.owner, sequence_id)
        return token_ids


class LookupSubject:
    method = "Lookup"

    def __init__(self, client: InProcessClient, num_tokens: int) -> None:
        self._client, self._token_ids = client, client.cached_prompt(num_tokens)

    def call(self) -> Call[Any]:
        return messages.lookup(self._token_ids, None, 0, FullHit.LAST_TOKEN, False)

    def core(self) -> Callable[[], object]:
        return self._look_up

    def _look_up(self) -> object:
        sequences = self._client.sequences
        prompt = self._client.prepare(self._token_ids)
        with sequences.lock:
            return sequences.lookup(prompt, 0, FullHit.LAST_TOKEN)

    def undo(self, made: object) -> None:
        pass


class AllocateSubject:
    method = "Allocate"

    def __init__(self, client: InProcessClient, num_tokens: int) -> None:
        self._client, self._token_ids = client, client.cached_prompt(num_tokens)

    def call(self) -> Call[Any]:
        return allocate_call(self._client.owner, self._client.info, self._token_ids)

    def core(self) -> Callable[[], object]:
        return partial(self._client.allocate, self._client.core_owner, self._token_ids)

    def undo(self, made: object) -> None:
        if isinstance(made, SequenceState):
            self._client.free(self._client.owner, made.sequence_id)
        else:
            assert isinstance(made, AllocateResult)
            self._client.free(self._client.core_owner, made.sequence_id)


class AppendSubject:
    """Two batches: one that the client's calls append to, one that the core's do."""

    method = "Append"

    def __init__(self, client: InProcessClient, num_rows: int) -> None:
        self._client, self._tokens = client, [_ONE_TOKEN] * num_rows
        prompts = Prompts(_SHORT_PROMPT)
        made = [client.allocate(client.owner, prompts.next()) for _ in range(num_rows)]
        self._states = [_state(reply) for reply in made]
        made = [client.allocate(client.core_owner, prompts.next()) for _ in range(num_rows)]
        self._core_ids = [reply.sequence_id for reply in made]
        self._core_length = _SHORT_PROMPT

    def call(self) -> Call[Any]:
        return sequence_calls.append(
            self._client.owner, self._states, self._tokens, None, None, None
        )

    def core(self) -> Callable[[], object]:
        batch = AppendBatch.of(
            [AppendRow(one, self._core_length, _ONE_TOKEN) for one in self._core_ids]
        )
        self._core_length += 1
        return partial(self._append, batch)

    def _append(self, batch: AppendBatch) -> object:
        with self._client.sequences.lock:
            return self._client.sequences.rows.append(self._client.core_owner, batch)

    def undo(self, made: object) -> None:
        pass


def _state(reply: AllocateResult) -> SequenceState:
    return SequenceState(
        reply.sequence_id,
        num_tokens=_SHORT_PROMPT,
        num_cached_tokens=reply.num_cached_tokens,
        num_cached_blocks=reply.num_cached_blocks,
        block_table=array("i", reply.block_ids.tobytes()),
        block_size=_SHORT_PROMPT // len(reply.block_ids),
        num_layers=1,
    )

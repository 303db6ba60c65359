"""A naive block manager that is meant to be obviously right: the oracle of the state machine.

It says what every call must answer, in lists and dicts, one object a block, one step a block, and
shares no code with `prefixcache.core` (only the value types of `prefixcache.types`). It also
keeps what K/V stand in every slot, as an identity of "this token after exactly these tokens", so
that a hit on junk, on another's content or on an overwritten block is seen even if hashes,
ref counts and queues agree.

Sequences have names (small ints) here; the caller maps them to real ids. A call that must be
refused raises `Refused` and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import cbor2

from prefixcache.types import CacheUse, ExtraKeys, FullHit
from tests.support.model_accounts import (
    BLANK,
    REGISTERED,
    STANDBY,
    Block,
    Content,
    ModelAccount,
    ModelAccounts,
    Refused,
)
from tests.support.model_quarantine import ModelQuarantine, Quarantined

HashBlock = Callable[[bytes, tuple[int, ...], tuple[tuple, ...]], bytes]
"""(parent, token ids, extra keys) -> digest."""


@dataclass
class Span:
    """An image (`identifier`) or embeddings (`digests`) over tokens `[start, end)`."""

    start: int
    end: int
    identifier: str = ""
    digests: tuple[bytes, ...] = ()

    def digest_of(self, block: int, size: int) -> bytes:
        return self.digests[block - self.start // size]


@dataclass
class ModelSequence:
    name: int
    owner: bytes
    request_id: str
    cache_use: CacheUse
    lora: tuple[str, str] | None
    salt: str
    spans: list[Span]
    tokens: list[int]
    labels: list[tuple]
    table: list[int]
    computed: list[int]
    cached_tokens: int
    prompt_end: int
    first_writable: int
    cached_blocks: int
    registers: bool
    started: list[int | None]
    filling: int = 0
    """Leading full blocks that others may wait for."""
    account: int = 0
    lookahead: int = 0
    holds: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    running: set[int] = field(default_factory=set)
    is_copying: bool = False
    alive: bool = True
    writers: frozenset[int] = frozenset()
    """Processes that may write to it although it has ended."""
    last: tuple | None = None
    reply: object = None
    commit_before: tuple | None = None

    @property
    def busy(self) -> bool:
        return bool(self.running) or self.is_copying


@dataclass
class ModelSession:
    name: bytes
    ttl_s: float
    client_name: str
    request_id: str
    renewed_s: float
    has_stream: bool = False
    broken_s: float | None = None
    attachments: set[int] = field(default_factory=set)


def cbor_hash_block(digest: Callable[[bytes], bytes]) -> HashBlock:
    """The recipe of `sha256_cbor`, spelled by the reference encoder."""

    def hash_block(parent: bytes, tokens: tuple[int, ...], keys: tuple[tuple, ...]) -> bytes:
        return digest(cbor2.dumps([parent, list(tokens), keys or None], canonical=True))

    return hash_block


class Model(ModelQuarantine, ModelAccounts):
    """The whole block manager. `hash_block` decides which contents collide."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_layers: int,
        none_hash: bytes,
        hash_block: HashBlock,
        *,
        caching: bool = True,
        owner_ttl_s: float = 600.0,
        max_sessions: int = 256,
        max_sequences: int = 16384,
        grace_s: float = 0.5,
    ) -> None:
        self.size = block_size
        self.num_layers = num_layers
        self.none_hash = none_hash
        self.hash_block = hash_block
        self.caching = caching
        self.owner_ttl_s = owner_ttl_s
        self.now_s = 0.0
        self.blocks = [
            Block(block_id, [[None] * block_size for _ in range(num_layers)])
            for block_id in range(num_blocks)
        ]
        self.free_ids = list(range(num_blocks))
        self.index: dict[bytes, int] = {}
        self.standbys: dict[bytes, list[int]] = {}
        self.sequences: dict[int, ModelSequence] = {}
        self.dying: list[ModelSequence] = []
        self.owner_calls: dict[bytes, float] = {}
        self.sessions: dict[bytes, ModelSession] = {}
        self.max_sessions = max_sessions
        self.max_sequences = max_sequences
        self.grace_s = grace_s
        self.running: set[int] = set()
        self.quarantine = []
        self.strays = []
        self.evictions = 0
        self.accounts = [ModelAccount(group=0)]
        self.counts = dict.fromkeys(
            (
                *("requests", "queries_tokens", "hit_tokens", "queries_blocks", "hit_blocks"),
                *("resumed_requests", "resumed_queries_tokens", "resumed_hit_tokens"),
                *("allocation_refused", "append_refused", "resets", "expired_sequences"),
                "expired_sessions",
                *("prefill_tokens_computed", "prefill_tokens_cached"),
            ),
            0,
        )
        self._names = 0
        self._session_names = 0
        self._identities: dict[tuple, int] = {}
        self._drafts = 0

    # ---- calls of clients

    def lookup(
        self,
        tokens: list[int],
        keys: ExtraKeys,
        lookahead: int,
        full_hit: FullHit,
        account: int = 0,
    ) -> tuple[int, int, int, int, str, int]:
        """(cached tokens, cached blocks, blocks needed, blocks available, refusal, pending tokens).

        The refusal is that of Allocate, empty if it finds room.
        """
        found = self._match(tokens, keys, full_hit)
        hits = self._hits_for(account, found)
        pending = self._pending(tokens, keys, full_hit, len(hits)) if hits == found else 0
        num_blocks = self._blocks_of(len(tokens) + lookahead)
        needed = num_blocks - len(hits) + sum(self.blocks[hit].refs == 0 for hit in hits)
        available = self.available(account, self._for_sharing(account, hits))
        try:
            self._check_room(account, hits, num_blocks)
            refusal = ""
        except Refused as refused:
            refusal = refused.name
        cached = min(len(hits) * self.size, len(tokens) - 1)
        return cached, len(hits), needed, available, refusal, pending

    def allocate(
        self,
        owner: bytes,
        request_id: str,
        tokens: list[int],
        keys: ExtraKeys,
        *,
        lookahead: int = 0,
        cache_use: CacheUse = CacheUse.READ_WRITE,
        full_hit: FullHit = FullHit.LAST_TOKEN,
        resumed: bool = False,
        account: int = 0,
    ) -> tuple[int, int, list[int], int]:
        """(name, cached tokens, block table, pending tokens)."""
        self._touch(owner)
        call = ("allocate", lookahead, cache_use, full_hit, resumed, keys, tuple(tokens))
        for other in self._live(owner):
            if request_id and other.request_id == request_id:
                if other.last == call:
                    return other.reply
                raise Refused("RequestIdConflictError")
        self._check_can_add(owner, 1)
        found = self._match(tokens, keys, full_hit) if cache_use.reads else []
        hits = self._hits_for(account, found)
        num_blocks = self._blocks_of(len(tokens) + lookahead)
        try:
            self._check_room(account, hits, num_blocks)
        except Refused:
            self.counts["allocation_refused"] += 1
            raise
        reads = cache_use.reads and hits == found
        pending = self._pending(tokens, keys, full_hit, len(hits)) if reads else 0
        for hit in hits:
            self._hold(hit, account)
        table = hits + [self._take(account) for _ in range(num_blocks - len(hits))]
        cached = min(len(hits) * self.size, len(tokens) - 1)
        self._names += 1
        sequence = ModelSequence(
            name=self._names,
            owner=owner,
            request_id=request_id,
            cache_use=cache_use,
            lora=(keys.lora.name, keys.lora.path) if keys.lora else None,
            salt=keys.cache_salt,
            spans=_spans(keys),
            tokens=list(tokens),
            labels=self._labels(0, tokens, _spans(keys)),
            table=table,
            computed=[cached] * self.num_layers,
            cached_tokens=cached,
            prompt_end=len(tokens),
            first_writable=len(hits) * self.size,
            cached_blocks=len(hits),
            registers=cache_use.writes and self.caching,
            started=[None] * self.num_layers,
            filling=len(tokens) // self.size,
            account=account,
            lookahead=lookahead,
        )
        self._add(sequence)
        self._count(sequence, len(hits), resumed)
        sequence.last, sequence.reply = call, (sequence.name, cached, list(table), pending)
        return sequence.reply

    def append(
        self,
        owner: bytes,
        name: int,
        start: int,
        tokens: list[int],
        kv_valid: int,
        lookahead: int,
        keys: ExtraKeys,
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """(new block ids, copies)."""
        self._touch(owner)
        sequence = self._idle(owner, name)
        call = ("append", start, tuple(tokens), kv_valid, lookahead, keys)
        if sequence.last == call:
            return sequence.reply
        old = len(sequence.tokens)
        if start != old:
            raise Refused("WrongPositionError")
        new = old + len(tokens)
        num_blocks = self._blocks_of(new + lookahead)
        if num_blocks > len(self.blocks):
            self.counts["append_refused"] += 1
            raise Refused("ExceedsPoolError")
        copy = None
        if new + lookahead > old and old % self.size:
            last = self.blocks[sequence.table[old // self.size]]
            if last.refs > 1 or last.state != BLANK:
                copy = old // self.size
        added = max(0, num_blocks - len(sequence.table))
        ended = sum(self.blocks[block_id].refs == 1 for block_id in sequence.holds)
        needed, account = added + (copy is not None), sequence.account
        try:
            self._check_limit(account, num_blocks, needed - ended)
            if needed > self.available(account) + ended:
                raise Refused("NoRoomError")
        except Refused:
            self.counts["append_refused"] += 1
            raise

        self._end_holds(sequence)
        copies = []
        if copy is not None:
            source, destination = sequence.table[copy], self._take(account)
            sequence.table[copy] = destination
            copies = [(source, destination)]
            sequence.holds = [source]
        new_ids = [self._take(account) for _ in range(added)]
        sequence.table += new_ids
        sequence.tokens += tokens
        sequence.labels += self._labels(old, tokens, _spans(keys))
        sequence.spans += _spans(keys)
        sequence.lookahead = lookahead
        sequence.copies = list(copies)
        if len(tokens) >= self.size:
            sequence.filling = new // self.size
        self._accept_drafts(sequence, old, old + kv_valid)
        sequence.computed = [min(count, old + kv_valid) for count in sequence.computed]
        self._applied(sequence, call, (new_ids, copies))
        self._commit_blocks(sequence)
        return sequence.reply

    def commit(self, owner: bytes, name: int, start: int, count: int) -> int:
        self._touch(owner)
        sequence = self._idle(owner, name)
        call = ("commit", start, count)
        if sequence.last == call:
            return sequence.reply
        if sequence.commit_before and sequence.commit_before[0] == call:
            return sequence.commit_before[1]
        if start != min(sequence.computed):
            raise Refused("WrongPositionError")
        if start + count > len(sequence.tokens):
            raise Refused("BeyondTokensError")
        self._end_holds(sequence)
        for layer, computed in enumerate(list(sequence.computed)):
            if computed <= start + count:
                self.write_kv(sequence, layer, computed, start + count)
                self._advance(sequence, layer, start + count)
        self._applied(sequence, call, sequence.cached_blocks)
        return sequence.cached_blocks

    def fork(self, owner: bytes, name: int, num_tokens: int, request_ids: list[str]) -> list[int]:
        self._touch(owner)
        parent = self._idle(owner, name)
        call = ("fork", num_tokens, tuple(request_ids))
        known = [
            other.name
            for request_id in request_ids
            for other in self._live(owner)
            if request_id and other.request_id == request_id
        ]
        if known:
            if parent.last == call and known == parent.reply:
                return parent.reply
            raise Refused("RequestIdConflictError")
        if num_tokens != len(parent.tokens):
            raise Refused("WrongPositionError")
        if min(parent.computed) < num_tokens:
            raise Refused("NotComputedError")
        self._check_can_add(owner, len(request_ids))
        self._end_holds(parent)
        self._drop_tail(parent, num_tokens)
        parent.computed = [num_tokens] * self.num_layers
        parent.first_writable = num_tokens
        children = []
        for request_id in request_ids:
            for block_id in parent.table:
                self._hold(block_id, parent.account)
            self._names += 1
            child = ModelSequence(
                name=self._names,
                owner=owner,
                request_id=request_id,
                cache_use=parent.cache_use,
                lora=parent.lora,
                salt=parent.salt,
                spans=list(parent.spans),
                tokens=list(parent.tokens),
                labels=list(parent.labels),
                table=list(parent.table),
                computed=list(parent.computed),
                cached_tokens=num_tokens,
                prompt_end=parent.prompt_end,
                first_writable=num_tokens,
                cached_blocks=parent.cached_blocks,
                registers=parent.registers,
                started=[None] * self.num_layers,
                account=parent.account,
            )
            self._add(child)
            children.append(child.name)
        self._applied(parent, call, children)
        return children

    def truncate(self, owner: bytes, name: int, before: int, after: int) -> list[int]:
        """Block ids dropped."""
        self._touch(owner)
        sequence = self._idle(owner, name)
        call = ("truncate", before, after)
        if sequence.last == call:
            return sequence.reply
        if before != len(sequence.tokens):
            raise Refused("WrongPositionError")
        if not 1 <= after <= before:
            raise Refused("InvalidArgumentError")
        self._end_holds(sequence)
        dropped = self._drop_tail(sequence, after)
        split = after % self.size and any(span.start < after < span.end for span in sequence.spans)
        if split:
            # No key tells a part of an image from the whole of it.
            sequence.registers = False
        sequence.tokens = sequence.tokens[:after]
        sequence.labels = sequence.labels[:after]
        sequence.spans = [
            Span(span.start, min(span.end, after), span.identifier, span.digests)
            for span in sequence.spans
            if span.start < after
        ]
        sequence.computed = [min(count, after) for count in sequence.computed]
        sequence.cached_blocks = min(sequence.cached_blocks, after // self.size)
        sequence.filling = min(sequence.filling, after // self.size)
        sequence.first_writable = min(sequence.first_writable, after)
        sequence.prompt_end = min(sequence.prompt_end, after)
        self._applied(sequence, call, dropped)
        return dropped

    def free(self, owner: bytes, name: int) -> None:
        self._touch(owner)
        self._end(self._find(owner, name))

    # ---- calls that take time

    def begin_copies(self, owner: bytes, name: int) -> list[tuple[int, int]]:
        """The copies that still have to be made."""
        sequence = self._find(owner, name)
        if not sequence.holds:
            return []
        sequence.is_copying = True
        return list(sequence.copies)

    def end_copies(self, name: int) -> None:
        sequence = self._any(name)
        sequence.is_copying = False
        if sequence.alive:
            self._end_holds(sequence)
        self._bury(sequence)

    def begin_attention(
        self, owner: bytes, layer: int, names: list[int], starts: list[int], counts: list[int]
    ) -> list[tuple[int, bool, list[int]]]:
        """(first position written, is a repeat, blocks) of each sequence."""
        self._touch(owner)
        if len(set(names)) < len(names):
            raise Refused("InvalidArgumentError")
        rows = []
        for name, start, count in zip(names, starts, counts, strict=True):
            sequence = self._find(owner, name)
            if sequence.is_copying or layer in sequence.running:
                raise Refused("SequenceBusyError")
            end, computed = start + count, sequence.computed[layer]
            repeat = sequence.started[layer] == start and computed == end
            if not repeat and start != computed:
                raise Refused("WrongPositionError")
            if not repeat and end > len(sequence.tokens) + sequence.lookahead:
                raise Refused("BeyondTokensError")
            blocks = sequence.table[: self._blocks_of(end)]
            rows.append((end if repeat else sequence.first_writable, repeat, blocks))
        for name in names:
            sequence = self.sequences[name]
            self._end_holds(sequence)
            sequence.last = sequence.commit_before = None
            sequence.running.add(layer)
        return rows

    def end_attention(
        self,
        owner: bytes,
        layer: int,
        names: list[int],
        starts: list[int],
        counts: list[int],
        repeats: list[bool],
        *,
        written: bool,
    ) -> None:
        if not self._is_session(owner) or owner in self.sessions:
            self._touch(owner)
        for name, start, count, repeat in zip(names, starts, counts, repeats, strict=True):
            sequence = self._any(name)
            sequence.running.discard(layer)
            if written and sequence.alive and not repeat:
                self.write_kv(sequence, layer, start, start + count)
                sequence.started[layer] = start
                self._advance(sequence, layer, start + count)
            self._bury(sequence)

    # ---- sessions

    def open_session(self, ttl_s: float, client_name: str, request_id: str) -> bytes:
        """The session's name, which is the owner of what is allocated in it."""
        for session in self.sessions.values():
            if request_id and session.request_id == request_id:
                if (session.ttl_s, session.client_name) != (ttl_s, client_name):
                    raise Refused("RequestIdConflictError")
                session.renewed_s = self.now_s
                return session.name
        if len(self.sessions) == self.max_sessions:
            raise Refused("TooManySessionsError", limit=self.max_sessions)
        self._session_names += 1
        name = f"session {self._session_names}".encode()
        self.sessions[name] = ModelSession(name, ttl_s, client_name, request_id, self.now_s)
        return name

    def connect(self, name: bytes) -> None:
        session = self._session(name)
        session.renewed_s, session.has_stream, session.broken_s = self.now_s, True, None

    def disconnect(self, name: bytes) -> None:
        if name in self.sessions:
            session = self.sessions[name]
            session.has_stream, session.broken_s = False, self.now_s

    def attach(self, name: bytes, process: int) -> None:
        session = self._session(name)
        session.renewed_s = self.now_s
        session.attachments.add(process)
        self.running.add(process)

    def close_session(self, name: bytes) -> int:
        writers = frozenset(self._session(name).attachments)
        ended = self._live(name)
        for sequence in ended:
            sequence.writers = writers
            self.remember_strays(sequence, writers)
        del self.sessions[name]
        for sequence in ended:
            self._end(sequence)
        return len(ended)

    def _is_session(self, owner: bytes) -> bool:
        return owner.startswith(b"session")

    def _session(self, name: bytes) -> ModelSession:
        if name not in self.sessions:
            raise Refused("SessionNotFoundError")
        return self.sessions[name]

    def _is_over(self, session: ModelSession) -> bool:
        return self.now_s - session.renewed_s >= session.ttl_s or (
            session.broken_s is not None and self.now_s - session.broken_s >= self.grace_s
        )

    def _check_can_add(self, owner: bytes, count: int) -> None:
        if len(self._live(owner)) + count > self.max_sequences:
            raise Refused("TooManySequencesError", limit=self.max_sequences)

    # ---- operators

    def reset(self, *, force: bool) -> int:
        referenced = self._num_referenced()
        if referenced and not force:
            raise Refused("BlocksInUseError", referenced=referenced)
        dropped = len(self.index)
        self.free_ids.sort(key=self._group_of)
        self.index, self.standbys = {}, {}
        for block in self.blocks:
            block.state, block.hash, block.content = BLANK, None, None
        for sequence in [*self.sequences.values(), *self.dying]:
            sequence.registers = False
            sequence.cached_blocks = 0
        self.counts["resets"] += 1
        return dropped

    def expire(self) -> int:
        silent = [
            owner
            for owner, called in self.owner_calls.items()
            if self.now_s - called >= self.owner_ttl_s
            and not any(sequence.busy for sequence in self._live(owner))
        ]
        over = [session.name for session in self.sessions.values() if self._is_over(session)]
        for name in over:
            writers = frozenset(self.sessions[name].attachments)
            for sequence in self._live(name):
                sequence.writers = writers
                self.remember_strays(sequence, writers)
            del self.sessions[name]
        self.counts["expired_sessions"] += len(over)
        ended = [sequence for owner in [*silent, *over] for sequence in self._live(owner)]
        for sequence in ended:
            self._end(sequence)
        self.counts["expired_sequences"] += len(ended)
        return len(ended)

    def stats(self) -> dict[str, int]:
        free = [self.blocks[block_id] for block_id in self.free_ids]
        evictable = sum(block.state == REGISTERED for block in free)
        return {
            **self.counts,
            "num_blocks": len(self.blocks),
            "block_size": self.size,
            "referenced": self._num_referenced(),
            "quarantined": self.num_quarantined(),
            "evictable": evictable,
            "blank": len(free) - evictable,
            "cached": len(self.index),
            "sequences": len(self.sequences),
            "sessions": len(self.sessions),
            "owners": len({sequence.owner for sequence in self.sequences.values()}),
            "slots_written": sum(map(self._slots_written, self.blocks)),
            "evictions": self.evictions,
            "tenants": (),
        }

    # ---- what the caller may ask

    def identity(self, sequence: ModelSequence, position: int) -> int:
        """Names the K/V that the token at a position must have, given all before it."""
        node: tuple = ("root", sequence.lora, sequence.salt)
        number = self._intern(node)
        for label in sequence.labels[: position + 1]:
            number = self._intern((number, label))
        return number

    def write_kv(self, sequence: ModelSequence, layer: int, start: int, end: int) -> None:
        """K/V of `[start, end)` are put in place, but for positions that are somebody's hit."""
        self.check_context(sequence, layer, start)
        for position in range(max(start, sequence.first_writable), end):
            block = self.blocks[sequence.table[position // self.size]]
            assert block.refs == 1, "K/V written into a shared block"
            assert block.state == BLANK, "K/V written into a block that others can find"
            if position < len(sequence.tokens):
                value = self.identity(sequence, position)
            else:
                self._drafts += 1
                value = -self._drafts
            block.kv[layer][position % self.size] = value
        self.check_context(sequence, layer, end)

    def check_context(self, sequence: ModelSequence, layer: int, end: int) -> None:
        """Everything that attention reads before `end` is this very sequence's."""
        for position in range(min(end, len(sequence.tokens))):
            block = self.blocks[sequence.table[position // self.size]]
            value = block.kv[layer][position % self.size]
            assert value == self.identity(sequence, position), (
                f"sequence {sequence.name} reads junk at position {position}"
            )

    def copy_block(self, source: int, destination: int) -> None:
        self.blocks[destination].kv = [list(layer) for layer in self.blocks[source].kv]

    def chains(self) -> set[Content]:
        return {self.blocks[block_id].content for block_id in self.index.values()}

    # ---- blocks

    def _match(self, tokens: list[int], keys: ExtraKeys, full_hit: FullHit) -> list[int]:
        if not self.caching:
            return []
        limit = len(tokens) - (full_hit is FullHit.LAST_BLOCK)
        lora = (keys.lora.name, keys.lora.path) if keys.lora else None
        found: list[int] = []
        parent, content = self.none_hash, ()
        for start in range(0, limit - self.size + 1, self.size):
            node = (
                tuple(tokens[start : start + self.size]),
                self._keys_of(start, lora, keys.cache_salt, _spans(keys)),
            )
            parent, content = self.hash_block(parent, *node), (*content, node)
            block_id = self.index.get(parent)
            if block_id is None or self.blocks[block_id].content != content:
                break
            found.append(block_id)
        return found

    def _pending(self, tokens: list[int], keys: ExtraKeys, full_hit: FullHit, num_hits: int) -> int:
        """Tokens after the hits that some live sequence has in blocks it has yet to commit."""
        lora = (keys.lora.name, keys.lora.path) if keys.lora else None
        usable = (len(tokens) - (full_hit is FullHit.LAST_BLOCK)) // self.size
        prompt = self._content(tokens, usable, lora, keys.cache_salt, _spans(keys))
        end = num_hits
        for other in self.sequences.values():
            if not other.registers:
                continue
            own = self._content(other.tokens, other.filling, other.lora, other.salt, other.spans)
            for number in range(other.cached_blocks, min(len(own), usable)):
                if own[: number + 1] == prompt[: number + 1]:
                    end = max(end, number + 1)
        most = len(tokens) - 1
        return min(end * self.size, most) - min(num_hits * self.size, most)

    def num_filling(self) -> int:
        """Sequences with blocks that others may wait for."""
        return sum(
            sequence.registers and sequence.cached_blocks < sequence.filling
            for sequence in self.sequences.values()
        )

    def _content(
        self,
        tokens: list[int],
        num_blocks: int,
        lora: tuple[str, str] | None,
        salt: str,
        spans: list[Span],
    ) -> Content:
        """Of the first full blocks of a sequence."""
        starts = range(0, num_blocks * self.size, self.size)
        return tuple(
            (tuple(tokens[start : start + self.size]), self._keys_of(start, lora, salt, spans))
            for start in starts
        )

    def _keys_of(
        self, start: int, lora: tuple[str, str] | None, salt: str, spans: list[Span]
    ) -> tuple[tuple, ...]:
        """Extra keys of the block of tokens `[start, start + B)`."""
        end = start + self.size
        inside = sorted(
            (span for span in spans if span.start < end and span.end > start),
            key=lambda span: span.start,
        )
        keys: list[tuple] = [("lora", *lora)] if lora else []
        keys += [("mm", span.identifier, span.start - start) for span in inside if span.identifier]
        if salt and start == 0:
            keys.append(("cache_salt", salt))
        for span in inside:
            if span.digests:
                digest = span.digest_of(start // self.size, self.size)
                keys.append(("prompt_embeds", digest))
        return tuple(keys)

    def _hold(self, block_id: int, account: int) -> None:
        block = self.blocks[block_id]
        if block.refs == 0:
            self.free_ids.remove(block_id)
        block.refs += 1
        if account not in block.holders:
            block.holders.append(account)
        block.charged_to = block.holders[0]

    def _take(self, account: int) -> int:
        block = self._next_block(account)
        self.free_ids.remove(block.block_id)
        if block.state == REGISTERED:
            waiting = self.standbys.get(block.hash, [])
            if waiting:
                heir = waiting.pop(0)
                self.index[block.hash] = heir
                self.blocks[heir].state = REGISTERED
            else:
                del self.index[block.hash]
                self.evictions += 1
                self.accounts[block.charged_to].evictions += 1
        block.state, block.hash, block.content = BLANK, None, None
        block.refs, block.holders, block.charged_to = 1, [account], account
        block.kv = [[None] * self.size for _ in range(self.num_layers)]
        return block.block_id

    def _release(self, block_ids: list[int], account: int) -> None:
        blank: list[int] = []
        for block_id in reversed(block_ids):
            block = self.blocks[block_id]
            block.refs -= 1
            assert block.refs >= 0
            if block.refs:
                self._let_go(block, account)
                continue
            block.holders = []
            if block.state == REGISTERED:
                self.free_ids.append(block_id)
                continue
            if block.state == STANDBY:
                self.standbys[block.hash].remove(block_id)
                registered = self.index[block.hash]
                if registered in self.free_ids:
                    self.free_ids.remove(registered)
                    self.free_ids.append(registered)
                block.state, block.hash, block.content = BLANK, None, None
            blank.append(block_id)
        self.free_ids = blank + self.free_ids

    def _let_go(self, block: Block, account: int) -> None:
        """One of the references that the tables still show is gone."""
        references = [
            sequence
            for sequence in [*self.sequences.values(), *self.dying]
            for block_id in [*sequence.table, *sequence.holds]
            if block_id == block.block_id and sequence.account == account
        ]
        if len(references) == 1:
            block.holders.remove(account)
        block.charged_to = block.holders[0]

    def _slots_written(self, block: Block) -> int:
        if not block.refs:
            return 0
        if block.state != BLANK:
            return self.size
        written = [0]
        for sequence in [*self.sequences.values(), *self.dying]:
            if block.block_id in sequence.table:
                start = sequence.table.index(block.block_id) * self.size
                written.append(min(self.size, max(0, min(sequence.computed) - start)))
        return max(written)

    # ---- sequences

    def _touch(self, owner: bytes) -> None:
        if self._is_session(owner):
            self._session(owner).renewed_s = self.now_s
        if owner in self.owner_calls:
            del self.owner_calls[owner]
            self.owner_calls[owner] = self.now_s

    def _live(self, owner: bytes) -> list[ModelSequence]:
        return [sequence for sequence in self.sequences.values() if sequence.owner == owner]

    def _find(self, owner: bytes, name: int) -> ModelSequence:
        sequence = self.sequences.get(name)
        if sequence is None or sequence.owner != owner:
            raise Refused("SequenceNotFoundError")
        return sequence

    def _idle(self, owner: bytes, name: int) -> ModelSequence:
        sequence = self._find(owner, name)
        if sequence.busy:
            raise Refused("SequenceBusyError")
        return sequence

    def _any(self, name: int) -> ModelSequence:
        found = [sequence for sequence in self.dying if sequence.name == name]
        return found[0] if found else self.sequences[name]

    def _add(self, sequence: ModelSequence) -> None:
        self.sequences[sequence.name] = sequence
        if not self._is_session(sequence.owner):
            self.owner_calls.setdefault(sequence.owner, self.now_s)

    def _end(self, sequence: ModelSequence) -> None:
        del self.sequences[sequence.name]
        sequence.alive = False
        if not self._is_session(sequence.owner) and not self._live(sequence.owner):
            del self.owner_calls[sequence.owner]
        self.dying.append(sequence)
        self._bury(sequence)

    def _bury(self, sequence: ModelSequence) -> None:
        if not sequence.alive and not sequence.busy and sequence in self.dying:
            if sequence.writers & self.running:
                self._keep_unwritten(sequence)
            self._end_holds(sequence)
            self._release(sequence.table, sequence.account)
            self.dying.remove(sequence)

    def _keep_unwritten(self, sequence: ModelSequence) -> None:
        """What stays in quarantine is not the sequence's any more."""
        sources = [block_id for block_id in sequence.holds if self._is_only_holder(block_id)]
        kept = self.unwritten_blocks(sequence) + sources
        if kept:
            self.quarantine.append(Quarantined(sequence.writers, sequence.account, kept))
        sequence.holds = [block_id for block_id in sequence.holds if block_id not in kept]
        sequence.table = [block_id for block_id in sequence.table if block_id not in kept]

    def _end_holds(self, sequence: ModelSequence) -> None:
        """The copy, which had time until now, is made, and its source let go."""
        if sequence.holds:
            for source, destination in sequence.copies:
                self.copy_block(source, destination)
            self._release(sequence.holds, sequence.account)
        sequence.holds, sequence.copies = [], []

    def _applied(self, sequence: ModelSequence, call: tuple, reply: object) -> None:
        sequence.commit_before = None
        if call[0] == "append" and sequence.last and sequence.last[0] == "commit":
            sequence.commit_before = (sequence.last, sequence.reply)
        sequence.last, sequence.reply = call, reply
        sequence.started = [None] * self.num_layers

    def _drop_tail(self, sequence: ModelSequence, num_tokens: int) -> list[int]:
        keep = self._blocks_of(num_tokens)
        dropped = sequence.table[keep:]
        self._release(dropped, sequence.account)
        sequence.table = sequence.table[:keep]
        sequence.lookahead = 0
        return dropped

    def _advance(self, sequence: ModelSequence, layer: int, position: int) -> None:
        before = min(sequence.computed)
        sequence.computed[layer] = position
        for token in range(before, min(sequence.computed)):
            self.counts["prefill_tokens_computed"] += token < sequence.prompt_end
        self._commit_blocks(sequence)

    def _commit_blocks(self, sequence: ModelSequence) -> None:
        complete = min(*sequence.computed, len(sequence.tokens)) // self.size
        parent, content = self.none_hash, ()
        for number in range(complete):
            if not sequence.registers:
                return
            start = number * self.size
            node = (
                tuple(sequence.tokens[start : start + self.size]),
                self._keys_of(start, sequence.lora, sequence.salt, sequence.spans),
            )
            parent, content = self.hash_block(parent, *node), (*content, node)
            if number < sequence.cached_blocks:
                continue
            block = self.blocks[sequence.table[number]]
            holder = self.index.get(parent)
            if holder is None:
                self.index[parent] = block.block_id
                block.state = REGISTERED
            elif self.blocks[holder].content == content:
                self.standbys.setdefault(parent, []).append(block.block_id)
                block.state = STANDBY
            else:
                sequence.registers = False
                return
            block.hash, block.content = parent, content
            sequence.cached_blocks = number + 1

    def _accept_drafts(self, sequence: ModelSequence, start: int, end: int) -> None:
        for layer in range(self.num_layers):
            for position in range(start, min(end, sequence.computed[layer])):
                block = self.blocks[sequence.table[position // self.size]]
                block.kv[layer][position % self.size] = self.identity(sequence, position)

    def _count(self, sequence: ModelSequence, num_hits: int, resumed: bool) -> None:
        counts, reads = self.counts, sequence.cache_use.reads and self.caching
        counts["prefill_tokens_cached"] += sequence.cached_tokens
        prefix = "resumed_" if resumed else ""
        counts[prefix + "requests"] += 1
        if reads:
            counts[prefix + "queries_tokens"] += len(sequence.tokens)
            counts[prefix + "hit_tokens"] += sequence.cached_tokens
        if reads and not resumed:
            counts["queries_blocks"] += len(sequence.tokens) // self.size
            counts["hit_blocks"] += num_hits

    def _blocks_of(self, num_tokens: int) -> int:
        return math.ceil(num_tokens / self.size)

    def _labels(self, first: int, tokens: list[int], spans: list[Span]) -> list[tuple]:
        """What stands at each position: the token, or the very piece of an image."""
        labels = []
        for position, token in enumerate(tokens, start=first):
            pieces = [
                (span.identifier, position - span.start)
                if span.identifier
                else (span.digest_of(position // self.size, self.size), position % self.size)
                for span in spans
                if span.start <= position < span.end
            ]
            labels.append((token, *pieces))
        return labels

    def _intern(self, node: tuple) -> int:
        return self._identities.setdefault(node, len(self._identities))


def _spans(keys: ExtraKeys) -> list[Span]:
    images = [
        Span(item.offset, item.offset + item.num_tokens, item.identifier)
        for item in keys.multimodal_items
    ]
    embeds = [
        Span(item.offset, item.offset + item.num_tokens, digests=item.digests)
        for item in keys.prompt_embeds
    ]
    return images + embeds

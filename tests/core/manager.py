"""A block manager of a few blocks, with calls that read like a scenario.

`T(n)` is the prompt 1..n; `A`, `C`, `U` are others that share no block with it. A sequence here
is a `Held`: what its client knows of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from prefixcache.core.append_batch import AppendBatch
from prefixcache.core.events import EventLog
from prefixcache.core.hashing import HASH_ALGORITHMS, HashAlgorithm, Hasher
from prefixcache.core.pool import Pool
from prefixcache.core.running_calls import AttentionTicket
from prefixcache.core.sequence import AppendRow, CommitRow
from prefixcache.core.sequences import Sequences
from prefixcache.core.sessions import SessionLimits
from prefixcache.errors import PrefixCacheError
from prefixcache.types import (
    NO_EXTRA_KEYS,
    AppendResult,
    CommitResult,
    ExtraKeys,
    FullHit,
    LookupResult,
    MultimodalItem,
    ResultCode,
)
from tests.support.invariants import check_invariants, snapshot

ONE, TWO = b"client one", b"client two"
SEED = "a seed of the tests"


def numbers_from(first: int) -> Callable[[int], list[int]]:
    return lambda count: list(range(first, first + count))


T, U, A, C = numbers_from(1), numbers_from(1001), numbers_from(2001), numbers_from(3001)


@dataclass
class Held:
    owner: bytes
    sequence_id: int
    num_tokens: int
    cached: int
    table: list[int]


class Manager:
    """`clock_s` is the time; every call checks the invariants."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 4,
        *,
        num_layers: int = 1,
        caching: bool = True,
        verify_hits: bool = False,
        algorithm: HashAlgorithm = HASH_ALGORITHMS["sha256_cbor"],
        owner_ttl_s: float = 600.0,
        session_limits: SessionLimits | None = None,
        events: EventLog | None = None,
    ) -> None:
        self.clock_s = 0.0
        self.pool = Pool(
            num_blocks,
            block_size,
            verify_hits,
            algorithm.digest_bytes,
            events,
            clock=lambda: self.clock_s,
        )
        self.sequences = Sequences(
            self.pool,
            Hasher(algorithm, SEED, block_size),
            num_layers=num_layers,
            caching=caching,
            owner_ttl_s=owner_ttl_s,
            session_limits=session_limits,
            clock=lambda: self.clock_s,
        )
        self.num_layers = num_layers

    # ---- calls

    def lookup(
        self,
        tokens: list[int],
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
        *,
        lookahead: int = 0,
        full_hit: FullHit = FullHit.LAST_TOKEN,
        account: int = 0,
    ) -> LookupResult:
        prompt = self.sequences.prepare(np.array(tokens, dtype=np.uint32), extra_keys)
        return self.sequences.lookup(prompt, lookahead, full_hit, account)

    def hit(self, tokens: list[int], extra_keys: ExtraKeys = NO_EXTRA_KEYS) -> int:
        return self.lookup(tokens, extra_keys).num_cached_tokens

    def allocate(
        self,
        tokens: list[int],
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
        *,
        owner: bytes = ONE,
        request_id: str = "",
        **options: Any,
    ) -> Held:
        prompt = self.sequences.prepare(np.array(tokens, dtype=np.uint32), extra_keys)
        reply = self.sequences.allocate(owner, request_id, prompt, **options)
        check_invariants(self.sequences)
        return Held(
            owner,
            reply.sequence_id,
            len(tokens),
            reply.num_cached_tokens,
            reply.block_ids.tolist(),
        )

    def commit(self, held: Held, until: int | None = None) -> CommitResult:
        """Everything up to a position, all tokens by default, is computed."""
        start = self.computed(held)
        end = held.num_tokens if until is None else until
        (result,) = self.sequences.rows.commit(
            held.owner, [CommitRow(held.sequence_id, start, end - start)]
        )
        check_invariants(self.sequences)
        return result

    def append(
        self,
        held: Held,
        tokens: list[int],
        *,
        start: int | None = None,
        kv_valid: int = 0,
        lookahead: int = 0,
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
    ) -> AppendResult:
        """Append, and keep the client's table up to date."""
        row = AppendRow(
            held.sequence_id,
            held.num_tokens if start is None else start,
            np.array(tokens, dtype=np.uint32),
            kv_valid,
            lookahead,
            extra_keys,
        )
        (result,) = self.sequences.rows.append(held.owner, AppendBatch.of([row])).results()
        check_invariants(self.sequences)
        if result.code is ResultCode.OK and start is None:
            held.num_tokens += len(tokens)
            for copy in result.copies:
                held.table[held.table.index(copy.source)] = copy.destination
            held.table += result.new_block_ids
            assert held.table == self.table(held)
        return result

    def fork(self, held: Held, num_children: int = 1, request_ids: Any = None) -> list[Held]:
        ids = self.sequences.fork(
            held.owner, held.sequence_id, held.num_tokens, request_ids or [""] * num_children
        )
        check_invariants(self.sequences)
        held.table = self.table(held)
        return [
            Held(held.owner, child, held.num_tokens, held.num_tokens, list(held.table))
            for child in ids
        ]

    def truncate(self, held: Held, num_tokens: int) -> tuple[int, ...]:
        dropped = self.sequences.truncate(held.owner, held.sequence_id, held.num_tokens, num_tokens)
        check_invariants(self.sequences)
        held.num_tokens = num_tokens
        held.table = self.table(held)
        return dropped

    def free(self, *held: Held) -> list[ResultCode]:
        codes = [code for one in held for code in self.sequences.free(one.owner, [one.sequence_id])]
        check_invariants(self.sequences)
        return codes

    def fill(self, tokens: list[int], extra_keys: ExtraKeys = NO_EXTRA_KEYS) -> list[int]:
        """Allocate, compute, commit, free; returns the blocks it had."""
        held = self.allocate(tokens, extra_keys)
        self.commit(held)
        self.free(held)
        return held.table

    def begin(self, layer: int, *held: Held, num_tokens: int | None = None) -> AttentionTicket:
        """Start an attention call over what each sequence's layer has not computed yet."""
        starts = [self.record(one).computed[layer] for one in held]
        counts = [
            one.num_tokens - start if num_tokens is None else num_tokens
            for one, start in zip(held, starts, strict=True)
        ]
        ids = [one.sequence_id for one in held]
        return self.sequences.running.begin_attention(held[0].owner, layer, ids, starts, counts)

    def end(self, ticket: AttentionTicket, *, written: bool = True) -> None:
        self.sequences.running.end_attention(ticket, written=written)
        check_invariants(self.sequences)

    def attend(self, *held: Held, num_tokens: int | None = None) -> None:
        """All layers compute what is missing, or `num_tokens`, drafts included."""
        for layer in range(self.num_layers):
            self.end(self.begin(layer, *held, num_tokens=num_tokens))

    # ---- what it holds

    def record(self, held: Held) -> Any:
        return self.sequences.live.find(held.owner, held.sequence_id)

    def table(self, held: Held) -> list[int]:
        return self.record(held).blocks().tolist()

    def computed(self, held: Held) -> int:
        return self.record(held).num_computed

    def free_order(self) -> list[int]:
        return self.pool.free_order().tolist()

    def refs(self, block_ids: list[int]) -> list[int]:
        return self.pool.ref_cnt[block_ids].tolist()

    def hashes(self, block_ids: list[int]) -> list[bytes | None]:
        return [self.pool.hash_of(block) for block in block_ids]

    def states(self, block_ids: list[int]) -> list[int]:
        return [self.pool.state_of(block) for block in block_ids]


def refused(
    manager: Manager, error: type[PrefixCacheError], call: Callable[[], object]
) -> PrefixCacheError:
    """The call is refused with that error and changes nothing."""
    before = snapshot(manager.sequences)
    with pytest.raises(error) as caught:
        call()
    assert snapshot(manager.sequences) == before
    return caught.value


def room(error: PrefixCacheError) -> dict[str, str | int]:
    """The numbers of a refusal for want of room, without who holds most."""
    return {name: value for name, value in error.fields.items() if "holder" not in name}


def image(identifier: str, offset: int, num_tokens: int) -> ExtraKeys:
    return ExtraKeys(multimodal_items=(MultimodalItem(identifier, offset, num_tokens),))


def forked(manager: Manager, num_tokens: int = 6) -> tuple[Held, Held]:
    """A sequence with all tokens computed, and its only fork."""
    parent = manager.allocate(T(num_tokens))
    manager.commit(parent)
    (child,) = manager.fork(parent)
    return parent, child

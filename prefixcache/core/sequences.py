"""The calls of the block manager: every RPC on sequences ends here.

Owns the counters; `LiveSequences` owns who lives, the pool owns the blocks. Knows no K/V memory:
with storage, `prefixcache.engine` runs attention and copies between the `begin_*` and `end_*`
calls here. Input is checked by the servicer; this module checks state.

Not thread-safe: whoever calls holds `lock` around each call (`prepare` needs none). A call that
raises, and a row that is refused, leaves everything as it was but for the counters of refusals.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace

import numpy as np

from prefixcache.core import growth
from prefixcache.core.admission import Plan, admit_prompt, plan_prompt
from prefixcache.core.append_batch import AppendBatch, AppendedBatch
from prefixcache.core.explain import Explainer
from prefixcache.core.form import FORM
from prefixcache.core.hashing import Hasher
from prefixcache.core.holders import LargestHolders
from prefixcache.core.live import LiveSequences
from prefixcache.core.pending import PendingBlocks, Waiter
from prefixcache.core.pool import Pool
from prefixcache.core.recent_keys import RecentKeys
from prefixcache.core.sequence import (
    AppendRow,
    AttentionTicket,
    CommitRow,
    CopyTicket,
    Prompt,
    Sequence,
    uint32_array,
)
from prefixcache.core.sessions import Session, SessionLimits, is_session_id
from prefixcache.core.stats import Counters, PoolStats
from prefixcache.core.tenants import TenantQuota, Tenants
from prefixcache.errors import (
    BeyondTokensError,
    BlocksInUseError,
    ExceedsPoolError,
    InvalidArgumentError,
    NoRoomError,
    NotComputedError,
    PrefixCacheError,
    QuotaExceededError,
    RequestIdConflictError,
    SequenceBusyError,
    SequenceNotFoundError,
    StorageOwnedError,
    WrongPositionError,
)
from prefixcache.types import (
    AllocateResult,
    AppendResult,
    BlockCopy,
    CacheUse,
    CommitResult,
    Explanation,
    ExtraKeys,
    FullHit,
    LookupResult,
    ResultCode,
    SequenceId,
    TokenIds,
)

_native_append_batch: Callable[..., AppendedBatch] | None = None
_native_commit_rows: Callable[..., list[CommitResult]] | None = None
if FORM == "native":
    from prefixcache.core.native.append import append_batch
    from prefixcache.core.native.commit import commit_rows

    _native_append_batch, _native_commit_rows = append_batch, commit_rows

_MIN_BLOCKS_OF_GUESS = 512
"""The walk along fewer blocks takes less than 0.1 ms, for which others can wait."""
_RESULT_CODES: dict[type[PrefixCacheError], ResultCode] = {
    SequenceNotFoundError: ResultCode.NOT_FOUND,
    WrongPositionError: ResultCode.WRONG_POSITION,
    SequenceBusyError: ResultCode.BUSY,
    NoRoomError: ResultCode.NO_ROOM,
    ExceedsPoolError: ResultCode.EXCEEDS_POOL,
    BeyondTokensError: ResultCode.BEYOND_TOKENS,
    QuotaExceededError: ResultCode.QUOTA_EXCEEDED,
}


class Sequences:
    """All live sequences over one pool, and the sessions that hold them.

    Every call that names a session raises SessionNotFoundError once that has ended.

    num_layers: layers that each count their computed tokens; 1 without K/V storage, where Commit
    is the only layer. caching: off means that nothing is hashed, hit or registered. on_allocated:
    is told of each new sequence's prompt, cache use, and whether it is resumed; it must not raise
    or wait, for it runs under the lock.
    """

    def __init__(
        self,
        pool: Pool,
        hasher: Hasher,
        *,
        num_layers: int = 1,
        caching: bool = True,
        owner_ttl_s: float = 600.0,
        session_limits: SessionLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_allocated: Callable[[Prompt, CacheUse, bool], None] | None = None,
    ) -> None:
        self.lock = threading.Lock()
        self.pool = pool
        self.hasher = hasher
        self.counters = Counters()
        self.tenants = Tenants(pool)
        self._num_layers = num_layers
        self._caching = caching
        self._clock = clock
        self._on_allocated = on_allocated
        self.pending = PendingBlocks(pool.digest_bytes)
        self.live = LiveSequences(
            pool, self.pending, owner_ttl_s, clock, session_limits or SessionLimits()
        )
        self._holders = LargestHolders(self.live, clock)
        self._recent_keys = RecentKeys()
        self._explainer = Explainer(pool, self.live, hasher, self._recent_keys)

    def set_tenants(self, quotas: Iterable[TenantQuota]) -> None:
        """`Tenants.apply`; each has its share of the sessions, and of the owners without, too."""
        wanted = list(quotas)
        self.tenants.apply(wanted)
        account_of = self.tenants.account_of
        self.live.share_among({one.name: account_of(one.name, one.namespace) for one in wanted})

    # ---- prompts

    def prepare(self, token_ids: TokenIds, extra_keys: ExtraKeys) -> Prompt:
        """Hash a prompt (`[n] uint32`, n >= 1), and walk the index along a long one.

        The costly steps, which change nothing: call it unlocked.
        """
        if not self._caching:
            return Prompt(token_ids, extra_keys, None)
        chain = self.hasher.chain(None, token_ids, extra_keys)
        if len(chain.hashes) >= _MIN_BLOCKS_OF_GUESS:
            chain = replace(chain, guess=self.pool.guess(chain.hashes))
        return Prompt(token_ids, extra_keys, chain)

    def lookup(
        self, prompt: Prompt, num_lookahead_tokens: int, full_hit: FullHit, account: int = 0
    ) -> LookupResult:
        """What Allocate would find. Changes nothing, not even the order of eviction."""
        plan = self._plan(prompt, num_lookahead_tokens, CacheUse.READ_WRITE, full_hit, account)
        return LookupResult(
            num_cached_tokens=plan.num_cached_tokens,
            num_cached_blocks=len(plan.hits),
            num_blocks_needed=max(plan.num_needed, plan.num_over_quota),
            num_blocks_free=min(plan.num_available, max(0, plan.num_needed - plan.num_over_quota)),
            num_pending_tokens=plan.num_pending_tokens,
        )

    def explain(
        self,
        prompt: Prompt,
        full_hit: FullHit,
        cache_use: CacheUse = CacheUse.READ_WRITE,
        account: int = 0,
    ) -> Explanation:
        """Why Allocate would find no more than it does. Changes nothing."""
        plan = self._plan(prompt, 0, cache_use, full_hit, account)
        return self._explainer.explain(prompt, plan, full_hit, cache_use)

    def allocate(
        self,
        owner: bytes,
        request_id: str,
        prompt: Prompt,
        *,
        num_lookahead_tokens: int = 0,
        cache_use: CacheUse = CacheUse.READ_WRITE,
        full_hit: FullHit = FullHit.LAST_TOKEN,
        resumed: bool = False,
        account: int = 0,
    ) -> AllocateResult:
        """A new sequence with references on its hits and its new blocks, of an account.

        Raises ExceedsPoolError, QuotaExceededError, NoRoomError, TooManySequencesError,
        TooManyOwnersError or RequestIdConflictError. A repeat (same owner, request_id and content,
        sequence unchanged) is answered with the first reply.
        """
        call = ("allocate", num_lookahead_tokens, cache_use, full_hit, resumed, prompt.extra_keys)
        earlier = self.live.touch(owner).get(request_id)
        if earlier is not None:
            return self._repeated_allocate(earlier, call, prompt)
        self.live.check_can_add(owner, 1, account)

        chain, num_tokens = prompt.chain, len(prompt.token_ids)
        try:
            admitted = admit_prompt(
                self.pool,
                self.pending,
                num_tokens,
                chain if cache_use.reads else None,
                num_lookahead_tokens,
                full_hit,
                account,
            )
        except (ExceedsPoolError, QuotaExceededError):
            self.counters.allocation_refused += 1
            self.tenants.count_refusal(account)
            raise
        except NoRoomError as error:
            self.counters.allocation_refused += 1
            self.tenants.count_refusal(account)
            raise error.naming(self._holders.largest(account)) from None
        table, num_hits, num_cached_tokens, num_pending_tokens = admitted
        block_ids = np.frombuffer(table.tobytes(), dtype=np.int32)

        registers = cache_use.writes and self._caching
        hashes = chain.hashes.data if registers and chain is not None else b""
        sequence = Sequence(
            sequence_id=self.live.new_id(),
            serial=self.live.next_serial(),
            owner=owner,
            request_id=request_id,
            cache_use=cache_use,
            extra_keys=prompt.extra_keys,
            token_ids=uint32_array(prompt.token_ids),
            block_table=table,
            hashes=bytearray(hashes),
            computed=[num_cached_tokens] * self._num_layers,
            num_prompt_tokens=num_tokens,
            num_cached_tokens=num_cached_tokens,
            num_cached_blocks=num_hits,
            first_writable=num_hits * self.pool.block_size,
            registers=registers,
            last_attention_start={},
            created_at_s=self._clock(),
            account=account,
            num_lookahead_tokens=num_lookahead_tokens,
        )
        self.live.add(sequence)
        self._recent_keys.note(prompt.extra_keys)
        self.pending.begin(sequence, hashes)
        self._count_allocation(sequence, num_hits, resumed)
        reply = AllocateResult(
            sequence.sequence_id, num_cached_tokens, num_hits, block_ids, num_pending_tokens
        )
        self._applied(sequence, call, reply)
        if self._on_allocated is not None:
            self._on_allocated(prompt, cache_use, resumed)
        return reply

    def wait_for_pending(
        self,
        owner: bytes,
        request_id: str,
        prompt: Prompt,
        wake: Callable[[], object],
        *,
        num_lookahead_tokens: int = 0,
        cache_use: CacheUse = CacheUse.READ_WRITE,
        full_hit: FullHit = FullHit.LAST_TOKEN,
        account: int = 0,
    ) -> Waiter | None:
        """In place of an `allocate` that would find pending blocks; None if that is to be made now.

        `wake` is called, under the lock, when it is time to look again; `pending.stop_waiting` ends
        that. Until then nothing is held. Raises SessionNotFoundError or TooManySequencesError.
        """
        if request_id in self.live.touch(owner):
            return None
        self.live.check_can_add(owner, 1, account)
        plan = self._plan(prompt, num_lookahead_tokens, cache_use, full_hit, account)
        if not plan.num_pending_tokens or plan.num_blocks > self.pool.num_allowed(account):
            return None
        assert prompt.chain is not None
        num_tokens = plan.num_cached_tokens + plan.num_pending_tokens
        last = growth.num_blocks_of(num_tokens, self.pool.block_size) - 1
        return self.pending.wait(owner, prompt.chain.hashes[last], wake)

    # ---- growth

    def append(self, owner: bytes, batch: AppendBatch, account: int = 0) -> AppendedBatch:
        """Append each row in turn; one that is refused is unchanged and the rest go on.

        account: for which the blocks that are free after the batch are counted.

        With storage the caller makes the copies, between `begin_copies` (under the same lock) and
        `end_copies`.
        """
        self.live.touch(owner)
        if _native_append_batch is not None:
            return _native_append_batch(
                self.pool,
                self.hasher,
                self.live.by_id,
                owner,
                batch,
                self._append_row,
                self._begin_appended,
                account,
            )
        results = [self._append_row(owner, row) for row in batch.rows()]
        return AppendedBatch.of(results, self.pool.num_available(account))

    def _append_row(self, owner: bytes, row: AppendRow) -> AppendResult:
        call = (
            "append",
            row.start_position,
            len(row.token_ids),
            row.num_kv_valid,
            row.num_lookahead_tokens,
            row.extra_keys,
        )
        sequence = None
        try:
            sequence = self.live.idle(owner, row.sequence_id)
            if sequence.last_call == call and sequence.has_tokens(
                row.start_position, row.token_ids
            ):
                repeated: AppendResult = sequence.last_reply
                return repeated
            growth.check_position(sequence, row.start_position, sequence.num_tokens)
            reply = growth.append(self.pool, self.hasher, sequence, row)
        except PrefixCacheError as error:
            if sequence and isinstance(error, (NoRoomError, ExceedsPoolError, QuotaExceededError)):
                self.counters.append_refused += 1
                self.tenants.count_refusal(sequence.account)
            return AppendResult(_RESULT_CODES[type(error)])
        self._applied(sequence, call, reply)
        if row.extra_keys:
            self._recent_keys.note(sequence.extra_keys)
        if len(row.token_ids) >= self.pool.block_size:
            self._begin_appended(sequence)
        if row.num_kv_valid:
            self._commit(sequence, sequence.num_computed)
        return reply

    def _begin_appended(self, sequence: Sequence) -> None:
        """A block's tokens or more were appended at once: others may be about to do the same."""
        self.pending.begin(sequence, bytes(sequence.hashes))

    def begin_copies(self, owner: bytes, sequence_ids: Iterable[int]) -> CopyTicket:
        """Keep sequences still while their pending copies run outside the lock.

        sequence_ids: those that an `append` has just applied to, a repeat or not; only copies
        that have not been made yet are pending.
        """
        sequences = [self.live.find(owner, sequence_id) for sequence_id in sequence_ids]
        pending = tuple(sequence for sequence in sequences if sequence.copy_holds)
        copies: list[BlockCopy] = []
        for sequence in pending:
            sequence.is_copying = True
            copies += sequence.last_reply.copies
        return CopyTicket(pending, tuple(copies))

    def end_copies(self, ticket: CopyTicket) -> None:
        """The copies are done: their sources need no hold any more."""
        for sequence in ticket.sequences:
            sequence.is_copying = False
            if self.live.is_alive(sequence):
                growth.release_copy_holds(self.pool, sequence)
            self.live.bury_if_idle(sequence)

    def commit(self, owner: bytes, rows: Iterable[CommitRow]) -> list[CommitResult]:
        """The client itself has written K/V of all layers up to a position."""
        self.live.touch(owner)
        if _native_commit_rows is not None:
            results: list[CommitResult] = _native_commit_rows(
                self.pool.block_size, self.counters, self.live.by_id, owner, rows, self._commit_row
            )
            return results
        return [self._commit_row(owner, row) for row in rows]

    def _commit_row(self, owner: bytes, row: CommitRow) -> CommitResult:
        call = ("commit", row.start_position, row.num_computed_tokens)
        try:
            sequence = self.live.idle(owner, row.sequence_id)
            if sequence.last_call == call:
                repeated: CommitResult = sequence.last_reply
                return repeated
            if sequence.commit_before is not None and sequence.commit_before[0] == call:
                return sequence.commit_before[1]
            growth.check_position(sequence, row.start_position, sequence.num_computed)
            end = row.start_position + row.num_computed_tokens
            if end > sequence.num_tokens:
                raise BeyondTokensError(row.sequence_id, end, sequence.num_tokens)
        except PrefixCacheError as error:
            return CommitResult(_RESULT_CODES[type(error)])
        growth.release_copy_holds(self.pool, sequence)
        self._advance_all(sequence, end)
        reply = CommitResult(ResultCode.OK, sequence.num_cached_blocks)
        self._applied(sequence, call, reply)
        return reply

    def fork(
        self, owner: bytes, sequence_id: int, num_tokens: int, request_ids: list[str]
    ) -> list[SequenceId]:
        """Children, one a request id, that share all blocks; both sides lose their lookahead.

        Raises SequenceNotFoundError, SequenceBusyError, WrongPositionError, NotComputedError,
        TooManySequencesError or RequestIdConflictError. Request ids are all empty (no retry key)
        or all given.
        """
        call = ("fork", num_tokens, tuple(request_ids))
        requests = self.live.touch(owner)
        parent = self.live.idle(owner, sequence_id)
        known = [requests[request_id] for request_id in request_ids if request_id in requests]
        if known:
            children_ids = tuple(child.sequence_id for child in known)
            if parent.last_call == call and parent.last_reply == children_ids:
                return list(children_ids)
            raise RequestIdConflictError(known[0].request_id)
        growth.check_position(parent, num_tokens, parent.num_tokens)
        if parent.num_computed < num_tokens:
            raise NotComputedError(sequence_id, parent.num_computed, num_tokens)
        self.live.check_can_add(owner, len(request_ids), parent.account)

        growth.drop_blocks_after(self.pool, parent, num_tokens)
        parent.computed = [num_tokens] * self._num_layers
        parent.first_writable = num_tokens
        children = []
        for request_id in request_ids:
            self.pool.acquire(parent.blocks(), parent.account)
            child = parent.child(
                self.live.new_id(), self.live.next_serial(), request_id, self._clock()
            )
            self.live.add(child)
            children.append(child.sequence_id)
        self._applied(parent, call, tuple(children))
        return children

    def truncate(
        self, owner: bytes, sequence_id: int, num_tokens_before: int, num_tokens_after: int
    ) -> tuple[int, ...]:
        """Cut a sequence; returns the block ids it dropped.

        Raises SequenceNotFoundError, SequenceBusyError, WrongPositionError or
        InvalidArgumentError.
        """
        call = ("truncate", num_tokens_before, num_tokens_after)
        self.live.touch(owner)
        sequence = self.live.idle(owner, sequence_id)
        if sequence.last_call == call:
            repeated: tuple[int, ...] = sequence.last_reply
            return repeated
        growth.check_position(sequence, num_tokens_before, sequence.num_tokens)
        if not 1 <= num_tokens_after <= num_tokens_before:
            raise InvalidArgumentError(
                "num_tokens_after",
                f"is {num_tokens_after}, must be 1 to num_tokens_before ({num_tokens_before})",
            )
        dropped = growth.truncate(self.pool, sequence, num_tokens_after)
        self.pending.cut(sequence, num_tokens_after // self.pool.block_size)
        self._applied(sequence, call, dropped)
        return dropped

    def free(
        self, owner: bytes, sequence_ids: Iterable[int], request_ids: Iterable[str] = ()
    ) -> list[ResultCode]:
        """End sequences, those named by id before those named by request id.

        The blocks of one with a running call go when that has ended.
        """
        requests = self.live.touch(owner)
        codes = [self._end(self.live.get(owner, sequence_id)) for sequence_id in sequence_ids]
        codes += [self._end(requests.get(request_id)) for request_id in request_ids]
        return codes

    def _end(self, sequence: Sequence | None) -> ResultCode:
        if sequence is None:
            return ResultCode.NOT_FOUND
        self.live.end(sequence)
        return ResultCode.OK

    # ---- attention

    def begin_attention(
        self,
        owner: bytes,
        layer: int,
        sequence_ids: list[int],
        start_positions: list[int],
        num_tokens: list[int],
    ) -> AttentionTicket:
        """Check a whole batch, then hold its sequences until `end_attention`.

        A repeat of the last applied call of the layer gets a row that writes nothing. Raises
        SequenceNotFoundError, SequenceBusyError, WrongPositionError, BeyondTokensError, or
        InvalidArgumentError for an id that stands twice.
        """
        self.live.touch(owner)
        if len(set(sequence_ids)) < len(sequence_ids):
            raise InvalidArgumentError("sequence_ids", "holds one sequence twice")
        size = self.pool.block_size
        rows = tuple(
            growth.attention_row(self.live.find(owner, sequence_id), layer, start, count, size)
            for sequence_id, start, count in zip(
                sequence_ids, start_positions, num_tokens, strict=True
            )
        )
        for row in rows:
            sequence = row.sequence
            growth.release_copy_holds(self.pool, sequence)
            sequence.last_call = sequence.last_reply = sequence.commit_before = None
            sequence.running_layers.add(layer)
        return AttentionTicket(owner, layer, rows)

    def end_attention(self, ticket: AttentionTicket, *, written: bool) -> None:
        """Take a batch back. `written`: its K/V are in place, so the layer has advanced."""
        self.live.call_ended(ticket.owner)
        for row in ticket.rows:
            sequence = row.sequence
            sequence.running_layers.discard(ticket.layer)
            alive = self.live.is_alive(sequence)
            if written and alive and not row.is_repeat:
                sequence.last_attention_start[ticket.layer] = row.start_position
                self._advance(sequence, ticket.layer, row.start_position + row.num_tokens)
            self.live.bury_if_idle(sequence)

    # ---- sessions

    def open_session(
        self, ttl_s: float, client_name: str, request_id: str = "", tenant: str = ""
    ) -> Session:
        """`Sessions.open`; its id is the owner of what is allocated in it."""
        return self.live.sessions.open(ttl_s, client_name, request_id, tenant)

    def close_session(self, session_id: bytes) -> int:
        """End a session and its sequences; returns how many. Raises SessionNotFoundError."""
        return self.live.end_session(self.live.sessions.find(session_id))

    # ---- writers outside

    def attach(self, session_id: bytes, attachment: int) -> None:
        """The process behind an attachment may write to a session's blocks itself, from now on.

        If the session then ends, unasked or closed, its blocks that were not committed are
        quarantined until `release_quarantine` of all its attachments: some thread of the process
        may be in the middle of a write. A client that frees or cuts a sequence has stopped writing
        to it before it says so, and one that detaches before it closes the session has altogether:
        that quarantines nothing.

        attachment: a number of the caller's, for one process, that it never uses again; may be
        attached to many sessions. Raises SessionNotFoundError.
        """
        session = self.live.sessions.renew(session_id)
        session.attachments.add(attachment)
        session.writes_itself = True

    def check_writes_itself(self, owner: bytes) -> None:
        """Its client has, or had, an attachment: only then does it know what is in the blocks.

        Raises StorageOwnedError, or SessionNotFoundError for a session that has ended.
        """
        if not is_session_id(owner) or not self.live.sessions.find(owner).writes_itself:
            raise StorageOwnedError

    def release_quarantine(self, attachment: int) -> int:
        """The process behind an attachment has ended, or has no mapping any more.

        Frees what it alone could still write to, and returns how many blocks that are. Live
        sessions of the attachment go on without it. One that is not known is no error.
        """
        return self.live.end_writer(attachment)

    # ---- operators

    def reset(self, *, force: bool) -> int:
        """Drop every cached hash; returns how many there were.

        Raises BlocksInUseError if blocks are referenced, unless forced. Sequences alive at a
        forced reset, and their forks, never register again. Quarantined blocks stay where they are
        and stand against no reset: nobody reads them.
        """
        if self.pool.num_referenced and not force:
            raise BlocksInUseError(self.pool.num_referenced)
        num_cached = self.pool.num_cached
        self.pool.clear()
        for sequence in self.live.all_holders():
            growth.stop_registering(sequence)
            sequence.num_cached_blocks = 0
        self.pending.clear()
        self.counters.resets += 1
        return num_cached

    def expire(self) -> int:
        """End the sessions whose time is over, and free their sequences and those of silent owners.

        Returns how many sequences that were.
        """
        silent = self.live.expired()
        for sequence in silent:
            self.live.end(sequence)
        num_expired = len(silent)
        for session in self.live.sessions.expired():
            num_expired += self.live.end_session(session)
            self.counters.expired_sessions += 1
        self.counters.expired_sequences += num_expired
        return num_expired

    def counts(self) -> dict[str, int]:
        """What `stats` says, but for what is counted by a walk over all live sequences."""
        pool = self.pool
        return {
            "num_blocks": pool.num_blocks,
            "block_size": pool.block_size,
            "referenced": pool.num_referenced,
            "quarantined": pool.num_quarantined,
            "evictable": pool.num_evictable,
            "blank": pool.num_blank,
            "cached": pool.num_cached,
            "sequences": len(self.live),
            "owners": self.live.num_owners,
            "sessions": len(self.live.sessions),
            "evictions": pool.num_evictions,
            **asdict(self.counters),
        }

    def stats(self) -> PoolStats:
        return PoolStats(
            **self.counts(),
            slots_written=self.live.num_slots_written(),
            tenants=self.tenants.stats(),
            calls=(),
        )

    # ---- inside

    def _plan(
        self,
        prompt: Prompt,
        num_lookahead_tokens: int,
        cache_use: CacheUse,
        full_hit: FullHit,
        account: int,
    ) -> Plan:
        chain = prompt.chain if cache_use.reads else None
        num_tokens = len(prompt.token_ids)
        return plan_prompt(
            self.pool, self.pending, num_tokens, chain, num_lookahead_tokens, full_hit, account
        )

    def _repeated_allocate(
        self, sequence: Sequence, call: tuple[object, ...], prompt: Prompt
    ) -> AllocateResult:
        same_tokens = sequence.num_tokens == len(prompt.token_ids) and sequence.has_tokens(
            0, prompt.token_ids
        )
        if sequence.last_call != call or not same_tokens:
            raise RequestIdConflictError(sequence.request_id)
        reply: AllocateResult = sequence.last_reply
        return reply

    def _count_allocation(self, sequence: Sequence, num_hit_blocks: int, resumed: bool) -> None:
        counters, num_tokens = self.counters, sequence.num_tokens
        reads = sequence.cache_use.reads and self._caching
        if resumed:
            counters.resumed_requests += 1
            if reads:
                counters.resumed_queries_tokens += num_tokens
                counters.resumed_hit_tokens += sequence.num_cached_tokens
        else:
            counters.requests += 1
            if reads:
                counters.queries_tokens += num_tokens
                counters.hit_tokens += sequence.num_cached_tokens
                counters.queries_blocks += num_tokens // self.pool.block_size
                counters.hit_blocks += num_hit_blocks
        counters.prefill_tokens_cached += sequence.num_cached_tokens

    def _applied(self, sequence: Sequence, call: tuple[object, ...], reply: object) -> None:
        """A state call is done, and a repeat of it can be answered."""
        before = sequence.last_call
        is_step = call[0] == "append" and before is not None and before[0] == "commit"
        sequence.commit_before = (before, sequence.last_reply) if is_step and before else None
        sequence.last_call = call
        sequence.last_reply = reply
        sequence.last_attention_start.clear()

    def _advance(self, sequence: Sequence, layer: int, position: int) -> None:
        computed = sequence.computed
        before, computed[layer] = computed[layer], position
        num_computed = min(computed)
        # The least of all layers was that of this one, or is what it is now.
        self._complete(sequence, min(before, num_computed), num_computed)

    def _advance_all(self, sequence: Sequence, position: int) -> None:
        before = sequence.num_computed
        sequence.computed = [max(count, position) for count in sequence.computed]
        self._complete(sequence, before, sequence.num_computed)

    def _complete(self, sequence: Sequence, before: int, num_computed: int) -> None:
        """before: tokens with K/V in all layers until now."""
        prompt_end = sequence.num_prompt_tokens
        if before < prompt_end:
            self.counters.prefill_tokens_computed += min(num_computed, prompt_end) - before
        self._commit(sequence, num_computed)

    def _commit(self, sequence: Sequence, num_computed: int) -> None:
        start, registers = sequence.num_cached_blocks, sequence.registers
        growth.commit(self.pool, sequence, num_computed)
        if sequence.num_cached_blocks > start or sequence.registers != registers:
            self.pending.advance(sequence, start)

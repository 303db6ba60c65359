"""The block manager: how sequences begin, fork, are cut and end, and what operators ask.

Owns the counters, and joins the parts that other calls go to: `rows` has Append and Commit,
`running` what runs outside the lock, `live` knows who lives, with its `sessions`, `listings` shows
them, and the pool owns the blocks. Knows no K/V memory. The servicer checks input; this, state.

Not thread-safe: whoever calls it or a part holds `lock` around each call (`prepare` needs none). A
call that raises, and a row that is refused, leaves everything as it was but for the counters of
refusals.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict

import numpy as np

from prefixcache.core import growth
from prefixcache.core.admission import Plan, Terms, begin_sequence, plan_prompt
from prefixcache.core.explain import Explainer
from prefixcache.core.hashing import Hasher
from prefixcache.core.holders import LargestHolders
from prefixcache.core.listings import Listings
from prefixcache.core.live import LiveSequences
from prefixcache.core.pending import PendingBlocks, Waiter
from prefixcache.core.pool import Pool
from prefixcache.core.progress import Progress
from prefixcache.core.recent_keys import RecentKeys
from prefixcache.core.row_calls import RowCalls
from prefixcache.core.running_calls import RunningCalls
from prefixcache.core.sequence import Prompt, Sequence
from prefixcache.core.sessions import SessionLimits
from prefixcache.core.slots import num_slots_written
from prefixcache.core.stats import Counters, PoolStats
from prefixcache.core.tenants import TenantQuota, Tenants
from prefixcache.errors import (
    BlocksInUseError,
    ExceedsPoolError,
    InvalidArgumentError,
    NoRoomError,
    NotComputedError,
    QuotaExceededError,
    RequestIdConflictError,
)
from prefixcache.types import (
    NO_EXTRA_KEYS,
    AllocateResult,
    CacheUse,
    Explanation,
    ExtraKeys,
    FullHit,
    LookupResult,
    ResultCode,
    SequenceId,
    TokenIds,
)

_MIN_BLOCKS_OF_GUESS = 512
"""The walk along fewer blocks takes less than 0.1 ms, for which others can wait."""


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
        self.listings = Listings(self.live, clock)
        self._holders = LargestHolders(self.live, clock)
        self._recent_keys = RecentKeys()
        self._explainer = Explainer(pool, self.live, hasher, self._recent_keys)
        progress = Progress(pool, self.pending, self.counters)
        self.running = RunningCalls(pool, self.live, progress)
        self.rows = RowCalls(
            pool,
            hasher,
            self.live,
            self.pending,
            progress,
            self._recent_keys,
            self.counters,
            self.tenants,
        )

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
        token_ids = np.ascontiguousarray(token_ids)
        if not self._caching:
            return Prompt(token_ids, extra_keys, None)
        chain = self.hasher.chain(None, token_ids, extra_keys)
        if len(token_ids) >= _MIN_BLOCKS_OF_GUESS * self.pool.block_size:
            chain = chain._replace(guess=self.pool.guess(chain.hashes))
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

        registers = cache_use.writes and self._caching
        terms = Terms(
            owner,
            request_id,
            num_lookahead_tokens,
            cache_use,
            full_hit,
            account,
            registers,
            self._num_layers,
            self._clock(),
        )
        try:
            sequence, num_pending_tokens = begin_sequence(self.pool, self.pending, prompt, terms)
        except (ExceedsPoolError, QuotaExceededError):
            self.counters.allocation_refused += 1
            self.tenants.count_refusal(account)
            raise
        except NoRoomError as error:
            self.counters.allocation_refused += 1
            self.tenants.count_refusal(account)
            raise error.naming(self._holders.largest(account)) from None
        self.live.add(sequence)
        if prompt.extra_keys is not NO_EXTRA_KEYS:
            self._recent_keys.note(prompt.extra_keys)
        if registers and prompt.chain is not None:
            self.pending.begin(sequence, prompt.chain.hashes.data)
        reads = cache_use.reads and self._caching
        size = self.pool.block_size
        self.counters.count_allocation(sequence, size, reads=reads, resumed=resumed)
        reply = AllocateResult(
            sequence.sequence_id,
            sequence.num_cached_tokens,
            sequence.num_cached_blocks,
            sequence.blocks(),
            num_pending_tokens,
        )
        sequence.note_applied(call, reply)
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

    # ---- sequences

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
            child = parent.child(request_id, self._clock())
            self.live.add(child)
            children.append(child.sequence_id)
        parent.note_applied(call, tuple(children))
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
        sequence.note_applied(call, dropped)
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
            slots_written=num_slots_written(self.pool, self.live.all_holders()),
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

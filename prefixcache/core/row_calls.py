"""Append and Commit, which an engine makes at every step: a batch with a row a sequence.

A row that is refused is unchanged and the others go on, so a refusal is a result here and no error.
Compiled code does the plain rows, where it is there, and leaves the others to the functions here.
Guarded by the core's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prefixcache.core import growth
from prefixcache.core.append_batch import AppendBatch, AppendedBatch
from prefixcache.core.form import FORM
from prefixcache.core.hashing import Hasher
from prefixcache.core.live import LiveSequences
from prefixcache.core.pending import PendingBlocks
from prefixcache.core.pool import Pool
from prefixcache.core.progress import Progress
from prefixcache.core.recent_keys import RecentKeys
from prefixcache.core.sequence import AppendRow, CommitRow, Sequence
from prefixcache.core.stats import Counters
from prefixcache.core.tenants import Tenants
from prefixcache.errors import (
    BeyondTokensError,
    ExceedsPoolError,
    NoRoomError,
    PrefixCacheError,
    QuotaExceededError,
    SequenceBusyError,
    SequenceNotFoundError,
    WrongPositionError,
)
from prefixcache.types import AppendResult, CommitResult, ResultCode

_native_append_batch: Callable[..., AppendedBatch] | None = None
_native_commit_rows: Callable[..., list[CommitResult]] | None = None
if FORM == "native":
    from prefixcache.core.native.append import append_batch
    from prefixcache.core.native.commit import commit_rows

    _native_append_batch, _native_commit_rows = append_batch, commit_rows

_RESULT_CODES: dict[type[PrefixCacheError], ResultCode] = {
    SequenceNotFoundError: ResultCode.NOT_FOUND,
    WrongPositionError: ResultCode.WRONG_POSITION,
    SequenceBusyError: ResultCode.BUSY,
    NoRoomError: ResultCode.NO_ROOM,
    ExceedsPoolError: ResultCode.EXCEEDS_POOL,
    BeyondTokensError: ResultCode.BEYOND_TOKENS,
    QuotaExceededError: ResultCode.QUOTA_EXCEEDED,
}


class RowCalls:
    def __init__(
        self,
        pool: Pool,
        hasher: Hasher,
        live: LiveSequences,
        pending: PendingBlocks,
        progress: Progress,
        recent_keys: RecentKeys,
        counters: Counters,
        tenants: Tenants,
    ) -> None:
        self._pool = pool
        self._hasher = hasher
        self._live = live
        self._pending = pending
        self._progress = progress
        self._recent_keys = recent_keys
        self._counters = counters
        self._tenants = tenants

    def append(self, owner: bytes, batch: AppendBatch, account: int = 0) -> AppendedBatch:
        """Append each row in turn; one that is refused is unchanged and the rest go on.

        account: for which the blocks that are free after the batch are counted.

        With storage the caller makes the copies, between `begin_copies` (under the same lock) and
        `end_copies`.
        """
        self._live.touch(owner)
        if _native_append_batch is not None:
            return _native_append_batch(
                self._pool,
                self._hasher,
                self._live.by_id,
                owner,
                batch,
                self._append_row,
                self._begin_appended,
                account,
            )
        results = [self._append_row(owner, row) for row in batch.rows()]
        return AppendedBatch.of(results, self._pool.num_available(account))

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
            sequence = self._live.idle(owner, row.sequence_id)
            if sequence.last_call == call and sequence.has_tokens(
                row.start_position, row.token_ids
            ):
                repeated: AppendResult = sequence.last_reply
                return repeated
            growth.check_position(sequence, row.start_position, sequence.num_tokens)
            reply = growth.append(self._pool, self._hasher, sequence, row)
        except PrefixCacheError as error:
            if sequence and isinstance(error, (NoRoomError, ExceedsPoolError, QuotaExceededError)):
                self._counters.append_refused += 1
                self._tenants.count_refusal(sequence.account)
            return AppendResult(_RESULT_CODES[type(error)])
        sequence.note_applied(call, reply)
        if row.extra_keys:
            self._recent_keys.note(sequence.extra_keys)
        if len(row.token_ids) >= self._pool.block_size:
            self._begin_appended(sequence)
        if row.num_kv_valid:
            self._progress.commit(sequence, sequence.num_computed)
        return reply

    def _begin_appended(self, sequence: Sequence) -> None:
        """A block's tokens or more were appended at once: others may be about to do the same."""
        self._pending.begin(sequence, bytes(sequence.hashes))

    def commit(self, owner: bytes, rows: Iterable[CommitRow]) -> list[CommitResult]:
        """The client itself has written K/V of all layers up to a position."""
        self._live.touch(owner)
        if _native_commit_rows is not None:
            results: list[CommitResult] = _native_commit_rows(
                self._pool.block_size,
                self._counters,
                self._live.by_id,
                owner,
                rows,
                self._commit_row,
            )
            return results
        return [self._commit_row(owner, row) for row in rows]

    def _commit_row(self, owner: bytes, row: CommitRow) -> CommitResult:
        call = ("commit", row.start_position, row.num_computed_tokens)
        try:
            sequence = self._live.idle(owner, row.sequence_id)
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
        growth.release_copy_holds(self._pool, sequence)
        self._progress.advance_all(sequence, end)
        reply = CommitResult(ResultCode.OK, sequence.num_cached_blocks)
        sequence.note_applied(call, reply)
        return reply

"""What a client knows of its sequence without asking: tokens, block table, positions.

`SequenceState` follows the daemon's rules, one method for each call that succeeded, so that a
caller never says where a sequence stands. `SequenceView` is what the sync and the async sequence
have in common. No I/O. Not thread-safe: one sequence is used by one thread or task at a time.
"""

from __future__ import annotations

from array import array

import numpy as np

from prefixcache.client.lease import Lease
from prefixcache.types import AppendResult, BlockIds, SequenceId


class SequenceState:
    """Mirror of one sequence. It changes only when a reply says that the daemon's has changed.

    computed: tokens whose K/V are in place, one count a layer; one in all without K/V storage.
    known: those of them that the daemon knows of. They are fewer where an attached view has
    computed tokens that are not committed yet.
    first_writable: K/V of positions below it are never written (they are somebody's hit).
    is_moving, num_view_calls: see `sequence_use`.
    version: another one whenever anything but `computed` and `known` may have changed.
    """

    __slots__ = (
        "block_size",
        "block_table",
        "computed",
        "first_writable",
        "is_freed",
        "is_moving",
        "known",
        "num_cached_tokens",
        "num_lookahead_tokens",
        "num_pending_tokens",
        "num_tokens",
        "num_view_calls",
        "sequence_id",
        "version",
    )

    def __init__(
        self,
        sequence_id: SequenceId,
        *,
        num_tokens: int,
        num_cached_tokens: int,
        num_cached_blocks: int,
        num_pending_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        block_table: array[int],
        block_size: int,
        num_layers: int,
    ) -> None:
        self.sequence_id = sequence_id
        self.num_tokens = num_tokens
        self.num_cached_tokens = num_cached_tokens
        self.num_pending_tokens = num_pending_tokens
        self.num_lookahead_tokens = num_lookahead_tokens
        self.block_table = block_table
        self.block_size = block_size
        self.computed = [num_cached_tokens] * num_layers
        self.known = self.computed[:]
        self.first_writable = num_cached_blocks * block_size
        self.is_freed = self.is_moving = False
        self.num_view_calls = 0
        self.version = 0

    def position(self, layer: int) -> int:
        """Where the layer's next call starts. A layer that does not exist starts at 0."""
        return self.computed[layer] if layer < len(self.computed) else 0

    @property
    def num_committed(self) -> int:
        """Tokens that the daemon knows to have K/V in all layers: where Commit goes on."""
        return min(self.known)

    def appended(
        self, num_tokens: int, num_kv_valid: int, num_lookahead_tokens: int, result: AppendResult
    ) -> None:
        for copy in result.copies:
            # Only the partly filled last block is ever copied.
            self.block_table[self.num_tokens // self.block_size] = copy.destination
        if result.new_block_ids:
            self.block_table.extend(result.new_block_ids)
        # Only in slots that were reserved can there be K/V beyond the tokens.
        if self.num_lookahead_tokens:
            self._cut_computed(self.num_tokens + num_kv_valid)
        self.num_tokens += num_tokens
        self.num_lookahead_tokens = num_lookahead_tokens
        self.version += 1

    def advanced(self, layer: int, position: int) -> None:
        """The daemon has computed the layer up to `position`."""
        self.computed[layer] = self.known[layer] = position

    def written(self, layer: int, position: int) -> None:
        """An attached view has computed the layer up to `position`, unknown to the daemon."""
        self.computed[layer] = position

    def committed(self, position: int) -> None:
        """The daemon knows that all layers have computed up to `position`."""
        self.computed = [max(count, position) for count in self.computed]
        self.known = [max(count, position) for count in self.known]

    def truncated(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.first_writable = min(self.first_writable, num_tokens)
        self._cut_computed(num_tokens)
        self._drop_lookahead()

    def forked(self, child_ids: list[SequenceId]) -> list[SequenceState]:
        """The states of the children, who have everything computed, as has the parent."""
        self.committed(self.num_tokens)
        self._cut_computed(self.num_tokens)
        self.first_writable = self.num_tokens
        self._drop_lookahead()
        return [self._child(child_id) for child_id in child_ids]

    def _child(self, child_id: SequenceId) -> SequenceState:
        child = SequenceState(
            child_id,
            num_tokens=self.num_tokens,
            num_cached_tokens=self.num_tokens,
            num_cached_blocks=0,
            block_table=self.block_table[:],
            block_size=self.block_size,
            num_layers=len(self.computed),
        )
        child.first_writable = self.first_writable
        return child

    def _cut_computed(self, num_tokens: int) -> None:
        self.computed = [min(count, num_tokens) for count in self.computed]
        self.known = [min(count, num_tokens) for count in self.known]

    def _drop_lookahead(self) -> None:
        self.version += 1
        self.num_lookahead_tokens = 0
        del self.block_table[-(-self.num_tokens // self.block_size) :]


class SequenceView:
    """The properties of a client's sequence. They are the ones of the last reply."""

    _lease: Lease
    _state: SequenceState

    @property
    def sequence_id(self) -> SequenceId:
        return self._state.sequence_id

    @property
    def num_tokens(self) -> int:
        """Tokens with ids: the prompt and what was appended."""
        return self._state.num_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Tokens whose K/V were in place when the sequence was made."""
        return self._state.num_cached_tokens

    @property
    def num_pending_tokens(self) -> int:
        """Tokens after the cached ones that others were computing when the sequence was made."""
        return self._state.num_pending_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens with K/V in all layers."""
        return min(self._state.computed)

    @property
    def num_started_tokens(self) -> int:
        """Tokens with K/V in some layer; not all layers have run over those beyond the computed."""
        return max(self._state.computed)

    @property
    def num_uncommitted_tokens(self) -> int:
        """Computed tokens that the daemon does not know of yet: those of an attached view."""
        return max(0, min(self._state.computed) - self._state.num_committed)

    @property
    def block_ids(self) -> BlockIds:
        """The block table, lookahead included: a copy, `[blocks] int32`."""
        return np.array(self._state.block_table, dtype=np.int32)

    @property
    def is_freed(self) -> bool:
        return self._state.is_freed

    def __repr__(self) -> str:
        state = self._state
        return (
            f"<{type(self).__name__} {state.sequence_id:#018x}: {state.num_tokens} tokens, "
            f"{state.num_cached_tokens} cached, {len(state.block_table)} blocks"
            f"{', freed' if state.is_freed else ''}>"
        )

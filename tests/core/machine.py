"""Every call of the block manager as a rule, made on the real one and on the naive model.

After each step every reply, the free order, index, ref counts, tables and counters agree with
`tests.support.model`, and the invariants hold.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefixcache.core.append_batch import AppendBatch
from prefixcache.core.events import EventLog
from prefixcache.core.hashing import HashAlgorithm, Hasher
from prefixcache.core.pending import Waiter
from prefixcache.core.pool import PLAIN, REGISTERED, STANDBY, Pool
from prefixcache.core.sequence import AppendRow, CommitRow
from prefixcache.core.sequences import Sequences
from prefixcache.errors import PrefixCacheError, SessionNotFoundError
from prefixcache.types import (
    CacheUse,
    ExtraKeys,
    FullHit,
    Lora,
    MultimodalItem,
    PromptEmbeds,
    ResultCode,
)
from tests.core.session_rules import LIMITS, OWNERS, SLOTS, SessionRules
from tests.support.invariants import check_invariants, snapshot
from tests.support.model import BLANK, Model, ModelSequence, Refused, cbor_hash_block
from tests.support.model import REGISTERED as MODEL_REGISTERED
from tests.support.model import STANDBY as MODEL_STANDBY

REQUEST_IDS = ("", "", "", "q", "r")
STATES = {PLAIN: BLANK, REGISTERED: MODEL_REGISTERED, STANDBY: MODEL_STANDBY}
REFUSALS = {
    ResultCode.NOT_FOUND: "SequenceNotFoundError",
    ResultCode.WRONG_POSITION: "WrongPositionError",
    ResultCode.BUSY: "SequenceBusyError",
    ResultCode.NO_ROOM: "NoRoomError",
    ResultCode.EXCEEDS_POOL: "ExceedsPoolError",
    ResultCode.BEYOND_TOKENS: "BeyondTokensError",
    ResultCode.QUOTA_EXCEEDED: "QuotaExceededError",
}
TRUNKS = ([0] * 40, [0, 1] * 20, [1, 1, 0, 0, 2] * 8)

RARELY = st.integers(0, 9).map(lambda number: number == 9)
PICK = st.integers(0, 7)
PROMPT = st.builds(
    lambda trunk, length, tail: TRUNKS[trunk][:length] + tail,
    st.integers(0, 2),
    st.integers(0, 14),
    st.lists(st.integers(0, 1), min_size=1, max_size=4),
)
KEY_KIND = st.integers(0, 13)
TOKENS = st.lists(st.integers(0, 1), max_size=6)
SLIP = st.sampled_from((0,) * 12 + (1, -1))


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def extra_keys(kind: int, size: int, first: int, num_tokens: int) -> ExtraKeys:
    """Most kinds are none; spans lie in `[first, first + num_tokens)`.

    An image's identifier tells its length, and an embedding's digest its place in the block, as
    real ones do.
    """
    if kind == 1:
        return ExtraKeys(lora=Lora("a", "/1"))
    if kind == 2:
        return ExtraKeys(lora=Lora("a", "/2"))
    if kind == 3:
        return ExtraKeys(cache_salt="a")
    if kind == 4 and num_tokens > 2:
        length = num_tokens - 2
        return ExtraKeys(multimodal_items=(MultimodalItem(f"x{length}", first + 1, length),))
    if kind == 5 and num_tokens > 1:
        items = MultimodalItem("x1", first, 1), MultimodalItem("y1", first + num_tokens - 1, 1)
        return ExtraKeys(lora=Lora("b"), cache_salt="s", multimodal_items=items)
    if kind == 6 and num_tokens > 1:
        start, end = first + num_tokens // 2, first + num_tokens
        digests = tuple(
            sha256(f"{max(start - block * size, 0)}:{min(end - block * size, size)}".encode())
            for block in range(start // size, -(-end // size))
        )
        return ExtraKeys(prompt_embeds=(PromptEmbeds(start, end - start, digests),))
    return ExtraKeys()


class BlockManagerMachine(SessionRules, RuleBasedStateMachine):
    """`sequences` and `model` do the same; `ids` maps the model's names to real ids."""

    num_layers: ClassVar[int] = 3
    digest: ClassVar[Callable[[bytes], bytes]] = staticmethod(sha256)
    verify_hits: ClassVar[bool] = False

    @initialize(
        num_blocks=st.integers(4, 40),
        block_size=st.sampled_from((1, 2, 2, 4, 4)),
        caching=st.integers(0, 19).map(bool),
    )
    def start(self, num_blocks: int, block_size: int, caching: bool) -> None:
        algorithm = HashAlgorithm("injected", 32, self.digest, True, False)
        hasher = Hasher(algorithm, "a seed for the state machine", block_size)
        self.now_s = 0.0
        self.sequences = Sequences(
            Pool(num_blocks, block_size, self.verify_hits, events=self.make_events()),
            hasher,
            num_layers=self.num_layers,
            caching=caching,
            owner_ttl_s=10.0,
            session_limits=LIMITS,
            clock=lambda: self.now_s,
        )
        self.parent_of: dict[bytes, bytes] = {}
        hash_block = cbor_hash_block(self.digest)

        def hash_and_remember(parent: bytes, tokens: tuple, keys: tuple) -> bytes:
            block_hash = hash_block(parent, tokens, keys)
            self.parent_of[block_hash] = parent
            return block_hash

        self.model = Model(
            num_blocks,
            block_size,
            self.num_layers,
            hasher.none_hash,
            hash_and_remember,
            caching=caching,
            owner_ttl_s=10.0,
            max_sessions=LIMITS.max_sessions,
            max_sequences=LIMITS.max_sequences,
            grace_s=LIMITS.reconnect_grace_s,
        )
        self.start_sessions()
        self.ids: dict[int, int] = {}
        self.attention: list[tuple[Any, tuple]] = []
        self.copying: list[tuple[Any, int]] = []
        self.waiters: list[tuple[Waiter, list[bool], Any]] = []
        self.last_step: Callable[[], None] | None = None

    def make_events(self) -> EventLog | None:
        """The log of what becomes cached and what no longer is."""
        return None

    def account_of(self, slot: bytes) -> int:
        """Of what is allocated there."""
        return 0

    def tokens_of(self, slot: bytes, tokens: list[int]) -> list[int]:
        """Tokens as they are there: no two groups of accounts have a prompt in common."""
        return tokens

    # ---- both sides

    def both(self, real: Callable[[], Any], model: Callable[[], Any]) -> Any:
        """Make a call on both; both succeed (the real result, the model's) or both refuse."""
        before = snapshot(self.sequences)
        try:
            expected = model()
        except Refused as refused:
            with pytest.raises(PrefixCacheError) as caught:
                real()
            assert type(caught.value).__name__ == refused.name
            for number in refused.numbers.items():
                assert number in caught.value.fields.items()
            assert snapshot(self.sequences) == before
            return None
        return real(), expected

    def both_rows(self, real: Callable[[], list[Any]], model: Callable[[], Any]) -> Any:
        """The same for a call with one row, whose refusal is a result code.

        But for that of the whole call: its session has ended.
        """
        before = snapshot(self.sequences)
        try:
            expected = model()
        except Refused as refused:
            if refused.name == "SessionNotFoundError":
                with pytest.raises(SessionNotFoundError):
                    real()
            else:
                (row,) = real()
                assert REFUSALS[getattr(row, "code", row)] == refused.name
            assert snapshot(self.sequences) == before
            return None
        (row,) = real()
        assert getattr(row, "code", row) == ResultCode.OK
        return row, expected

    def repeatable(self, step: Callable[[], None]) -> None:
        step()
        self.last_step = step

    def pick(self, number: int, stranger: bool = False) -> tuple[bytes, ModelSequence] | None:
        """A sequence, with its owner or, as a mistake, another one."""
        live = list(self.model.sequences.values())
        if not live:
            return None
        sequence = live[-1 - number % len(live)]
        owner = sequence.owner
        if stranger:
            others = [self.owner_in(slot) for slot in (*OWNERS, *SLOTS)]
            owner = next(other for other in others[number:] + others if other != owner)
        return owner, sequence

    # ---- rules

    @rule(
        slot=st.sampled_from((*OWNERS, *SLOTS)),
        prompt=PROMPT,
        kind=KEY_KIND,
        lookahead=st.integers(0, 5),
        full=st.booleans(),
    )
    def lookup(self, slot: bytes, prompt: list[int], kind: int, lookahead: int, full: bool) -> None:
        account, prompt = self.account_of(slot), self.tokens_of(slot, prompt)
        keys = extra_keys(kind, self.model.size, 0, len(prompt))
        full_hit = FullHit.LAST_TOKEN if full else FullHit.LAST_BLOCK
        before = snapshot(self.sequences)
        found = self.sequences.lookup(
            self.sequences.prepare(np.array(prompt, dtype=np.uint32), keys),
            lookahead,
            full_hit,
            account,
        )
        assert snapshot(self.sequences) == before
        *hits, needed, available, refusal, pending = self.model.lookup(
            prompt, keys, lookahead, full_hit, account
        )
        assert [found.num_cached_tokens, found.num_cached_blocks] == hits
        assert (found.num_blocks_needed > found.num_blocks_free) == bool(refusal)
        if refusal != "QuotaExceededError":
            assert found.num_blocks_needed == needed
            assert found.num_blocks_free <= available
            if self.model.accounts[account].limit is None:
                assert found.num_blocks_free == available
        self.agrees_on_pending(found.num_pending_tokens, pending)

    @rule(prompt=PROMPT, kind=KEY_KIND)
    def wait(self, prompt: list[int], kind: int) -> None:
        """A call that waits as long as it is not told to look again."""
        keys = extra_keys(kind, self.model.size, 0, len(prompt))
        prepared = self.sequences.prepare(np.array(prompt, dtype=np.uint32), keys)
        found = self.sequences.lookup(prepared, 0, FullHit.LAST_TOKEN)
        if found.num_pending_tokens:
            assert prepared.chain is not None
            num_tokens = found.num_cached_tokens + found.num_pending_tokens
            last = prepared.chain.hashes[-(-num_tokens // self.model.size) - 1]
            told: list[bool] = []
            waiter = self.sequences.pending.wait(b"waits", last, lambda: told.append(True))
            self.waiters.append((waiter, told, (prompt, keys, 0, FullHit.LAST_TOKEN)))

    def those_that_wait_have_something_to_wait_for(self) -> None:
        """Digests that collide may tell one too often, and never too seldom."""
        still = []
        for waiter, told, call in self.waiters:
            if told:
                self.sequences.pending.stop_waiting(waiter)
            else:
                still.append((waiter, told, call))
                assert self.digest is not sha256 or self.model.lookup(*call)[-1]
        self.waiters = still
        assert self.sequences.pending.num_waiters == len(still)
        assert self.sequences.pending.num_fillers == self.model.num_filling()

    def agrees_on_pending(self, found: int, expected: int) -> None:
        """Digests that collide may show more than there is."""
        if self.digest is sha256:
            assert found == expected

    @rule(
        slot=st.sampled_from((*OWNERS, *SLOTS)),
        request_id=st.sampled_from(REQUEST_IDS),
        prompt=PROMPT,
        kind=KEY_KIND,
        lookahead=st.sampled_from((0, 0, 0, 2, 5)),
        cache_use=st.sampled_from((CacheUse.READ_WRITE,) * 5 + tuple(CacheUse)),
        full_hit=st.sampled_from(FullHit),
        resumed=RARELY,
        compute=st.booleans(),
    )
    def allocate(
        self,
        slot: bytes,
        request_id: str,
        prompt: list[int],
        kind: int,
        compute: bool,
        **options: Any,
    ) -> None:
        keys = extra_keys(kind, self.model.size, 0, len(prompt))
        owner, prompt = self.owner_in(slot), self.tokens_of(slot, prompt)
        options["account"] = self.account_of(slot)

        def step() -> None:
            prepared = self.sequences.prepare(np.array(prompt, dtype=np.uint32), keys)
            real_options = dict(options)
            real_options["num_lookahead_tokens"] = real_options.pop("lookahead")
            result = self.both(
                lambda: self.sequences.allocate(
                    self.real(owner), request_id, prepared, **real_options
                ),
                lambda: self.model.allocate(owner, request_id, prompt, keys, **options),
            )
            if result is not None:
                reply, (name, cached, table, pending) = result
                assert self.ids.setdefault(name, reply.sequence_id) == reply.sequence_id
                assert reply.num_cached_tokens == cached
                self.agrees_on_pending(reply.num_pending_tokens, pending)
                assert reply.block_ids.tolist() == table
                if compute and name in self.model.sequences:
                    self.compute(self.model.sequences[name])

        self.repeatable(step)

    def compute(self, sequence: ModelSequence, drafts: int = 0) -> None:
        """Compute what is missing of a sequence's tokens, and drafts, in all layers."""
        for layer in range(self.num_layers):
            start = sequence.computed[layer]
            count = len(sequence.tokens) + min(drafts, sequence.lookahead) - start
            if count > 0 and not sequence.busy:
                self.write(sequence, layer, start, count)

    def write(self, sequence: ModelSequence, layer: int, start: int, count: int) -> None:
        rows = (sequence.owner, layer, [sequence.name], [start], [count])
        self.begin(*rows)
        self.end(len(self.attention) - 1, written=True)

    @rule(
        number=PICK,
        tokens=TOKENS,
        kind=KEY_KIND,
        accepted=st.integers(0, 3),
        lookahead=st.sampled_from((0, 0, 0, 1, 4)),
        slip=SLIP,
        stranger=RARELY,
        compute=st.booleans(),
    )
    def append(
        self,
        number: int,
        tokens: list[int],
        kind: int,
        accepted: int,
        lookahead: int,
        slip: int,
        stranger: bool,
        compute: bool,
    ) -> None:
        picked = self.pick(number, stranger)
        if picked is None:
            return
        owner, sequence = picked
        start = len(sequence.tokens) + slip
        keys = extra_keys(kind if kind in (4, 6) else 0, self.model.size, start, len(tokens))
        kv_valid = min(accepted, len(tokens))
        row = AppendRow(
            self.ids[sequence.name],
            start,
            np.array(tokens, dtype=np.uint32),
            kv_valid,
            lookahead,
            keys,
        )

        def step() -> None:
            result = self.both_rows(
                lambda: self.sequences.rows.append(
                    self.real(owner), AppendBatch.of([row])
                ).results(),
                lambda: self.model.append(
                    owner, sequence.name, start, tokens, kv_valid, lookahead, keys
                ),
            )
            if result is not None:
                reply, (new_ids, copies) = result
                assert list(reply.new_block_ids) == new_ids
                assert [(copy.source, copy.destination) for copy in reply.copies] == copies
                self.start_copies(owner, sequence)
                if compute:
                    self.compute(sequence)

        self.repeatable(step)

    def start_copies(self, owner: bytes, sequence: ModelSequence) -> None:
        """With storage the daemon copies at once; `finish_copies` ends that."""
        ticket = self.sequences.running.begin_copies(self.real(owner), [self.ids[sequence.name]])
        copies = self.model.begin_copies(owner, sequence.name)
        assert [(copy.source, copy.destination) for copy in ticket.copies] == copies
        self.copying.append((ticket, sequence.name if copies else 0))

    @precondition(lambda self: self.copying)
    @rule()
    def finish_copies(self) -> None:
        for ticket, name in self.copying:
            self.sequences.running.end_copies(ticket)
            if name:
                self.model.end_copies(name)
        self.copying = []

    @rule(
        number=PICK,
        num_children=st.integers(1, 3),
        named=RARELY,
        slip=SLIP,
        stranger=RARELY,
    )
    def fork(self, number: int, num_children: int, named: bool, slip: int, stranger: bool) -> None:
        picked = self.pick(number, stranger)
        if picked is None:
            return
        owner, sequence = picked
        num_tokens = len(sequence.tokens) + slip
        request_ids = [f"{'qrs'[child]}" if named else "" for child in range(num_children)]

        def step() -> None:
            result = self.both(
                lambda: self.sequences.fork(
                    self.real(owner), self.ids[sequence.name], num_tokens, request_ids
                ),
                lambda: self.model.fork(owner, sequence.name, num_tokens, request_ids),
            )
            if result is not None:
                for child, name in zip(*result, strict=True):
                    assert self.ids.setdefault(name, child) == child

        self.repeatable(step)

    @rule(number=PICK, cut=st.integers(-1, 9), slip=SLIP, stranger=RARELY)
    def truncate(self, number: int, cut: int, slip: int, stranger: bool) -> None:
        picked = self.pick(number, stranger)
        if picked is None:
            return
        owner, sequence = picked
        before = len(sequence.tokens) + slip
        after = max(0, before - cut)

        def step() -> None:
            result = self.both(
                lambda: self.sequences.truncate(
                    self.real(owner), self.ids[sequence.name], before, after
                ),
                lambda: self.model.truncate(owner, sequence.name, before, after),
            )
            if result is not None:
                assert list(result[0]) == result[1]

        self.repeatable(step)

    @rule(number=PICK, stranger=RARELY, by_request_id=st.booleans())
    def free(self, number: int, stranger: bool, by_request_id: bool) -> None:
        picked = self.pick(number, stranger)
        if picked is None:
            return
        owner, sequence = picked
        ids, request_ids = [self.ids[sequence.name]], [sequence.request_id]
        # A stranger may have a sequence of that request id too.
        named = ([], request_ids) if by_request_id and any(request_ids) and not stranger else (ids,)

        def step() -> None:
            self.both_rows(
                lambda: self.sequences.free(self.real(owner), *named),
                lambda: self.model.free(owner, sequence.name),
            )

        self.repeatable(step)

    @rule(count=st.integers(1, 12))
    def press(self, count: int) -> None:
        """Somebody without use for the cache takes blocks for a moment: eviction."""
        tokens = self.tokens_of(b"press", [9] * (count * self.model.size))
        account = self.account_of(b"press")
        prompt = self.sequences.prepare(np.array(tokens, dtype=np.uint32), ExtraKeys())
        result = self.both(
            lambda: self.sequences.allocate(
                b"press", "", prompt, cache_use=CacheUse.NONE, account=account
            ),
            lambda: self.model.allocate(
                b"press", "", tokens, ExtraKeys(), cache_use=CacheUse.NONE, account=account
            ),
        )
        if result is not None:
            reply, (name, _, table, _) = result
            assert reply.block_ids.tolist() == table
            self.sequences.free(b"press", [reply.sequence_id])
            self.model.free(b"press", name)

    @precondition(lambda self: self.last_step is not None)
    @rule()
    def repeat(self) -> None:
        """The client did not hear the reply and sends the last call again."""
        assert self.last_step is not None
        self.last_step()

    @rule(force=RARELY)
    def reset(self, force: bool) -> None:
        result = self.both(
            lambda: self.sequences.reset(force=force), lambda: self.model.reset(force=force)
        )
        if result is not None:
            assert result[0] == result[1]

    @rule(seconds=st.sampled_from((1.0, 3.0, 10.0)))
    def expire(self, seconds: float) -> None:
        self.now_s += seconds
        self.model.now_s += seconds
        assert self.sequences.expire() == self.model.expire()

    # ---- attention

    def begin(
        self, owner: bytes, layer: int, names: list[int], starts: list[int], counts: list[int]
    ) -> None:
        result = self.both(
            lambda: self.sequences.running.begin_attention(
                self.real(owner), layer, [self.ids[name] for name in names], starts, counts
            ),
            lambda: self.model.begin_attention(owner, layer, names, starts, counts),
        )
        if result is None:
            return
        ticket, expected = result
        repeats = []
        for row, start, count, (first_writable, is_repeat, blocks) in zip(
            ticket.rows, starts, counts, expected, strict=True
        ):
            assert (row.start_position, row.num_tokens) == (start, count)
            assert row.first_writable == first_writable
            assert row.is_repeat == is_repeat
            assert row.block_table.tolist() == blocks
            repeats.append(is_repeat)
        self.attention.append((ticket, (owner, layer, names, starts, counts, repeats)))

    def end(self, number: int, *, written: bool) -> None:
        if number < 0:
            return
        ticket, columns = self.attention.pop(number)
        self.sequences.running.end_attention(ticket, written=written)
        self.model.end_attention(*columns, written=written)

    @rule(
        numbers=st.lists(PICK, min_size=1, max_size=3),
        layer=st.integers(0, 2),
        limit=st.sampled_from((1, 2, 3, 20, 20, 20)),
        beyond=st.integers(0, 5),
        slip=SLIP,
        stranger=RARELY,
    )
    def begin_attention(
        self, numbers: list[int], layer: int, limit: int, beyond: int, slip: int, stranger: bool
    ) -> None:
        layer %= self.num_layers
        batch = [picked for number in numbers if (picked := self.pick(number, stranger))]
        if not batch:
            return
        owner = batch[0][0]
        names, starts, counts = [], [], []
        for other, sequence in batch:
            if other == owner:
                start = sequence.computed[layer] + slip
                names.append(sequence.name)
                starts.append(start)
                room = len(sequence.tokens) + min(sequence.lookahead, beyond) - start
                counts.append(max(0, min(limit, room)) + (slip > 0))

        def step() -> None:
            self.begin(owner, layer, names, starts, counts)

        self.repeatable(step)

    @rule(number=PICK, drafts=st.sampled_from((0, 1, 4)))
    def compute_all(self, number: int, drafts: int) -> None:
        picked = self.pick(number)
        if picked is not None:
            self.compute(picked[1], drafts)

    @precondition(lambda self: self.attention)
    @rule(number=PICK, failed=RARELY)
    def end_attention(self, number: int, failed: bool) -> None:
        self.end(number % len(self.attention), written=not failed)

    # ---- K/V that the client writes itself

    def commit_range(self, owner: bytes, sequence: ModelSequence, start: int, count: int) -> None:
        row = CommitRow(self.ids[sequence.name], start, count)
        result = self.both_rows(
            lambda: self.sequences.rows.commit(self.real(owner), [row]),
            lambda: self.model.commit(owner, sequence.name, start, count),
        )
        if result is not None:
            assert result[0].num_cached_blocks == result[1]

    @rule(
        number=PICK,
        limit=st.sampled_from((0, 1, 2, 5, 40, 40)),
        slip=SLIP,
        beyond=RARELY,
        stranger=RARELY,
    )
    def commit(self, number: int, limit: int, slip: int, beyond: bool, stranger: bool) -> None:
        picked = self.pick(number, stranger)
        if picked is None:
            return
        owner, sequence = picked
        start = min(sequence.computed) + slip
        count = max(0, min(limit, len(sequence.tokens) - start)) + beyond
        self.repeatable(lambda: self.commit_range(owner, sequence, start, count))

    # ---- agreement

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        pool, model = self.sequences.pool, self.model
        assert pool.free_order().tolist() == sorted(model.free_ids, key=model._group_of)
        for block in model.blocks:
            assert pool.ref_cnt[block.block_id] == block.refs
            assert STATES[pool.state_of(block.block_id)] == block.state
            assert pool.hash_of(block.block_id) == block.hash
        assert pool.num_cached == len(model.index)
        for block_hash, block_id in model.index.items():
            assert pool.block_of(block_hash) == block_id
        stats = self.sequences.stats()
        expected_stats = model.stats()
        assert {name: getattr(stats, name) for name in expected_stats} == expected_stats
        # What the server adds is compared in no test of the core.
        added = {field.name for field in fields(stats) if not field.compare}
        assert set(stats.__slots__) - set(expected_stats) == added
        assert self.sequences.live.quarantine.block_ids == [
            block_id for kept in model.quarantine for block_id in kept.block_ids
        ]
        self.accounts_agree()
        self.sessions_agree()
        holders = {holder.sequence_id: holder for holder in self.sequences.live.all_holders()}
        expected = [*model.sequences.values(), *model.dying]
        assert len(holders) == len(expected)
        for sequence in expected:
            holder = holders[self.ids[sequence.name]]
            assert holder.blocks().tolist() == sequence.table
            assert holder.copy_holds == sequence.holds
            assert holder.computed == sequence.computed
            assert holder.registers == sequence.registers
            assert holder.num_cached_blocks == sequence.cached_blocks
            assert holder.tokens(0, holder.num_tokens).tolist() == sequence.tokens

    def accounts_agree(self) -> None:
        pool, model = self.sequences.pool, self.model
        assert pool.num_accounts == len(model.accounts)
        assert pool.num_unreserved() == pool.num_blocks - model.reserved()
        for number, account in enumerate(model.accounts):
            assert asdict(pool.account(number)) == {
                "group": account.group,
                "guaranteed": account.guaranteed,
                "max_blocks": account.limit,
                "held": model.held(number),
                "private": model.private(number),
                "evictable": model.evictable(number),
                "evictions": account.evictions,
            }
            assert pool.num_available(number) == model.available(number)
            assert pool.num_allowed(number) == model.allowed(number)

    @invariant()
    def invariants_hold(self) -> None:
        if not hasattr(self, "model"):
            return
        self.those_that_wait_have_something_to_wait_for()
        exact = self.digest is sha256
        check_invariants(self.sequences, self.parent_of if exact else None)
        chains = self.model.chains()
        assert all(len(chain) == 1 or chain[:-1] in chains for chain in chains), (
            "a block is findable and its parent is not"
        )

    def teardown(self) -> None:
        """When everything has ended, all blocks are free again."""
        if not hasattr(self, "model"):
            return
        self.finish_copies()
        while self.attention:
            self.end(0, written=True)
        for sequence in list(self.model.sequences.values()):
            self.sequences.free(self.real(sequence.owner), [self.ids[sequence.name]])
            self.model.free(sequence.owner, sequence.name)
        self.agrees_with_the_model()
        self.those_that_wait_have_something_to_wait_for()
        assert not self.waiters
        for process in self.processes:
            self.sequences.live.end_writer(process)
        assert self.sequences.pool.num_free == self.sequences.pool.num_blocks
        assert self.sequences.stats().sequences == 0


class NoStorageMachine(BlockManagerMachine):
    """One layer, the engine's own K/V: it commits, and copies before its next call."""

    num_layers = 1

    def write(self, sequence: ModelSequence, layer: int, start: int, count: int) -> None:
        count = min(count, len(sequence.tokens) - start)
        self.commit_range(sequence.owner, sequence, start, count)

    def start_copies(self, owner: bytes, sequence: ModelSequence) -> None:
        """The model copies at the last moment at which the source is held."""

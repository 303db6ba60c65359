"""One client's random life: valid calls of every kind, with K/V that are checked at every step.

What may be refused is (no room, a daemon that is gone, a call that a fault has cut); any other
error is a problem and is reported in words.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from prefixcache import CacheUse, Client, ExtraKeys, FullHit, Lora, ResultCode, errors
from prefixcache.errors import PrefixCacheError
from tests.chaos.daemon_process import BLOCK_SIZE
from tests.chaos.kv import Held, KvStore
from tests.chaos.tally import ClientTally

MAX_HELD = 6
_CACHE_USES = (*(CacheUse.READ_WRITE,) * 4, *CacheUse)
_WAITS_S = (0.0, 0.0, 0.02, 0.2)
"""For blocks that another client, or this one, is computing."""
_SALTS = (
    None,
    ExtraKeys(cache_salt="salt"),
    ExtraKeys(lora=Lora("adapter", "path")),
)
"""Extra keys by number: the same tokens with other keys have other K/V."""

_NO_ROOM = (errors.NoRoomError, errors.QuotaExceededError)
_REFUSED_ROWS = (ResultCode.BUSY, ResultCode.NO_ROOM, ResultCode.QUOTA_EXCEEDED)
_AGAIN = (errors.SequenceBusyError,)
_DAEMON_GONE = (errors.SessionLostError, errors.UnavailableError)
_CUT = (errors.DeadlineExceededError, errors.CancelledCallError)


class Walk:
    """faults: errors that are no problem in this part, beside those for lack of room.

    generation: which boot of the daemon is there now; a sequence of an earlier one must be gone.
    namespace: within which this client finds blocks.
    """

    def __init__(
        self,
        client: Client,
        kv: KvStore,
        rng: random.Random,
        tally: ClientTally,
        *,
        has_storage: bool,
        faults: tuple[type[PrefixCacheError], ...] = (),
        generation: Callable[[], int] = lambda: 0,
        namespace: int = 0,
    ) -> None:
        self.problems: list[str] = []
        self._client = client
        self._kv = kv
        self._rng = rng
        self._tally = tally
        self._faults = (*faults, *_DAEMON_GONE, *_CUT) if faults else ()
        self._generation = generation
        self._namespace = namespace
        self._held: list[Held] = []
        self._used: list[Held] = []
        self._doubtful: list[Held] = []
        computing = ("Prefill", "Decode") if has_storage else ("Commit",)
        self.calls: dict[str, Callable[[], None]] = {
            "GetServerInfo": lambda: self._ask(self._client.server_info),
            "Lookup": self.lookup,
            "Explain": self.explain,
            "Allocate": self.allocate,
            "Append": self.append,
            **dict.fromkeys(computing, self.compute),
            "Fork": self.fork,
            "Truncate": self.truncate,
            "Free": self.free,
            "Step": self.step_stream,
            "GetStats": lambda: self._ask(self._client.stats),
            "ListSequences": lambda: self._ask(self._client.list_sequences),
            "ListSessions": lambda: self._ask(self._client.list_sessions),
            "ResetCache": self.reset,
        }
        """What brings about a call of that RPC."""
        weights = {"Allocate": 12, "Append": 20, "Fork": 5, "Truncate": 6, "Free": 6, "Step": 5}
        weights |= dict.fromkeys(computing, 30 // len(computing)) | {"Lookup": 4}
        self._names = list(self.calls)
        self._weights = [weights.get(name, 1) for name in self._names]

    def step(self) -> None:
        """One random call, or a few."""
        self._tally.mark("steps")
        self.make(self._rng.choices(self._names, self._weights)[0])

    def make(self, name: str) -> None:
        """Such a call, whatever else it needs ahead of it."""
        begin = self._generation()
        self._used = []
        try:
            self._free_doubtful()
            self.calls[name]()
        except _NO_ROOM:
            self._guarded(self.free)
        except _AGAIN as error:
            if not self._faults:
                self._problem(name, error)
        except errors.TooManySequencesError:
            self._guarded(self.free)
        except PrefixCacheError as error:
            self._after(name, error)
        except AssertionError as error:
            self._problem(name, error)
        else:
            self._check_generation(begin)

    def free_all(self) -> None:
        self._doubtful += self._held
        self._held = []
        self._guarded(self._free_doubtful)

    # ---- calls

    def lookup(self) -> None:
        tokens, salt = self._prompt()
        found = self._client.lookup(tokens, extra_keys=_SALTS[salt], want_hashes=True)
        assert found.num_cached_tokens <= len(tokens) - 1
        assert len(found.block_hashes or ()) == len(tokens) // BLOCK_SIZE

    def explain(self) -> None:
        tokens, salt = self._prompt()
        found = self._client.explain(tokens, extra_keys=_SALTS[salt])
        assert found.num_cached_tokens <= len(tokens) - 1
        assert len(found.block_hash) in (0, 16, 32)

    def allocate(self) -> None:
        if len(self._held) >= MAX_HELD:
            self.free()
        tokens, salt = self._prompt()
        full_hit = self._rng.choice(list(FullHit))
        lookahead = self._rng.choice((0, 0, 3))
        sequence = self._client.sequence(
            tokens,
            extra_keys=_SALTS[salt],
            full_hit=full_hit,
            num_lookahead_tokens=lookahead,
            cache_use=self._rng.choice(_CACHE_USES),
            resumed=self._rng.random() < 0.1,
            wait_pending_s=self._rng.choice(_WAITS_S),
        )
        self._hold(sequence, tokens, salt, lookahead)

    def append(self) -> None:
        held = self._some()
        drafts = self._run_drafts(held) if self._rng.random() < 0.3 else []
        accepted = drafts[: self._rng.randint(0, len(drafts))]
        added = [*accepted, *self._tokens(self._rng.choice((1, 1, 1, BLOCK_SIZE)))]
        lookahead = self._rng.choice((0, 0, 2))
        held.drafts = []
        result = held.sequence.append(added, len(accepted), lookahead)
        self._kv.copy(held, result.copies)
        held.tokens += added
        held.lookahead = lookahead
        self._compute(held, held.num_to_compute)

    def compute(self) -> None:
        """What is left of a sequence, or a part of it."""
        held = self._some()
        if not held.num_to_compute:
            self._grow(held)
        self._compute(held, self._rng.choice((held.num_to_compute, 1)))

    def fork(self) -> None:
        held = self._some()
        self._compute(held, held.num_to_compute)
        children = held.sequence.fork(self._rng.choice((1, 2)))
        held.lookahead = 0
        for child in children:
            self._held.append(replace(held, sequence=child, tokens=list(held.tokens), drafts=[]))

    def truncate(self) -> None:
        held = self._some()
        length = self._rng.randint(1, len(held.tokens))
        held.sequence.truncate(length)
        del held.tokens[length:]
        held.written_from = min(held.written_from, length)
        held.lookahead = 0

    def free(self) -> None:
        """Of a sequence that is not there any more, too, it succeeds."""
        if self._held:
            held = self._rng.choice(self._held)
            self._held.remove(held)
            self._doubtful.append(held)
            self._free_doubtful()

    def reset(self) -> None:
        """Refused while anything is referenced, which is nearly always; forced now and then."""
        with suppress(errors.BlocksInUseError):
            self._client.reset_cache(force=self._rng.random() < 0.2)

    def step_stream(self) -> None:
        """Engine steps on one stream: frees, appends and new sequences."""
        self._used = list(self._held)
        with self._client.steps() as steps:
            for _ in range(self._rng.randint(1, 3)):
                self._engine_step(steps)

    # ---- inside

    def _engine_step(self, steps: Any) -> None:
        step = steps.new_step()
        ended = self._held[: len(self._held) // 3]
        running = self._held[len(ended) :]
        tokens = [self._tokens(1) for _ in running]
        if ended:
            step.free([held.sequence for held in ended])
        appended = None
        if running:
            for held in running:
                held.lookahead = 0
            appended = step.append([held.sequence for held in running], tokens)
        new_tokens, salt = self._prompt()
        made = step.sequence(new_tokens, extra_keys=_SALTS[salt])
        steps.run(step)
        self._held = running
        self._grown(running, tokens, appended)
        self._hold(made.result(), new_tokens, salt, 0)

    def _grown(self, running: list[Held], tokens: list[list[int]], appended: Any) -> None:
        if appended is None:
            return
        for held, added, result in zip(running, tokens, appended.result(), strict=True):
            if result.code is ResultCode.OK:
                self._kv.copy(held, result.copies)
                held.tokens += added
            else:
                assert result.code in _REFUSED_ROWS, f"a row of Append has code {result.code}"

    def _hold(self, sequence: Any, tokens: list[int], salt: int, lookahead: int) -> None:
        num_tokens = len(tokens)
        cached = sequence.num_cached_tokens
        is_full_hit = cached == num_tokens - 1 and num_tokens % BLOCK_SIZE == 0
        held = Held(
            sequence,
            tokens,
            (self._namespace, salt),
            sequence._lease._boot_id or self._client._connection._info.boot_id,
            written_from=num_tokens if is_full_hit else 0,
            generation=self._generation(),
            lookahead=lookahead,
        )
        self._held.append(held)
        self._used.append(held)
        if cached:
            self._compute(held, 1 if self._rng.random() < 0.3 else held.num_to_compute)
            self._tally.mark("checked")

    def _compute(self, held: Held, count: int) -> None:
        if count and not self._kv.compute(held, count, self._rng):
            self._wrong(f"K/V of {held.sequence!r} are not those of its tokens")

    def _run_drafts(self, held: Held) -> list[int]:
        """Run drafts over reserved slots, where the daemon has the K/V.

        Not after others that no Append has taken or rejected yet, for lack of room.
        """
        has_run = held.sequence.num_computed_tokens > len(held.tokens)
        if has_run or not held.lookahead or "Prefill" not in self.calls:
            return []
        held.drafts = self._tokens(self._rng.randint(1, held.lookahead))
        self._compute(held, held.num_to_compute + len(held.drafts))
        return held.drafts

    def _grow(self, held: Held) -> None:
        added = self._tokens(BLOCK_SIZE + 1)
        result = held.sequence.append(added)
        self._kv.copy(held, result.copies)
        held.tokens += added
        held.lookahead = 0

    def _some(self) -> Held:
        if not self._held:
            self.allocate()
        held = self._rng.choice(self._held)
        self._used.append(held)
        return held

    def _prompt(self) -> tuple[list[int], int]:
        """Of a tree of prompts that all clients share, so that much of it is cached."""
        rng = self._rng
        family, tokens = rng.randrange(3), list[int]()
        for depth in range(rng.randint(1, 6)):
            branch = rng.choice((0, 0, 0, 1))
            tokens += [family * 100 + depth * 10 + branch] * (BLOCK_SIZE + depth % 2)
        tokens = tokens[: max(1, len(tokens) - rng.choice((0, 0, 1, 2, 3)))]
        return tokens, rng.choice((0, 0, 0, 1, 2))

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(3) for _ in range(count)]

    def _free_doubtful(self) -> None:
        """Free what nothing is known of any more, until the daemon has said so."""
        if self._doubtful:
            self._client.free([held.sequence for held in self._doubtful])
            self._doubtful = []

    def _ask(self, call: Callable[[], Any]) -> None:
        call()

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except PrefixCacheError as error:
            self._after("Free", error)

    def _after(self, name: str, error: PrefixCacheError) -> None:
        """What the daemon has done to the sequences of the call is not known."""
        if isinstance(error, errors.SessionLostError):
            self._held, self._doubtful = [], []
        else:
            self._doubtful += [held for held in self._used if held in self._held]
            self._held = [held for held in self._held if held not in self._used]
        if not isinstance(error, self._faults):
            self._problem(name, error)

    def _check_generation(self, begin: int) -> None:
        """The calls have succeeded: none of their sequences can be of an earlier boot.

        begin: the boot that was there when they began.
        """
        for held in self._used:
            if held.generation < begin:
                self._wrong(f"{held.sequence!r} of an earlier boot was answered")

    def _wrong(self, text: str) -> None:
        self._tally.mark("wrong")
        self.problems.append(text)

    def _problem(self, name: str, error: Exception) -> None:
        self.problems.append(f"{name}: {type(error).__name__}: {error}")


def walk_until(walk: Walk, until_s: float) -> None:
    while time.monotonic() < until_s:
        walk.step()

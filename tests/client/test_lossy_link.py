"""Calls that are lost, repeated, delayed and overtaken do what they would have done once each.

Two clients make the same random calls, each on a daemon of its own: one over a good link, one over
a link that loses every third call, repeats others, and delivers old copies at any later time. The
second makes a call again, as its caller would, until it is answered. After every call both daemons
hold the same: the same blocks in the same order, findable or not, and the same sequences.
"""

from __future__ import annotations

import random
from typing import Any

import grpc
import numpy as np
import pytest

from prefixcache import Client
from prefixcache.client.channel import channel_options
from prefixcache.errors import PrefixCacheError, UnavailableError
from prefixcache.server.daemon import CacheOptions, Daemon, ModelOptions
from prefixcache.storage.layout import KVLayout
from tests.client.lossy_link import LossyLink
from tests.support.daemon import running_daemon
from tests.support.invariants import check_invariants

CACHE = CacheOptions(num_blocks=24, block_size=2, hash_seed="the same for both daemons")
MODEL = ModelOptions(KVLayout(2, 1, 8, 2, "float32"))
NUM_CALLS = 150


class Side:
    """One client, its daemon, and its sequences by the names that both sides give them."""

    def __init__(self, daemon: Daemon, channel: Any) -> None:
        self.daemon = daemon
        self.client = Client(channel=channel)
        self.sequences: dict[int, Any] = {}

    def until_answered(self, call: Any) -> Any:
        """The result, or the name of the refusal."""
        while True:
            try:
                return call()
            except UnavailableError:
                continue
            except PrefixCacheError as refusal:
                return type(refusal).__name__

    def state(self) -> dict[str, Any]:
        sequences, pool = self.daemon.sequences, self.daemon.sequences.pool
        with sequences.lock:
            check_invariants(sequences)
            live = sequences.live.by_id
            named = {name: s.sequence_id for name, s in self.sequences.items()}
            assert set(live) == set(named.values()), "the client knows all that there is"
            return {
                "free order": pool.free_order().tolist(),
                "ref counts": pool.ref_cnt.tolist(),
                "hashes": [pool.hash_of(block) for block in range(pool.num_blocks)],
                "sequences": {
                    name: (
                        live[sequence_id].tokens(0, live[sequence_id].num_tokens).tolist(),
                        live[sequence_id].blocks().tolist(),
                        list(live[sequence_id].computed),
                        live[sequence_id].num_lookahead_tokens,
                    )
                    for name, sequence_id in named.items()
                },
            }


class Walk:
    """The same call on both sides, each with its own sequences of the same names."""

    def __init__(self, good: Side, bad: Side, rng: random.Random, *, has_storage: bool) -> None:
        self.good, self.bad, self.rng = good, bad, rng
        self.compute = self.attend if has_storage else self.commit
        self.num_made = 0
        self.refused = 0

    def step(self) -> None:
        names = list(self.good.sequences)
        actions = [self.append, self.append, self.truncate, self.fork, self.free, self.compute]
        action = self.rng.choice(actions) if len(names) > 1 else self.allocate
        if len(names) < 6 and self.rng.randrange(3) == 0:
            action = self.allocate
        action(names)
        assert self.good.state() == self.bad.state(), action.__name__

    def both(self, call: Any) -> tuple[Any, Any]:
        results = tuple(side.until_answered(lambda side=side: call(side)) for side in self.sides)
        refused = [isinstance(result, str) for result in results]
        assert refused[0] == refused[1], results
        self.refused += refused[0]
        return results[0], results[1]

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.good, self.bad

    def keep(self, results: tuple[Any, Any]) -> None:
        if not isinstance(results[0], str):
            self.num_made += 1
            for side, made in zip(self.sides, results, strict=True):
                side.sequences[self.num_made] = made

    def tokens(self, most: int) -> list[int]:
        return [self.rng.randrange(2) for _ in range(self.rng.randint(1, most))]

    def allocate(self, names: list[int]) -> None:
        tokens, name = self.tokens(9), f"request {self.num_made}, {self.rng.random()}"
        self.keep(self.both(lambda side: side.client.sequence(tokens, request_id=name)))

    def append(self, names: list[int]) -> None:
        some = self.rng.sample(names, min(len(names), self.rng.randint(1, 3)))
        rows, lookahead = [self.tokens(3) for _ in some], [self.rng.randrange(3) for _ in some]
        good, bad = self.both(
            lambda side: side.client.append(
                [side.sequences[name] for name in some], rows, None, lookahead
            )
        )
        assert good == bad

    def truncate(self, names: list[int]) -> None:
        """Back to where it was a moment ago, so that old copies would fit again."""
        name = self.rng.choice(names)
        length = max(1, self.good.sequences[name].num_tokens - self.rng.randrange(4))
        good, bad = self.both(lambda side: side.sequences[name].truncate(length))
        assert good == bad

    def fork(self, names: list[int]) -> None:
        name, key = self.rng.choice(names), f"child {self.num_made}, {self.rng.random()}"
        good, bad = self.both(lambda side: side.sequences[name].fork(request_ids=[key]))
        if not isinstance(good, str):
            self.keep((good[0], bad[0]))

    def free(self, names: list[int]) -> None:
        name = self.rng.choice(names)
        self.both(lambda side: side.sequences[name].free())
        for side in self.sides:
            del side.sequences[name]

    def commit(self, names: list[int]) -> None:
        """A part of what is left, or all of it."""
        name = self.rng.choice(names)
        sequence = self.good.sequences[name]
        left = max(0, sequence.num_tokens - sequence.num_computed_tokens)
        count = self.rng.choice((left, self.rng.randint(0, left)))
        good, bad = self.both(lambda side: side.sequences[name].commit(count))
        assert good == bad

    def attend(self, names: list[int]) -> None:
        """Some more tokens, drafts included, in one layer or both."""
        name, drafts = self.rng.choice(names), self.rng.randrange(3)
        for layer in range(self.rng.randint(1, 2)):
            start = self.good.sequences[name]._state.position(layer)
            count = max(1, self.good.sequences[name].num_tokens + drafts - start)
            q = np.full((count, 1, 8), self.rng.random(), dtype=np.float32)
            good, bad = self.both(
                lambda side, layer=layer, q=q: side.sequences[name].prefill(layer, q, q, q)
            )
            assert np.array_equal(good, bad)


@pytest.mark.parametrize("model", [MODEL, None], ids=["storage", "no storage"])
@pytest.mark.parametrize("seed", range(8))
def test_a_bad_link_changes_nothing_that_is_done(seed: int, model: ModelOptions | None) -> None:
    rng = random.Random(seed)
    with (
        running_daemon(CACHE, model) as good,
        running_daemon(CACHE, model) as bad,
        grpc.insecure_channel(good.target, channel_options()) as good_channel,
        grpc.insecure_channel(bad.target, channel_options()) as bad_channel,
    ):
        link = LossyLink(bad_channel, random.Random(seed))
        sides = Side(good.daemon, good_channel), Side(bad.daemon, link)
        walk = Walk(*sides, rng, has_storage=model is not None)
        for _ in range(NUM_CALLS):
            walk.step()
        link.deliver_late_copies(NUM_CALLS)
        assert walk.good.state() == walk.bad.state()
        assert min(link.counts[how] for how in ("lost out", "lost back", "twice")) > 10
        assert link.counts["FAILED_PRECONDITION"] > 10, "old copies were refused"
        assert walk.refused < NUM_CALLS / 2
        link.is_lossy = False
        for side in walk.sides:
            side.client.close()
            assert side.daemon.sequences.pool.num_referenced == 0

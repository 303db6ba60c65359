"""One replay through a daemon, told by all that can tell of it.

The daemon is a program of its own with metrics and events. The client that replays counts what
Lookup and Allocate answer. A mirror of the cache is made of WatchEvents alone: it foretells the
hits of each prompt, whose blocks it hashes as a router would, and counts what is removed. GetStats
and the metrics are read at the end.
"""

from __future__ import annotations

import hashlib
import threading
from dataclasses import astuple, dataclass
from http.client import HTTPConnection
from pathlib import Path
from queue import SimpleQueue

from prefixcache.client import (
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    Client,
    EventStream,
    SnapshotEnded,
    SnapshotStarted,
)
from prefixcache.core.hashing import HASH_ALGORITHMS, Hasher
from prefixcache.core.stats import PoolStats
from prefixcache.errors import CancelledCallError
from prefixcache.replay import Admission, DaemonTarget, ReplayResult, Trace, replay_trace
from prefixcache.replay.targets import TargetStats
from prefixcache.types import NO_EXTRA_KEYS, TokenIds
from tests.support.mirror import Mirror
from tests.support.program import SEED, logged_until, serving
from tests.support.scrape import Scrape, read_scrape

TIMEOUT_S = 60.0
"""Far above what any event takes to arrive."""
HEADINGS = ("", "requests", "query blocks", "hit blocks", "evictions", "cached", "digest")


@dataclass(frozen=True)
class Counts:
    """digest: of the hits and evictions of each request; empty from who has only sums."""

    requests: int
    query_blocks: int
    hit_blocks: int
    evictions: int
    cached: int
    digest: str = ""


@dataclass(frozen=True)
class Trial:
    """What each witness says, and the hashes of the blocks that are cached at the end.

    mirrored: by the mirror. listed: by a snapshot that is asked for afterwards. hash_of: the hash
    of each full block that was asked for, by its key in the trace; only if a block of the pool is
    one of the trace.
    """

    counts: dict[str, Counts]
    result: ReplayResult
    mirrored: set[bytes]
    listed: set[bytes]
    hash_of: dict[int, bytes]

    def table_with(self, oracle: Counts) -> str:
        rows = [HEADINGS]
        for name, one in {"oracle": oracle, **self.counts}.items():
            *numbers, digest = astuple(one)
            rows.append((name, *(f"{number:,}" for number in numbers), digest[:16] or "-"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if index == 0 else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        )


class Follower:
    """A mirror that follows a stream of events from an empty cache on. `with` ends it."""

    def __init__(self, client: Client) -> None:
        self.mirror = Mirror()
        self.num_stored = 0
        self.num_removed = 0
        self._events: SimpleQueue[CacheEvent] = SimpleQueue()
        self._stream: EventStream = client.watch_events()
        self._thread = threading.Thread(target=self._receive, name="follower")

    def __enter__(self) -> Follower:
        self._thread.start()
        assert self._next() == SnapshotStarted(0)
        assert isinstance(self._next(), SnapshotEnded)
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.close()
        self._thread.join()

    def catch_up(self, stats: TargetStats) -> None:
        """Take events until the mirror stands where the daemon does; fails if it never does."""
        wanted = (stats.num_evictions, stats.num_cached_blocks)
        while (self.num_removed, len(self.mirror.parent_of)) != wanted:
            assert self.num_removed <= stats.num_evictions
            event = self._next()
            if isinstance(event, BlocksStored):
                self.mirror.store(event.block_hashes, event.parent_hash)
                self.num_stored += len(event.block_hashes)
            else:
                assert isinstance(event, BlocksRemoved), event
                self.mirror.remove(event.block_hashes)
                self.num_removed += len(event.block_hashes)

    def has_come_to_the_end(self) -> bool:
        """No event waits to be taken."""
        return self._events.empty()

    def _next(self) -> CacheEvent:
        return self._events.get(timeout=TIMEOUT_S)

    def _receive(self) -> None:
        try:
            for event in self._stream:
                self._events.put(event)
        except CancelledCallError:
            return


class WitnessedTarget(DaemonTarget):
    """A daemon that a mirror follows, request for request."""

    def __init__(self, client: Client, follower: Follower, hasher: Hasher) -> None:
        super().__init__(client)
        self.num_query_blocks = 0
        self.num_hit_blocks = 0
        self.num_requests = 0
        self.prompts: list[bytes] = []
        self._follower = follower
        self._hasher = hasher
        self._lines: list[str] = []
        self._num_evictions_before = 0
        self._foretold: int | None = None

    @property
    def digest(self) -> str:
        """Of what the mirror has foretold and counted."""
        return hashlib.sha256("".join(self._lines).encode()).hexdigest()

    def allocate(self, token_ids: TokenIds) -> Admission:
        hashes = self._hasher.chain(None, token_ids, NO_EXTRA_KEYS).hashes
        self.prompts.append(hashes.data)
        num_hits = 0
        for block_hash in hashes:
            if block_hash not in self._follower.mirror.parent_of:
                break
            num_hits += 1
        admission = super().allocate(token_ids)
        self._foretold = num_hits if admission.is_admitted else None
        if admission.is_admitted:
            self.num_requests += 1
            self.num_query_blocks += len(hashes)
            self.num_hit_blocks += num_hits
        return admission

    def stats(self) -> TargetStats:
        """The replay asks once before the first request, and once after each."""
        stats = super().stats()
        follower = self._follower
        follower.catch_up(stats)
        index = len(self._lines)
        if index < len(self.prompts):
            of_request = "-,-"
            if self._foretold is not None:
                num_evictions = follower.num_removed - self._num_evictions_before
                of_request = f"{self._foretold},{num_evictions}"
            self._lines.append(f"{index},{of_request}\n")
        self._num_evictions_before = follower.num_removed
        return stats


def try_replay(trace: Trace, block_size: int, num_blocks: int, folder: Path) -> Trial:
    """folder: of mode 0700, for the daemon's socket."""
    hasher = Hasher(HASH_ALGORITHMS["sha256_cbor"], SEED, block_size)
    options = ("--storage", "none", "--num-blocks", str(num_blocks))
    options += ("--block-size", str(block_size), "--event-buffer", "64MiB")
    options += ("--metrics-listen", "127.0.0.1:0")
    with serving(folder, *options) as daemon, Client(daemon.addresses[0]) as client:
        metrics = logged_until(daemon, "serving metrics")[-1]["address"]
        with Follower(client) as follower:
            target = WitnessedTarget(client, follower, hasher)
            result = replay_trace(trace, target)
            found, stats = _scraped(metrics), client.stats()
            listed = _listed(client)
            assert follower.has_come_to_the_end()
            counts = {
                "replay": Counts(
                    result.requests - result.rejected,
                    result.query_blocks,
                    result.hit_blocks,
                    result.evictions,
                    result.cached_end,
                    result.digest,
                ),
                "mirror": Counts(
                    target.num_requests,
                    target.num_query_blocks,
                    target.num_hit_blocks,
                    follower.num_removed,
                    len(follower.mirror.parent_of),
                    target.digest,
                ),
                "GetStats": _of_stats(stats),
                "metrics": _of_metrics(found),
            }
            # What was not hit was computed, and stored.
            assert follower.num_stored == result.query_blocks - result.hit_blocks
            mirrored = set(follower.mirror.parent_of)
    return Trial(counts, result, mirrored, listed, _hash_of(trace, block_size, target.prompts))


def _of_stats(stats: PoolStats) -> Counts:
    return Counts(
        stats.requests, stats.queries_blocks, stats.hit_blocks, stats.evictions, stats.cached
    )


def _of_metrics(found: Scrape) -> Counts:
    names = ("requests_total", "queries_blocks_total", "hit_blocks_total")
    sums = [int(found[f"prefixcache_{name}"]) for name in names]
    evictions = int(found.total("prefixcache_evictions_total"))
    return Counts(*sums, evictions, int(found["prefixcache_cached_blocks"]))


def _scraped(address: str) -> Scrape:
    connection = HTTPConnection(address, timeout=TIMEOUT_S)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return read_scrape(text)


def _listed(client: Client) -> set[bytes]:
    """The hashes in a snapshot of now."""
    found: set[bytes] = set()
    with client.watch_events() as stream:
        for event in stream:
            if isinstance(event, SnapshotEnded):
                break
            if isinstance(event, BlocksStored):
                found.update(event.block_hashes)
    return found


def _hash_of(trace: Trace, block_size: int, prompts: list[bytes]) -> dict[int, bytes]:
    if block_size != trace.trace_block:
        return {}
    return {
        int(key): hashes[32 * index : 32 * (index + 1)]
        for request, hashes in zip(trace.requests, prompts, strict=True)
        for index, key in enumerate(request.keys[: len(hashes) // 32])
    }

"""The replay loop and its counts.

One request at a time, prompts only: lookup, allocate, commit, free, then the next. Owns the
definition of the counts; reads no files and knows no hashes. A result is plain numbers.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prefixcache.replay.hit_rates import HitRates
from prefixcache.replay.targets import Target
from prefixcache.replay.trace import Trace


@dataclass(frozen=True, slots=True)
class ReplayResult(HitRates):
    """Counts over all requests. Those rejected count in `rejected...` and nowhere else.

    hit_tokens: hit blocks × block size, as a block-granular simulator counts; num_cached_tokens is
    the cache's own count, lower by one for every prompt that was cached whole. new_blocks: blocks
    taken, partly filled ones included; inserts: blocks that became findable; dup_skipped: full
    blocks computed that did not, since their content was findable already. cached_end: findable at
    the end. digest: SHA-256 of the lines "<request>,<hit blocks>,<evictions>\\n", and
    "<request>,-,-\\n" for a rejected one. seconds: wall time.
    """

    num_blocks: int
    block_size: int
    requests: int
    rejected: int
    query_blocks: int
    hit_blocks: int
    query_tokens: int
    hit_tokens: int
    rejected_query_blocks: int
    rejected_hit_blocks: int
    new_blocks: int
    evictions: int
    inserts: int
    dup_skipped: int
    cached_end: int
    digest: str
    num_cached_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Outcome:
    is_admitted: bool
    num_tokens: int
    num_hit_blocks: int
    num_cached_tokens: int
    num_evictions: int


def replay_trace(
    trace: Trace, target: Target, on_request: Callable[[int], None] | None = None
) -> ReplayResult:
    """Send every request of a trace to an empty target.

    on_request: called after each with its number of tokens. Raises what the target raises.
    """
    start_s = time.perf_counter()
    first = before = target.stats()
    outcomes = []
    for request in trace.requests:
        admission = target.allocate(trace.token_ids(request))
        if admission.is_admitted:
            try:
                target.commit()
            finally:
                target.free()
        after = target.stats()
        outcomes.append(
            _Outcome(
                is_admitted=admission.is_admitted,
                num_tokens=request.num_tokens,
                num_hit_blocks=admission.num_hit_blocks,
                num_cached_tokens=admission.num_cached_tokens,
                num_evictions=after.num_evictions - before.num_evictions,
            )
        )
        before = after
        if on_request is not None:
            on_request(request.num_tokens)
    cached_end = before.num_cached_blocks - first.num_cached_blocks
    return _summary(target, outcomes, cached_end, time.perf_counter() - start_s)


def _summary(
    target: Target, outcomes: list[_Outcome], cached_end: int, seconds: float
) -> ReplayResult:
    size = target.block_size
    admitted = [outcome for outcome in outcomes if outcome.is_admitted]
    rejected = [outcome for outcome in outcomes if not outcome.is_admitted]
    query_blocks = sum(outcome.num_tokens // size for outcome in admitted)
    hit_blocks = sum(outcome.num_hit_blocks for outcome in admitted)
    evictions = sum(outcome.num_evictions for outcome in admitted)
    inserts = cached_end + evictions
    return ReplayResult(
        num_blocks=target.num_blocks,
        block_size=size,
        requests=len(outcomes),
        rejected=len(rejected),
        query_blocks=query_blocks,
        hit_blocks=hit_blocks,
        query_tokens=sum(outcome.num_tokens for outcome in admitted),
        hit_tokens=hit_blocks * size,
        rejected_query_blocks=sum(outcome.num_tokens // size for outcome in rejected),
        rejected_hit_blocks=sum(outcome.num_hit_blocks for outcome in rejected),
        new_blocks=sum(-(-outcome.num_tokens // size) for outcome in admitted) - hit_blocks,
        evictions=evictions,
        inserts=inserts,
        dup_skipped=query_blocks - hit_blocks - inserts,
        cached_end=cached_end,
        digest=_digest(outcomes),
        num_cached_tokens=sum(outcome.num_cached_tokens for outcome in admitted),
        seconds=seconds,
    )


def _digest(outcomes: Iterable[_Outcome]) -> str:
    lines = (
        f"{index},{outcome.num_hit_blocks},{outcome.num_evictions}\n"
        if outcome.is_admitted
        else f"{index},-,-\n"
        for index, outcome in enumerate(outcomes)
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()

"""A step does what its calls do one by one, in its order: two daemons, one told each way.

Random steps, bad rows and refused calls included. After each, the replies and the whole state of
both daemons are equal, but for the sequence ids, which are random.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.core.holders import MAX_AGE_S
from prefixcache.rpc._pb import cache_pb2
from prefixcache.server.daemon import CacheOptions
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.invariants import check_invariants, snapshot
from tests.support.stubs import PartRefused, Peer, Refused, Row, Stubs, connected, refusals

NUM_BLOCKS, BLOCK_SIZE = 12, 4
PROMPTS = [list(range(start, start + 24)) for start in (0, 0, 100)]
PROMPTS[1][10:] = range(50, 64)
UNKNOWN_ID = 5
CALLS = ("free", "commit", "append")


@dataclass(frozen=True)
class RowPlan:
    """One sequence's row: where it starts, off by `shift`, and what it says."""

    which: int
    shift: int
    amount: int
    num_lookahead_tokens: int


@dataclass(frozen=True)
class NewPlan:
    """A new sequence: the first tokens of a prompt."""

    which: int
    num_tokens: int
    request: int


@dataclass(frozen=True)
class Plan:
    """A step; a call whose plan is None is absent."""

    free: list[int] | None
    commit: list[RowPlan] | None
    append: list[RowPlan] | None
    allocates: list[NewPlan]
    bad_owner: str


ROWS = st.lists(
    st.builds(
        RowPlan,
        st.integers(0, 3),
        st.sampled_from([0, 0, 0, 0, 1]),
        st.integers(0, 9),
        st.sampled_from([0, 0, 3]),
    ),
    max_size=4,
)
PLANS = st.lists(
    st.builds(
        Plan,
        st.none() | st.lists(st.integers(0, 5), max_size=2),
        st.none() | ROWS,
        st.none() | ROWS,
        st.lists(
            st.builds(NewPlan, st.integers(0, 2), st.integers(0, 24), st.integers(0, 6)),
            max_size=3,
        ),
        st.sampled_from(["", "", "", "", "free", "commit", "append"]),
    ),
    min_size=2,
    max_size=8,
)


class World:
    """A daemon and one owner of it. Sequences have the number of their allocation as a name."""

    def __init__(self, running: RunningDaemon, stubs: Stubs) -> None:
        self.running = running
        self.peer = Peer(stubs, bytes(16))
        self.ids: list[int] = []

    def state(self) -> dict[str, Any]:
        sequences = self.running.daemon.sequences
        with sequences.lock:
            check_invariants(sequences)
            found = snapshot(sequences)
        found["sequences"] = [
            (self.ids.index(sequence_id), *progress)
            for sequence_id, *progress in found["sequences"]
        ]
        return found

    def id_of(self, which: int) -> int:
        return self.ids[which % len(self.ids)] if self.ids else UNKNOWN_ID

    def requests(self, plan: Plan) -> dict[str, Any]:
        """The calls of the step that are present, by name."""
        records = {one.sequence_id: one for one in self.running.daemon.sequences.live.all_holders()}

        def positions(row: RowPlan) -> tuple[int, int]:
            record = records.get(self.id_of(row.which))
            return (record.num_computed, record.num_tokens) if record else (0, 0)

        found: dict[str, Any] = {}
        if plan.free is not None:
            ids = [self.id_of(which) for which in plan.free]
            found["free"] = cache_pb2.FreeRequest(owner=self.peer.owner, sequence_ids=ids)
        if plan.commit is not None:
            found["commit"] = self.peer.commit_request(
                [
                    (self.id_of(row.which), positions(row)[0] + row.shift, row.amount)
                    for row in plan.commit
                ]
            )
        if plan.append is not None:
            found["append"] = self.peer.append_request(
                [
                    Row(
                        self.id_of(row.which),
                        positions(row)[1] + row.shift,
                        tuple(range(row.amount)),
                        row.amount // 2,
                        row.num_lookahead_tokens,
                    )
                    for row in plan.append
                ]
            )
        if plan.bad_owner in found:
            found[plan.bad_owner].owner = b"short"
        return found

    def new(self, plan: Plan) -> list[cache_pb2.AllocateRequest]:
        return [
            cache_pb2.AllocateRequest(
                owner=self.peer.owner,
                token_ids=PROMPTS[new.which][: new.num_tokens],
                request_id=f"request {new.request}" if new.request < 3 else "",
            )
            for new in plan.allocates
        ]

    def named(self, outcome: Any) -> Any:
        """A reply without its sequence id, which gets a name, and a refusal in plain values."""
        if isinstance(outcome, PartRefused):
            numbers = {**outcome.numbers, "boot_id": "", "sequence_id": ""}
            return outcome.code, outcome.reason, numbers, outcome.retry_delay_s
        if not isinstance(outcome, cache_pb2.AllocateResponse):
            return outcome
        if outcome.sequence_id not in self.ids:
            self.ids.append(outcome.sequence_id)
        name = self.ids.index(outcome.sequence_id)
        return name, outcome.num_cached_tokens, list(outcome.block_ids)


def by_step(world: World, plan: Plan, steps: Any) -> list[Any]:
    batches, new = world.requests(plan), world.new(plan)
    reply = steps.run(cache_pb2.StepRequest(**batches, allocates=new))
    refused = refusals(reply)
    assert all(reply.HasField(name) == ((name, 0) not in refused) for name in batches)
    outcomes = [refused.get((name, 0)) or getattr(reply, name) for name in CALLS if name in batches]
    outcomes += [refused.get(("allocates", i)) or part for i, part in enumerate(reply.allocates)]
    assert len(outcomes) == len(batches) + len(new)
    return [world.named(outcome) for outcome in outcomes]


def one_by_one(world: World, plan: Plan) -> list[Any]:
    batches = world.requests(plan)
    calls = [(name.capitalize(), batches[name]) for name in CALLS if name in batches]
    calls += [("Allocate", request) for request in world.new(plan)]
    return [world.named(outcome) for outcome in _outcomes(world, calls)]


def _outcomes(world: World, calls: list[tuple[str, Any]]) -> Iterator[Any]:
    for name, request in calls:
        try:
            yield world.peer.stubs.call(name, request)
        except Refused as refusal:
            yield refusal


@settings(derandomize=True, database=None, deadline=None, max_examples=120)
@given(PLANS)
def test_a_step_does_what_its_calls_do_one_by_one(plans: list[Plan]) -> None:
    cache = CacheOptions(NUM_BLOCKS, BLOCK_SIZE, hash_seed="a seed of the step tests")
    now_s = 0.0
    with ExitStack() as stack:
        worlds = []
        for _ in range(2):
            running = stack.enter_context(running_daemon(cache, clock=lambda: now_s))
            worlds.append(World(running, stack.enter_context(connected(running.target))))
        steps = stack.enter_context(worlds[0].peer.stubs.steps())
        for plan in plans:
            now_s += MAX_AGE_S  # A refusal names the largest holders of a moment ago.
            assert by_step(worlds[0], plan, steps) == one_by_one(worlds[1], plan)
            assert worlds[0].state() == worlds[1].state()

"""Random histories of the block manager agree with the naive model, step by step.

Hash functions that collide are injected too: the answers must still be the exact ones, never
another content's block.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from prefixcache.types import CacheUse, FullHit
from tests.core.account_rules import GUARANTEES, LIMITS, AccountRules
from tests.core.event_rules import EventRules
from tests.core.machine import REQUEST_IDS, TRUNKS, BlockManagerMachine, NoStorageMachine
from tests.core.session_rules import OPEN_KEYS, OWNERS, SLOTS, TTLS_S, WRITERS


def always_collides(data: bytes) -> bytes:
    return b"\x00" * 32


def two_bits(data: bytes) -> bytes:
    return bytes([hashlib.sha256(data).digest()[0] & 3]) * 32


class AlwaysCollidingMachine(BlockManagerMachine):
    digest = staticmethod(always_collides)
    verify_hits = True


class TwoBitMachine(NoStorageMachine):
    digest = staticmethod(two_bits)
    verify_hits = True


class VerifyingMachine(NoStorageMachine):
    verify_hits = True


class TenantsMachine(AccountRules, BlockManagerMachine):
    pass


class NoStorageTenantsMachine(AccountRules, NoStorageMachine):
    pass


class CollidingTenantsMachine(AccountRules, TwoBitMachine):
    pass


class WatchedMachine(EventRules, BlockManagerMachine):
    pass


class WatchedVerifyingMachine(EventRules, VerifyingMachine):
    pass


class WatchedCollidingMachine(EventRules, TwoBitMachine):
    pass


class WatchedTenantsMachine(EventRules, NoStorageTenantsMachine):
    pass


def run(machine: type[BlockManagerMachine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )


def draw_prompt(rng: random.Random) -> list[int]:
    trunk = rng.choice(TRUNKS)[: rng.randrange(15)]
    return trunk + [rng.randrange(2) for _ in range(rng.randrange(1, 5))]


def draw_step(
    rng: random.Random, machine: BlockManagerMachine, weights: dict[str, int]
) -> tuple[str, dict[str, Any]]:
    """A rule and its arguments, weighted so that the pool is full of shared prefixes."""

    def rarely(one_in: int) -> bool:
        return rng.randrange(one_in) == 0

    pick, slip = {"number": rng.randrange(8), "stranger": rarely(40)}, rng.choice((1, -1))
    slip = slip if rarely(25) else 0
    kind = rng.randrange(7) if rarely(4) else 0
    name = rng.choices(list(weights), list(weights.values()))[0]
    arguments: dict[str, dict[str, Any]] = {
        "lookup": {
            "slot": rng.choice((*OWNERS, *SLOTS)),
            "prompt": draw_prompt(rng),
            "kind": kind,
            "lookahead": rng.randrange(5),
            "full": rarely(2),
        },
        "allocate": {
            "slot": rng.choice((*OWNERS, *SLOTS)),
            "request_id": rng.choice(REQUEST_IDS),
            "prompt": draw_prompt(rng),
            "kind": kind,
            "lookahead": rng.choice((0, 0, 2, 5)),
            "cache_use": rng.choice(list(CacheUse)) if rarely(3) else CacheUse.READ_WRITE,
            "full_hit": rng.choice(list(FullHit)),
            "resumed": rarely(10),
            "compute": not rarely(3),
        },
        "wait": {"prompt": draw_prompt(rng), "kind": kind},
        "append": {
            **pick,
            "tokens": [rng.randrange(2) for _ in range(rng.choice((0, 1, 1, 2, 3, 6)))],
            "kind": kind,
            "accepted": rng.randrange(4),
            "lookahead": rng.choice((0, 0, 1, 4)),
            "slip": slip,
            "compute": rarely(2),
        },
        "fork": {**pick, "num_children": rng.choice((1, 1, 2)), "named": rarely(8), "slip": slip},
        "truncate": {**pick, "cut": rng.choice((-1, 0, 1, 1, 2, 3, 5, 9)), "slip": slip},
        "free": {**pick, "by_request_id": rarely(2)},
        "compute_all": {"number": pick["number"], "drafts": rng.choice((0, 2, 4))},
        "begin_attention": {
            "numbers": [rng.randrange(8) for _ in range(rng.choice((1, 1, 2, 3)))],
            "layer": rng.randrange(3),
            "limit": rng.choice((1, 3, 20)),
            "beyond": rng.choice((0, 4)),
            "slip": slip,
            "stranger": pick["stranger"],
        },
        "end_attention": {"number": rng.randrange(8), "failed": rarely(10)},
        "commit": {**pick, "limit": rng.choice((0, 1, 3, 40)), "slip": slip, "beyond": rarely(20)},
        "press": {"count": rng.randrange(1, 1 + machine.model.stats()["num_blocks"])},
        "open_session": {
            "slot": rng.choice(SLOTS),
            "ttl_s": rng.choice(TTLS_S),
            "request_id": rng.choice(OPEN_KEYS),
        },
        "connect_session": {"slot": rng.choice(SLOTS)},
        "break_stream": {"slot": rng.choice(SLOTS)},
        "close_session": {"slot": rng.choice(SLOTS)},
        "attach": {"slot": rng.choice(SLOTS), "writer": rng.choice(WRITERS)},
        "write_strays": {},
        "end_process": {"writer": rng.choice(WRITERS)},
        "finish_copies": {},
        "repeat": {},
        "reset": {"force": rarely(3)},
        "set_quota": {
            "account": rng.randrange(4),
            "guaranteed": rng.choice(GUARANTEES),
            "limit": rng.choice(LIMITS),
        },
        "expire": {"seconds": rng.choice((1.0, 1.0, 3.0, 10.0))},
    }
    return name, arguments[name]


WALK = {
    "allocate": 22,
    "append": 22,
    "compute_all": 12,
    "free": 18,
    "truncate": 9,
    "fork": 6,
    "press": 6,
    "begin_attention": 8,
    "end_attention": 8,
    "commit": 6,
    "finish_copies": 8,
    "lookup": 4,
    "wait": 6,
    "repeat": 5,
    "reset": 1,
    "expire": 2,
    "open_session": 6,
    "connect_session": 2,
    "break_stream": 2,
    "close_session": 1,
    "attach": 5,
    "write_strays": 4,
    "end_process": 2,
    "set_quota": 4,
}


WRITERS_WALK = WALK | {
    "allocate": 60,
    "free": 9,
    "press": 3,
    "open_session": 30,
    "connect_session": 10,
    "break_stream": 10,
    "attach": 40,
    "expire": 12,
    "write_strays": 10,
    "end_process": 4,
}


def walk(
    machine_class: type[BlockManagerMachine],
    seed: int,
    num_steps: int,
    weights: dict[str, int] = WALK,
) -> BlockManagerMachine:
    """A long random history. Hypothesis finds short failures; this one reaches deep states."""
    rng = random.Random(seed)
    machine = machine_class()
    machine.start(
        num_blocks=rng.randrange(4, 41), block_size=rng.choice((1, 2, 2, 4, 4)), caching=True
    )
    for number in range(num_steps):
        name, arguments = draw_step(rng, machine, weights)
        able = {
            "end_attention": machine.attention,
            "repeat": machine.last_step,
            "set_quota": isinstance(machine, AccountRules),
        }
        if not able.get(name, True):
            continue
        try:
            getattr(machine, name)(**arguments)
            machine.agrees_with_the_model()
            machine.invariants_hold()
        except Exception as error:
            error.add_note(f"seed {seed}, step {number}: {name}({arguments})")
            raise
    machine.teardown()
    return machine


MACHINES = (
    BlockManagerMachine,
    NoStorageMachine,
    AlwaysCollidingMachine,
    TwoBitMachine,
    VerifyingMachine,
)
WATCHED_MACHINES = (
    WatchedMachine,
    WatchedVerifyingMachine,
    WatchedCollidingMachine,
    WatchedTenantsMachine,
)
TENANT_MACHINES = (TenantsMachine, NoStorageTenantsMachine, CollidingTenantsMachine)
WRITERS_MACHINES = (
    BlockManagerMachine,
    NoStorageMachine,
    TwoBitMachine,
    TenantsMachine,
    CollidingTenantsMachine,
    WatchedTenantsMachine,
)


@pytest.mark.parametrize("machine", MACHINES)
def test_every_call_agrees_with_the_naive_model(machine: type[BlockManagerMachine]) -> None:
    run(machine, examples=80, steps=40)


@pytest.mark.parametrize("machine", TENANT_MACHINES)
def test_every_call_of_tenants_with_quotas_agrees_with_the_naive_model(
    machine: type[BlockManagerMachine],
) -> None:
    run(machine, examples=20, steps=40)
    for seed in range(20):
        walk(machine, seed, 250)


@pytest.mark.parametrize("machine", WATCHED_MACHINES)
def test_after_every_call_a_mirror_made_of_events_is_the_index(
    machine: type[BlockManagerMachine],
) -> None:
    run(machine, examples=20, steps=40)
    for seed in range(20):
        walk(machine, seed, 250)


@pytest.mark.parametrize("machine", MACHINES)
def test_long_random_histories_agree_with_the_naive_model(
    machine: type[BlockManagerMachine],
) -> None:
    for seed in range(60):
        walk(machine, seed, 250)


@pytest.mark.parametrize("machine", WRITERS_MACHINES)
def test_what_writers_of_lost_sessions_still_write_is_in_nobodys_blocks(
    machine: type[BlockManagerMachine],
) -> None:
    walks = [walk(machine, seed, 300, WRITERS_WALK) for seed in range(20)]
    assert sum(one.num_released for one in walks) > 10


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES + TENANT_MACHINES + WATCHED_MACHINES)
def test_a_hundred_thousand_random_calls_agree_with_the_naive_model(
    machine: type[BlockManagerMachine],
) -> None:
    for seed in range(1000, 1100):
        walk(machine, seed, 1000, WRITERS_WALK if seed % 2 else WALK)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES + TENANT_MACHINES + WATCHED_MACHINES)
def test_every_call_agrees_with_the_naive_model_for_long(
    machine: type[BlockManagerMachine],
) -> None:
    run(machine, examples=500, steps=80)

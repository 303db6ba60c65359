"""What was seen of a prompt's blocks without the lock is looked at again before it counts."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from prefixcache.core import sequences as core_sequences
from prefixcache.core.hashing import HASH_ALGORITHMS, Chain, HashAlgorithm, Hasher
from prefixcache.core.pool import Pool
from prefixcache.core.sequence import Prompt
from prefixcache.types import NO_EXTRA_KEYS
from tests.core.manager import Held, Manager

CONSTANT = HashAlgorithm("constant", 32, lambda data: b"\x00" * 32, True, False)
SHA256 = HASH_ALGORITHMS["sha256_cbor"]


def guessed(manager: Manager, tokens: list[int]) -> Prompt:
    """A prompt that others may overtake from now on."""
    return manager.sequences.prepare(np.array(tokens, dtype=np.uint32), NO_EXTRA_KEYS)


def match(pool: Pool, chain: Chain) -> list[int]:
    found: list[int] = pool.match(chain, len(chain.hashes)).tolist()
    return found


@pytest.fixture(autouse=True)
def short_prompts_are_guessed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_sequences, "_MIN_BLOCKS_OF_GUESS", 1)


@pytest.mark.parametrize(
    ("algorithm", "verify_hits"), [(SHA256, False), (SHA256, True), (CONSTANT, True)]
)
@pytest.mark.parametrize("seed", range(5))
def test_an_old_guess_finds_what_no_guess_finds(
    seed: int, algorithm: HashAlgorithm, verify_hits: bool
) -> None:
    rng = random.Random(seed)
    manager = Manager(12, verify_hits=verify_hits, algorithm=algorithm)
    prompts: list[Prompt] = []
    alive: list[Held] = []
    num_hits = num_changed = 0
    for _ in range(400):
        tokens = [rng.randrange(2) for _ in range(4)] * 2 + [7] * rng.randrange(1, 12)
        prompts = [*prompts[-20:], guessed(manager, tokens)]
        action = rng.random()
        if action < 0.4 and manager.lookup(tokens).num_blocks_free >= 5:
            alive.append(manager.allocate(tokens))
            manager.commit(alive[-1], len(tokens) - alive[-1].cached)
        elif alive and action < 0.95:
            manager.free(alive.pop(rng.randrange(len(alive))))
        elif action > 0.98:
            manager.sequences.reset(force=True)
        for prompt in prompts:
            chain = prompt.chain
            assert chain is not None
            expected = match(manager.pool, chain._replace(guess=None))
            assert match(manager.pool, chain) == expected
            num_hits += len(expected)
            num_changed += chain.guess is not None and chain.guess.tolist() != expected
    assert num_hits
    assert num_changed or prompts[0].chain is None or prompts[0].chain.guess is None


def test_guesses_while_others_take_and_register_blocks() -> None:
    pool, hasher, lock = (
        Pool(600, 2, False),
        Hasher(SHA256, "a seed of the tests", 2),
        threading.Lock(),
    )
    tokens = np.arange(1_000, dtype=np.uint32)
    chains = [hasher.chain(None, tokens + first, NO_EXTRA_KEYS) for first in range(3)]
    is_over = threading.Event()

    def turn_over() -> None:
        while not is_over.is_set():
            for chain in chains:
                with lock:
                    blocks = pool.take(len(chain.hashes))
                    pool.register(blocks, chain, None)
                    pool.release(blocks)

    thread = threading.Thread(target=turn_over)
    thread.start()
    try:
        for turn in range(2_000):
            chain = chains[turn % len(chains)]
            guess = pool.guess(chain.hashes)
            with lock:
                expected = match(pool, chain)
                assert match(pool, chain._replace(guess=guess)) == expected
    finally:
        is_over.set()
        thread.join()

"""SHA-256 of our own, and what a long chain does to other threads."""

from __future__ import annotations

import hashlib
import random
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from prefixcache.core.hashing import HASH_ALGORITHMS
from prefixcache.core.native.hash_chain import hash_chain, sha256


@pytest.mark.parametrize("portable", [False, True])
def test_sha256_of_every_length_around_the_padding_equals_the_librarys(portable: bool) -> None:
    data = random.Random(1).randbytes(300)
    for size in range(301):
        assert sha256(data[:size], portable=portable) == hashlib.sha256(data[:size]).digest()


@pytest.mark.parametrize("portable", [False, True])
def test_sha256_of_long_messages_equals_the_librarys(portable: bool) -> None:
    rng = random.Random(2)
    for _ in range(20):
        data = rng.randbytes(rng.randrange(1_000, 200_000))
        assert sha256(data, portable=portable) == hashlib.sha256(data).digest()


@pytest.fixture
def no_forced_switches() -> Iterator[None]:
    """A thread keeps the GIL until it lets go of it by itself."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(600.0)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("name", HASH_ALGORITHMS)
def test_other_threads_run_while_a_long_chain_is_hashed(
    name: str, no_forced_switches: None
) -> None:
    """The starting thread is back before the chain is done; with the GIL held it never would be.

    It may be late when the machine is busy, hence several tries.
    """
    parent = bytes(HASH_ALGORITHMS[name].digest_bytes)
    token_ids = np.zeros(1 << 22, dtype=np.uint32)

    def is_back_early() -> bool:
        done = threading.Event()

        def run() -> None:
            hash_chain(name, parent, token_ids, None, 16)
            done.set()

        worker = threading.Thread(target=run)
        worker.start()
        is_early = not done.is_set()
        worker.join()
        return is_early

    assert any(is_back_early() for _ in range(50))


def test_arguments_that_do_not_fit_together_are_refused() -> None:
    token_ids = np.zeros(8, dtype=np.uint32)
    with pytest.raises(ValueError, match="block size 3"):
        hash_chain("xxh3", bytes(16), token_ids, None, 3)
    with pytest.raises(ValueError, match="parent"):
        hash_chain("xxh3", bytes(32), token_ids, None, 4)
    with pytest.raises(ValueError, match="1 extra keys for 2 blocks"):
        hash_chain("xxh3", bytes(16), token_ids, [b""], 4)

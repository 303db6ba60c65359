"""Long chains are hashed by threads of lower priority, where the caller wants that."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

from prefixcache.core.hashing import HASH_ALGORITHMS
from prefixcache.core.native.hash_chain import hash_chain

NUM_BLOCKS = [0, 1, 1023, 1024, 1025, 8192]
"""Of 16 tokens; from 1024 on a chain is long."""


def chains(name: str, *, in_background: bool) -> list[bytes]:
    """All of them at the same time."""
    parent = bytes(HASH_ALGORITHMS[name].digest_bytes)
    token_ids = np.arange(NUM_BLOCKS[-1] * 16, dtype=np.uint32)
    run = partial(hash_chain, name, parent)
    with ThreadPoolExecutor(len(NUM_BLOCKS)) as threads:
        done = [
            threads.submit(run, token_ids[: count * 16], None, 16, in_background)
            for count in NUM_BLOCKS
        ]
        return [each.result() for each in done]


@pytest.mark.parametrize("name", HASH_ALGORITHMS)
def test_a_chain_is_the_same_wherever_it_is_hashed(name: str) -> None:
    for _ in range(5):
        assert chains(name, in_background=True) == chains(name, in_background=False)


def nicenesses() -> set[int]:
    """Of the threads of this process."""
    found = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended since
            found.add(os.getpriority(os.PRIO_PROCESS, int(thread)))
    return found


def test_the_caller_keeps_its_priority_and_the_background_has_a_lower_one() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    chains("xxh3", in_background=True)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
    assert max(nicenesses()) == min(own + 5, 19)


def test_a_forked_child_has_a_background_of_its_own() -> None:
    program = """
import os
import numpy as np
from prefixcache.core.native.hash_chain import hash_chain
arguments = "xxh3", bytes(16), np.arange(1 << 15, dtype=np.uint32), None, 16, True
before = hash_chain(*arguments)
child = os.fork()
if child == 0:
    os._exit(0 if hash_chain(*arguments) == before else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)

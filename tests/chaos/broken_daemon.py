"""The daemon of `checked_daemon` with a defect put into it, to see that the load finds it.

The environment variable CHAOS_DEFECT names the defect.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from prefixcache.core import growth
from prefixcache.core.hashing import Hasher
from prefixcache.core.sessions import Sessions
from prefixcache.types import NO_EXTRA_KEYS
from tests.chaos import checked_daemon

VARIABLE = "CHAOS_DEFECT"


def leak(patch: pytest.MonkeyPatch) -> None:
    """An ended sequence keeps its last block."""
    release = growth.release_all

    def release_most(pool: Any, sequence: Any) -> None:
        pool.acquire(sequence.blocks()[-1:])
        release(pool, sequence)

    patch.setattr(growth, "release_all", release_most)


def wrong_hits(patch: pytest.MonkeyPatch) -> None:
    """Prompts that differ in their extra keys only share their blocks."""
    chain = Hasher.chain

    def chain_without_keys(self: Hasher, parent: Any, tokens: Any, keys: Any, **more: Any) -> Any:
        return chain(self, parent, tokens, NO_EXTRA_KEYS, **more)

    patch.setattr(Hasher, "chain", chain_without_keys)


def sessions_without_end(patch: pytest.MonkeyPatch) -> None:
    """What a killed client held stays."""
    patch.setattr(Sessions, "expired", lambda self: [])


def no_quarantine(patch: pytest.MonkeyPatch) -> None:
    """What a writer that stands still may still write to is given to others."""
    attach = Sessions.attach

    def attach_unnoticed(self: Sessions, session_id: bytes, attachment: int) -> None:
        attach(self, session_id, attachment)
        self.find(session_id).attachments.clear()

    patch.setattr(Sessions, "attach", attach_unnoticed)


SOAKED = (leak, wrong_hits, sessions_without_end)
"""Those that any load finds."""
DEFECTS = {defect.__name__: defect for defect in (*SOAKED, no_quarantine)}

if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as to_patch:
        DEFECTS[os.environ[VARIABLE]](to_patch)
        checked_daemon.run()

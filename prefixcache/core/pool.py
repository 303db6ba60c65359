"""The block pool: ref counts, the hash index and the order of eviction.

The only owner of ref counts, of the index and of the free queue. Knows no sequences and no K/V.
Not thread-safe: the core's lock guards it. A block is

    plain       no hash; blank when its ref count is 0
    registered  findable by its hash; evictable when its ref count is 0
    standby     referenced, with the content of a hash that another block is registered for;
                takes over when that block is evicted

A plain block with a ref count of 1 may be quarantined: then no sequence has it, and whoever put it
there holds it (`prefixcache.core.quarantine`). referenced + quarantined + evictable + blank are all
blocks.

Invariants: the free queue holds exactly the blocks with ref count 0; index entries and registered
blocks are a bijection; a standby's hash is in the index; cached blocks are prefix-closed (a
findable block's parent is findable), since every holder of a block holds its ancestors, or
standbys of them, and releases deepest first.

Source of the eviction order: vLLM's block pool (blocks of one request leave deepest first, so
that a chain is eaten from its end).

`Pool` is the compiled one or the one in Python, as `form` says. They have the same attributes and
methods, which `prefixcache.core.python.pool` describes, and pass the same tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefixcache.core.form import FORM
from prefixcache.core.python.hash_index import PLAIN, REGISTERED, STANDBY

if TYPE_CHECKING or FORM == "python":
    from prefixcache.core.python.pool import Pool
else:
    from prefixcache.core.native.pool import Pool

__all__ = ["PLAIN", "REGISTERED", "STANDBY", "Pool"]

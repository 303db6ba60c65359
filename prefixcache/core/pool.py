"""The block pool: ref counts, the hash index and the order of eviction.

The only owner of ref counts, of the index and of the free queue. Knows no sequences and no K/V.
Not thread-safe: the core's lock guards it. A block is

    plain       no hash; blank when its ref count is 0
    registered  findable by its hash; evictable when its ref count is 0
    standby     referenced, with the content of a hash that another block is registered for;
                takes over when that block is evicted
"""

from __future__ import annotations

from prefixcache.core.python.pool import PLAIN, REGISTERED, STANDBY, Pool

__all__ = ["PLAIN", "REGISTERED", "STANDBY", "Pool"]

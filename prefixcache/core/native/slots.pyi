from collections.abc import Iterable

from prefixcache.core.pool import Pool
from prefixcache.core.sequence import Sequence

def num_slots_written(pool: Pool, holders: Iterable[Sequence]) -> int: ...

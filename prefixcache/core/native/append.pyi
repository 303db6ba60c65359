from collections.abc import Callable, Iterable, Mapping

from prefixcache.core.hashing import Hasher
from prefixcache.core.pool import Pool
from prefixcache.core.sequence import AppendRow, Sequence
from prefixcache.types import AppendResult

def append_rows(
    pool: Pool,
    hasher: Hasher,
    live: Mapping[int, Sequence],
    owner: bytes,
    rows: Iterable[AppendRow],
    append_row: Callable[[bytes, AppendRow], AppendResult],
) -> list[AppendResult]: ...

from collections.abc import Callable, Iterable, Mapping

from prefixcache.core.sequence import CommitRow, Sequence
from prefixcache.core.stats import Counters
from prefixcache.types import CommitResult

def commit_rows(
    block_size: int,
    counters: Counters,
    live: Mapping[int, Sequence],
    owner: bytes,
    rows: Iterable[CommitRow],
    commit_row: Callable[[bytes, CommitRow], CommitResult],
) -> list[CommitResult]: ...

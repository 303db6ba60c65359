from collections.abc import Callable, Mapping

from prefixcache.core.append_batch import AppendBatch, AppendedBatch
from prefixcache.core.hashing import Hasher
from prefixcache.core.pool import Pool
from prefixcache.core.sequence import AppendRow, Sequence
from prefixcache.types import AppendResult

def append_batch(
    pool: Pool,
    hasher: Hasher,
    live: Mapping[int, Sequence],
    owner: bytes,
    batch: AppendBatch,
    append_row: Callable[[bytes, AppendRow], AppendResult],
    grown: Callable[[Sequence], None],
    account: int = 0,
) -> AppendedBatch: ...
def columns_agree(
    ids: bytes,
    starts: bytes,
    lengths: bytes,
    tokens: bytes,
    valids: bytes,
    lookaheads: bytes,
    max_tokens: int,
    max_rows: int,
) -> bool: ...

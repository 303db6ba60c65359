from array import array

from prefixcache.core.hashing import Chain
from prefixcache.core.pool import Pool

def take_prompt(
    pool: Pool, chain: Chain | None, num_usable: int, num_blocks: int
) -> tuple[array[int], int] | None: ...

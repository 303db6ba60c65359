from collections.abc import Sequence

from prefixcache.types import TokenIds

def hash_chain(
    recipe: str,
    parent: bytes,
    token_ids: TokenIds,
    extra_keys: Sequence[bytes] | None,
    block_size: int,
    in_background: bool = False,
) -> bytes: ...
def sha256(data: bytes, *, portable: bool = False) -> bytes: ...

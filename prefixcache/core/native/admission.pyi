from prefixcache.core.admission import Terms
from prefixcache.core.pool import Pool
from prefixcache.core.sequence import Prompt, Sequence

def begin_sequence(
    pool: Pool, kind: type[Sequence], prompt: Prompt, terms: Terms
) -> Sequence | None: ...

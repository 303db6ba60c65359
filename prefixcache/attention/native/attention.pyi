import numpy as np
import numpy.typing as npt
import torch

from prefixcache.attention.shared_prefix import SharedPrefix
from prefixcache.storage.kv_cache import KVCache
from prefixcache.types import AttentionOptions

FORMS: tuple[str, ...]

def attend(
    form: str,
    num_threads: int,
    q: torch.Tensor,
    cache: KVCache,
    out: torch.Tensor,
    block_tables: npt.NDArray[np.int32],
    query_start: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int32],
    shared_prefix: SharedPrefix | None,
    options: AttentionOptions,
    in_background: bool,
) -> None: ...
def write(
    num_threads: int,
    k: torch.Tensor,
    v: torch.Tensor | None,
    cache: KVCache,
    slot_mapping: npt.NDArray[np.int64],
) -> None: ...

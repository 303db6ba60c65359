from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prefixcache.attention.batch import AttentionBatch

def make_arrays(
    block_tables: Sequence[npt.NDArray[np.int32]],
    start_positions: Sequence[int],
    num_tokens: Sequence[int],
    first_writable: Sequence[int],
    block_size: int,
) -> (
    tuple[
        npt.NDArray[np.int32],
        npt.NDArray[np.int32],
        npt.NDArray[np.int32],
        npt.NDArray[np.int32],
        npt.NDArray[np.int64],
    ]
    | None
): ...
def agrees(batch: AttentionBatch, num_tokens: int, num_blocks: int, block_size: int) -> bool: ...

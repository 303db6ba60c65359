"""A few launches of every kernel here, for a tool that watches each access: `make sanitize`.

Small, since such a tool slows a kernel down a hundred times. Results are checked too.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import torch

from prefixcache.attention.copy_blocks import copy_blocks
from prefixcache.attention.reference import write_kv as reference
from prefixcache.attention.write_kv import write_kv
from tests.attention.kernel_runs import run
from tests.attention.on_device import DEVICE, cache_on_device, on_device
from tests.attention.paged_cases import OPTIONS, STORED, Stored, make_case
from tests.support.tolerances import assert_close


def main() -> None:
    for stored, options in product([Stored(), *STORED], [None, OPTIONS["all"]]):
        attend(stored, options)
        write(stored)
    copy()
    torch.cuda.synchronize()
    print("all results are right")


def attend(stored: Stored, options: object) -> None:
    """One token, an empty query, a chunk, a long context; head dim and tiles that leave a rest."""
    case = make_case(
        [0, 5, 90, 0],
        [19, 1, 1, 0],
        head_dim=80,
        block_size=16,
        dtype=torch.bfloat16,
        options=options,
        **stored,
    )
    for num_splits, rows in product([1, 4], [16, 64]):
        out = run(on_device(case), rows=rows, keys=32, num_splits=num_splits)
        assert_close(out.cpu(), case.exact())


def write(stored: Stored) -> None:
    case = make_case([3, 0], [2, 6], head_dim=80, block_size=4, dtype=torch.bfloat16, **stored)
    there = cache_on_device(case.cache)
    k, v = torch.randn(2, 5, 2, 80, generator=torch.Generator().manual_seed(1)).bfloat16()
    slots = np.array([0, -1, 7, 2, 5], dtype=np.int64)
    write_kv(there, k.to(DEVICE), v.to(DEVICE), slots)
    reference.write_kv(case.cache, k, v, slots)
    for one, other in ((there.keys, case.cache.keys), (there.values, case.cache.values)):
        assert torch.equal(one.cpu().float().nan_to_num(), other.float().nan_to_num())


def copy() -> None:
    blocks = torch.arange(5 * 1000).to(torch.uint8).view(5, 1000).to(DEVICE)
    expected = blocks[[0, 0, 2, 4, 4]]
    copy_blocks(blocks, [0, 4], blocks, [1, 3])
    assert torch.equal(blocks, expected)


if __name__ == "__main__":
    main()

"""The pool's memory as other processes get it: what the answer to AttachRequest says, and brings.

On CPU that is a descriptor, of the pool's file, for reading or for both. On a GPU it is a handle in
the answer itself, with which one can always write.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from prefixcache.rpc._pb import attach_pb2, cache_pb2
from prefixcache.storage.shared_memory import open_for_reading
from prefixcache.types import PoolAccess

if TYPE_CHECKING:
    from prefixcache.storage.pool_memory import PoolMemory


class SharedPool:
    """info: what the daemon says of itself. Lives no longer than the memory; `close` ends it."""

    def __init__(self, memory: PoolMemory, info: cache_pb2.GetServerInfoResponse) -> None:
        scales = memory.fixed_scales
        self.description = attach_pb2.AttachResponse(
            boot_id=info.boot_id,
            layout_fingerprint=info.layout_fingerprint,
            num_blocks=info.num_blocks,
            key_scales=scales.keys if scales is not None else (),
            value_scales=scales.values if scales is not None else (),
        )
        self._fds: dict[PoolAccess, int] = {}
        if memory.fd is not None:
            self._fds = {
                PoolAccess.READ: open_for_reading(memory.fd),
                PoolAccess.WRITE: os.dup(memory.fd),
            }
        else:
            from prefixcache.storage.cuda_memory import share_cuda_memory

            handle = asdict(share_cuda_memory(memory.spans))
            self.description.cuda.CopyFrom(attach_pb2.CudaMemory(**handle))

    @property
    def can_be_for_reading_only(self) -> bool:
        return bool(self._fds)

    def descriptors(self, access: PoolAccess) -> list[int]:
        """What goes with the description: one, or none."""
        return [self._fds[access]] if self._fds else []

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.popitem()[1])

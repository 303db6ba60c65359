"""Copy whole blocks: copy-on-write within a pool, or from one pool into another.

A block is one span of bytes (see `storage.layout`), so a copy needs to know neither layers nor
dtype. It lives here and not in `storage` because it has a kernel, like every operation here.

Threads: safe as long as no other call touches the destinations or writes the sources.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prefixcache.attention.device import uses_triton
from prefixcache.errors import InvalidArgumentError

TILE_BYTES = 2**14  # a program's share of a block: eight loads of 16 bytes for each of 128 threads


@torch.no_grad()
def copy_blocks(
    sources: torch.Tensor,
    source_ids: Sequence[int],
    destinations: torch.Tensor,
    destination_ids: Sequence[int],
) -> None:
    """Block `destination_ids[i]` becomes a copy of block `source_ids[i]`, for all pairs at once.

    sources, destinations: `[blocks, block_bytes] uint8`, contiguous, on one device; they may be
    the same pool. As pairs run in no order, no block may be written twice, or read and written.
    Copy-on-write keeps to that: its sources are referenced, its destinations were blank.

    Raises InvalidArgumentError, with nothing copied, on lists of different lengths, an id out of
    range or a block that must not be named again, and on unfit tensors.
    """
    _check(sources, source_ids, destinations, destination_ids)
    if len(source_ids) == 0 or sources.shape[1] == 0:
        return
    if uses_triton(sources):
        _launch(sources, source_ids, destinations, destination_ids)
    else:
        # On CPU not by torch, which wakes its threads for each block: 4x slower with two of them.
        read, written = (rows.numpy() if rows.is_cpu else rows for rows in (sources, destinations))
        for source, destination in zip(source_ids, destination_ids, strict=True):
            written[destination] = read[source]


def _launch(
    sources: torch.Tensor,
    source_ids: Sequence[int],
    destinations: torch.Tensor,
    destination_ids: Sequence[int],
) -> None:
    from prefixcache.attention.kernels.copy_blocks import copy_blocks_kernel

    if sources.shape[1] % 4 == 0 and not (sources.data_ptr() | destinations.data_ptr()) % 4:
        sources, destinations = sources.view(torch.int32), destinations.view(torch.int32)
    ids = torch.tensor([list(source_ids), list(destination_ids)], device=sources.device)
    tile_words = TILE_BYTES // sources.element_size()
    block_words = sources.shape[1]
    with torch.cuda.device_of(sources):
        copy_blocks_kernel[(len(source_ids), -(-block_words // tile_words))](
            sources, destinations, ids[0], ids[1], block_words, TILE_WORDS=tile_words
        )


def _check(
    sources: torch.Tensor,
    source_ids: Sequence[int],
    destinations: torch.Tensor,
    destination_ids: Sequence[int],
) -> None:
    for name, tensor in (("sources", sources), ("destinations", destinations)):
        if tensor.ndim != 2 or tensor.dtype != torch.uint8 or not tensor.is_contiguous():
            raise InvalidArgumentError(name, "must be [blocks, block_bytes] uint8, contiguous")
    if (sources.shape[1], sources.device) != (destinations.shape[1], destinations.device):
        raise InvalidArgumentError(
            "destinations",
            f"has blocks of {destinations.shape[1]} bytes on {destinations.device}, "
            f"the sources have {sources.shape[1]} on {sources.device}",
        )
    if len(source_ids) != len(destination_ids):
        raise InvalidArgumentError(
            "destination_ids", f"{len(destination_ids)} destinations for {len(source_ids)} sources"
        )
    _check_ids("source_ids", source_ids, len(sources))
    _check_ids("destination_ids", destination_ids, len(destinations))
    written = set(destination_ids)
    if len(written) < len(destination_ids):
        raise InvalidArgumentError("destination_ids", "names a block twice")
    if sources.data_ptr() == destinations.data_ptr() and not written.isdisjoint(source_ids):
        raise InvalidArgumentError(
            "destination_ids", f"block {min(written.intersection(source_ids))} is a source too"
        )


def _check_ids(field: str, block_ids: Sequence[int], num_blocks: int) -> None:
    for block_id in block_ids:
        if not 0 <= block_id < num_blocks:
            raise InvalidArgumentError(field, f"block {block_id}, and there are {num_blocks}")

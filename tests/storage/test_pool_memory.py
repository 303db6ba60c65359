import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from prefixcache.errors import InvalidArgumentError
from prefixcache.storage import pool_memory
from prefixcache.storage.layout import KVLayout
from prefixcache.storage.pool_memory import PoolMemory
from prefixcache.storage.shared_memory import SEALS
from tests.support.open_files import open_files

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
NUM_BLOCKS = 6
NAME = "prefixcache-kv"
"""Of a pool's file."""


@pytest.fixture
def pool() -> Iterator[PoolMemory]:
    memory = PoolMemory(LAYOUT, NUM_BLOCKS)
    yield memory
    memory.close()


def number_everything(pool: PoolMemory) -> None:
    """Give every element of the pool another value."""
    for layer in range(LAYOUT.num_layers):
        for part, view in enumerate((pool.layer(layer).keys, pool.layer(layer).values)):
            numbers = torch.arange(view.numel()).view(view.shape)
            view.copy_(numbers * 2 * LAYOUT.num_layers + 2 * layer + part)


def bytes_of(pool: PoolMemory) -> list[bytes]:
    return [pool.block_span(block).numpy().tobytes() for block in range(NUM_BLOCKS)]


def pool_mappings() -> set[int]:
    """Inodes of what is mapped of pools: other tests' may still be there, or go meanwhile."""
    maps = Path("/proc/self/maps").read_text(encoding="ascii")
    return {int(line.split()[4]) for line in maps.splitlines() if NAME in line}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_views_have_one_layers_keys_or_values_of_every_block(dtype: str) -> None:
    layout = KVLayout(3, 2, 8, 4, dtype)
    pool = PoolMemory(layout, NUM_BLOCKS)
    for view in (pool.layer(2).keys, pool.layer(0).values):
        assert view.shape == (NUM_BLOCKS, 2, 4, 8)
        assert view.dtype == pool.dtype == getattr(torch, dtype)
        assert view[0].is_contiguous()
        assert view.stride(0) == layout.block_bytes // layout.element_bytes
    pool.close()


def test_a_block_is_one_span_of_keys_then_values_layer_by_layer(pool: PoolMemory) -> None:
    number_everything(pool)
    for block in range(NUM_BLOCKS):
        expected = b"".join(
            view[block].numpy().tobytes()
            for layer in range(LAYOUT.num_layers)
            for view in (pool.layer(layer).keys, pool.layer(layer).values)
        )
        assert pool.block_span(block).numpy().tobytes() == expected
        assert pool.block_span(block).shape == (LAYOUT.block_bytes,)
        assert torch.equal(pool.spans[block], pool.block_span(block))


def test_the_pool_starts_page_aligned_and_zero(pool: PoolMemory) -> None:
    assert pool.block_span(0).data_ptr() % mmap.PAGESIZE == 0
    assert not any(any(span) for span in bytes_of(pool))


def test_all_pages_are_present_before_the_first_use(pool: PoolMemory) -> None:
    smaps = Path("/proc/self/smaps").read_text(encoding="ascii")
    ours = smaps.split(f"{pool.block_span(0).data_ptr():x}-")[1].splitlines()
    resident_kib = next(int(line.split()[1]) for line in ours if line.startswith("Rss:"))
    assert resident_kib * 1024 >= NUM_BLOCKS * LAYOUT.block_bytes


def test_another_mapping_of_the_file_sees_the_same_bytes(pool: PoolMemory) -> None:
    number_everything(pool)
    assert pool.fd is not None
    with mmap.mmap(pool.fd, NUM_BLOCKS * LAYOUT.block_bytes) as other:
        assert other[:] == b"".join(bytes_of(pool))
        other[LAYOUT.block_bytes] = 77
        assert pool.block_span(1)[0] == 77


def test_the_size_of_the_file_is_sealed(pool: PoolMemory) -> None:
    assert pool.fd is not None
    assert fcntl.fcntl(pool.fd, fcntl.F_GET_SEALS) == SEALS
    assert os.fstat(pool.fd).st_size == NUM_BLOCKS * LAYOUT.block_bytes


@pytest.mark.parametrize("layer", [-1, LAYOUT.num_layers])
def test_a_layer_out_of_range_is_refused(pool: PoolMemory, layer: int) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        pool.layer(layer)
    assert refusal.value.field == "layer"


@pytest.mark.parametrize("block_id", [-1, NUM_BLOCKS])
def test_a_block_out_of_range_is_refused(pool: PoolMemory, block_id: int) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        pool.block_span(block_id)
    assert refusal.value.field == "block_id"


def test_close_gives_back_the_memory_and_the_file() -> None:
    pool = PoolMemory(LAYOUT, NUM_BLOCKS)
    assert pool.fd is not None
    inode = os.fstat(pool.fd).st_ino
    assert inode in pool_mappings() & open_files(NAME)
    pool.close()
    pool.close()
    assert inode not in pool_mappings() | open_files(NAME)
    assert pool.fd is None
    with pytest.raises(InvalidArgumentError):
        pool.block_span(0)
    assert len(pool.layer(0).keys) == len(pool.spans) == 0


def test_a_view_outlives_the_pool() -> None:
    pool = PoolMemory(LAYOUT, NUM_BLOCKS)
    assert pool.fd is not None
    inode = os.fstat(pool.fd).st_ino
    view = pool.layer(1).keys
    view.fill_(3.0)
    pool.close()
    assert (view == 3.0).all()
    assert inode in pool_mappings()
    del view
    assert inode not in pool_mappings()


@pytest.mark.parametrize("num_blocks", [2**31 - 1, 2**30])
def test_more_than_the_available_memory_is_refused_before_any_is_taken(num_blocks: int) -> None:
    """The size is far beyond 32 and close to 64 bits; it is named in full."""
    layout = KVLayout(num_layers=80, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")
    files = open_files(NAME)
    with pytest.raises(InvalidArgumentError) as refusal:
        PoolMemory(layout, num_blocks)
    assert refusal.value.field == "num_blocks"
    assert refusal.value.fields["needed_bytes"] == num_blocks * 80 * 2 * 8 * 16 * 128 * 2
    assert open_files(NAME) <= files


@pytest.mark.parametrize("num_blocks", [0, -1, 2**31])
def test_a_number_of_blocks_that_tables_cannot_name_is_refused(num_blocks: int) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        PoolMemory(LAYOUT, num_blocks)
    assert refusal.value.field == "num_blocks"


def test_a_failing_mapping_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("cannot allocate memory")

    files = open_files(NAME)
    monkeypatch.setattr(pool_memory, "map_shared_memory", refuse)
    with pytest.raises(InvalidArgumentError, match="cannot allocate memory"):
        PoolMemory(LAYOUT, NUM_BLOCKS)
    assert open_files(NAME) <= files


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_a_device_that_is_not_there_is_refused(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidArgumentError) as refusal:
        PoolMemory(LAYOUT, NUM_BLOCKS, device)
    assert refusal.value.field == "device"

import pytest
import torch

from prefixcache.attention.copy_blocks import copy_blocks
from prefixcache.errors import InvalidArgumentError

NUM_BLOCKS = 6
SIZES = [4, 60, 1021, 2**14, 2**14 + 12]
"""Bytes of a block: around the words and the tiles of the kernel."""


def pool_of(block_bytes: int, num_blocks: int = NUM_BLOCKS, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks, block_bytes)
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("block_bytes", SIZES)
def test_copying_within_a_pool_changes_the_destinations_only(block_bytes: int) -> None:
    pool = pool_of(block_bytes)
    expected = pool[[4, 1, 2, 1, 4, 1]]
    copy_blocks(pool, [1, 4, 1], pool, [3, 0, 5])
    assert torch.equal(pool, expected)


def test_blocks_are_gathered_into_another_pool_and_scattered_back() -> None:
    pool, few = pool_of(256), pool_of(256, num_blocks=2, seed=1)
    before = pool.clone()
    copy_blocks(pool, [5, 0], few, [0, 1])
    assert torch.equal(few, before[[5, 0]])
    assert torch.equal(pool, before)
    copy_blocks(few, [0, 1], pool, [1, 0])
    assert torch.equal(pool, before[[0, 5, 2, 3, 4, 5]])


def test_a_block_of_one_pool_may_have_the_number_of_another_pools_source() -> None:
    pool, other = pool_of(16), pool_of(16, seed=1)
    copy_blocks(pool, [0, 1], other, [1, 0])
    assert torch.equal(other[:2], pool[[1, 0]])


def test_blocks_may_start_anywhere() -> None:
    whole = torch.zeros(NUM_BLOCKS * 64 + 1, dtype=torch.uint8)
    pool = whole[1:].view(NUM_BLOCKS, 64)
    pool.copy_(pool_of(64))
    expected = pool[[0, 0, 2, 3, 4, 5]]
    copy_blocks(pool, [0], pool, [1])
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("shape", [(NUM_BLOCKS, 64), (NUM_BLOCKS, 0), (0, 64)])
def test_no_pairs_and_no_bytes_are_no_work(shape: tuple[int, int]) -> None:
    pool = pool_of(shape[1], shape[0])
    before = pool.clone()
    copy_blocks(pool, [], pool, [])
    if shape == (NUM_BLOCKS, 0):
        copy_blocks(pool, [0], pool, [1])
    assert torch.equal(pool, before)


@pytest.mark.parametrize(
    ("source_ids", "destination_ids", "field"),
    [
        ([0, 1], [2], "destination_ids"),
        ([0, NUM_BLOCKS], [2, 3], "source_ids"),
        ([0, -1], [2, 3], "source_ids"),
        ([0, 1], [2, NUM_BLOCKS], "destination_ids"),
        ([0, 1], [2, -1], "destination_ids"),
        ([0, 1], [2, 2], "destination_ids"),
        ([0, 1], [1, 2], "destination_ids"),
        ([0], [0], "destination_ids"),
    ],
)
def test_refused_ids_change_nothing(
    source_ids: list[int], destination_ids: list[int], field: str
) -> None:
    pool = pool_of(64)
    before = pool.clone()
    with pytest.raises(InvalidArgumentError) as refusal:
        copy_blocks(pool, source_ids, pool, destination_ids)
    assert refusal.value.field == field
    assert torch.equal(pool, before)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sources": torch.zeros(64, dtype=torch.uint8)}, "sources"),
        ({"sources": torch.zeros(6, 64)}, "sources"),
        ({"sources": torch.zeros(6, 128, dtype=torch.uint8)[:, ::2]}, "sources"),
        ({"destinations": torch.zeros(6, 60, dtype=torch.uint8)}, "destinations"),
        ({"destinations": torch.zeros(6, 64, dtype=torch.uint8, device="meta")}, "destinations"),
    ],
)
def test_unfit_tensors_are_refused(change: dict[str, torch.Tensor], field: str) -> None:
    tensors = {"sources": pool_of(64), "destinations": pool_of(64)} | change
    with pytest.raises(InvalidArgumentError) as refusal:
        copy_blocks(tensors["sources"], [0], tensors["destinations"], [1])
    assert refusal.value.field == field

import numpy as np
import pytest

from prefixcache.attention.batch import make_batch
from prefixcache.errors import InvalidArgumentError


def table(*block_ids: int) -> np.ndarray:
    return np.array(block_ids, dtype=np.int32)


def test_slots_follow_each_sequences_own_table() -> None:
    batch = make_batch([table(7, 2), table(5)], [3, 0], [3, 2], [0, 0], block_size=4)
    assert batch.query_start.tolist() == [0, 3, 5]
    assert batch.context_lens.tolist() == [3, 0]
    assert batch.seq_lens.tolist() == [6, 2]
    assert batch.slot_mapping.tolist() == [7 * 4 + 3, 2 * 4, 2 * 4 + 1, 5 * 4, 5 * 4 + 1]
    assert batch.slot_mapping.dtype == np.int64
    assert batch.block_tables.dtype == np.int32


def test_tokens_below_the_first_writable_position_are_not_written() -> None:
    batch = make_batch([table(0, 1), table(2)], [3, 0], [3, 2], [5, 0], block_size=4)
    assert batch.slot_mapping.tolist() == [-1, -1, 5, 8, 9]


def test_entries_past_the_last_token_are_left_out_of_the_tables() -> None:
    batch = make_batch([table(3, 4, 9, 9), table(5, 9)], [0, 0], [8, 1], [0, 0], block_size=4)
    assert batch.block_tables.tolist() == [[3, 4], [5, -1]]


def test_a_sequence_without_new_tokens_keeps_its_place() -> None:
    batch = make_batch([table(0), table(1), table()], [1, 4, 0], [2, 0, 0], [0, 0, 0], 4)
    assert batch.query_start.tolist() == [0, 2, 2, 2]
    assert batch.seq_lens.tolist() == [3, 4, 0]
    assert batch.slot_mapping.tolist() == [1, 2]


def test_no_sequences_make_an_empty_batch() -> None:
    batch = make_batch([], [], [], [], block_size=16)
    assert batch.query_start.tolist() == [0]
    assert batch.slot_mapping.shape == (0,)
    assert batch.block_tables.shape == (0, 0)


def test_slots_of_the_highest_block_ids_do_not_wrap_round() -> None:
    highest = 2**31 - 1
    batch = make_batch([table(highest)], [0], [16], [0], block_size=16)
    assert batch.slot_mapping.tolist() == [highest * 16 + offset for offset in range(16)]


@pytest.mark.parametrize(
    ("field", "starts", "nums", "writable"),
    [
        ("block_tables", [4], [5], [0]),
        ("start_positions", [-1], [1], [0]),
        ("start_positions", [0, 0], [1], [0]),
        ("num_tokens", [0], [-1], [0]),
        ("num_tokens", [0], [], [0]),
        ("num_tokens", [0], [2**31], [0]),
        ("first_writable", [0], [1], [-1]),
        ("first_writable", [0], [1], []),
    ],
)
def test_a_refusal_names_the_argument(
    field: str, starts: list[int], nums: list[int], writable: list[int]
) -> None:
    with pytest.raises(InvalidArgumentError) as refusal:
        make_batch([table(0, 1)], starts, nums, writable, block_size=4)
    assert refusal.value.field == field


@pytest.mark.parametrize("block_size", [0, -3])
@pytest.mark.parametrize("num_sequences", [0, 1])
def test_a_block_has_a_token_at_least(num_sequences: int, block_size: int) -> None:
    columns = ([number] * num_sequences for number in (0, 1, 0))
    with pytest.raises(InvalidArgumentError, match="block_size: must be >= 1"):
        make_batch([table(1)] * num_sequences, *columns, block_size)

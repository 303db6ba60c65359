"""The contract of `copy_blocks` once more, for its kernel."""

from __future__ import annotations

from tests.attention.test_copy_blocks import (
    test_a_block_of_one_pool_may_have_the_number_of_another_pools_source,
    test_blocks_are_gathered_into_another_pool_and_scattered_back,
    test_blocks_may_start_anywhere,
    test_copying_within_a_pool_changes_the_destinations_only,
    test_no_pairs_and_no_bytes_are_no_work,
    test_refused_ids_change_nothing,
)
from tests.attention.test_large_pools import test_the_highest_blocks_are_copied_like_the_lowest

__all__ = [
    "test_a_block_of_one_pool_may_have_the_number_of_another_pools_source",
    "test_blocks_are_gathered_into_another_pool_and_scattered_back",
    "test_blocks_may_start_anywhere",
    "test_copying_within_a_pool_changes_the_destinations_only",
    "test_no_pairs_and_no_bytes_are_no_work",
    "test_refused_ids_change_nothing",
    "test_the_highest_blocks_are_copied_like_the_lowest",
]

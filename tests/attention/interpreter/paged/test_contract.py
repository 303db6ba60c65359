"""Contracts of the launchers that other tests spell out, once more through the kernels."""

from tests.attention.test_continuation import (
    test_decoding_a_few_drafted_tokens_equals_prefill,
    test_sequences_that_share_blocks_do_not_disturb_each_other,
    test_the_recomputed_token_of_a_full_hit_attends_but_is_not_written,
)
from tests.attention.test_large_pools import test_the_highest_blocks_work_like_the_lowest
from tests.attention.test_mla import (
    test_a_layer_through_write_and_attention_gives_what_the_model_defines,
)

__all__ = [
    "test_a_layer_through_write_and_attention_gives_what_the_model_defines",
    "test_decoding_a_few_drafted_tokens_equals_prefill",
    "test_sequences_that_share_blocks_do_not_disturb_each_other",
    "test_the_highest_blocks_work_like_the_lowest",
    "test_the_recomputed_token_of_a_full_hit_attends_but_is_not_written",
]

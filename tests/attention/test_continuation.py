"""A prompt in one call, in several, or partly from the cache: the same outputs and bytes."""

import numpy as np
import pytest
import torch

from prefixcache.attention.batch import make_batch
from prefixcache.attention.decode import decode
from prefixcache.attention.prefill import prefill
from prefixcache.attention.reference.attention import attention
from prefixcache.attention.write_kv import write_kv
from prefixcache.storage.kv_cache import KVCache
from prefixcache.types import AttentionOptions
from tests.attention.paged_cases import DTYPES
from tests.support.tolerances import assert_close, is_close

HKV, GROUP, D, B, OPTIONS = 2, 3, 32, 4, AttentionOptions()
TABLE = np.array([5, 2, 7, 0, 3, 6, 1, 4], dtype=np.int32)
NUM_TOKENS = 30


class Model:
    """One layer's q, k, v of a prompt, and a pool full of NaN to run it in."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.q = torch.randn(NUM_TOKENS, HKV * GROUP, D, generator=generator).to(dtype)
        self.k, self.v = torch.randn(2, NUM_TOKENS, HKV, D, generator=generator).to(dtype)
        self.pool = torch.full((16, 2, HKV, B, D), torch.nan, dtype=dtype)

    def compute(
        self,
        first: int,
        end: int,
        *,
        table: np.ndarray = TABLE,
        first_writable: int = 0,
        launch=prefill,
    ) -> torch.Tensor:
        batch = make_batch([table], [first], [end - first], [first_writable], B)
        cache = KVCache(*self.pool.unbind(1))
        write_kv(cache, self.k[first:end], self.v[first:end], batch.slot_mapping)
        return launch(self.q[first:end], cache, batch, OPTIONS)

    def exact(self) -> torch.Tensor:
        """From k and v themselves, no cache in between: one block as long as the prompt."""
        batch = make_batch([np.zeros(1, dtype=np.int32)], [0], [NUM_TOKENS], [0], NUM_TOKENS)
        k, v = self.k.transpose(0, 1)[None], self.v.transpose(0, 1)[None]
        return attention(self.q, KVCache(k, v), batch, OPTIONS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", [[], [4], [3, 4, 5], [1, 2, 29], list(range(1, 30))])
def test_a_prompt_in_chunks_equals_the_prompt_at_once(dtype: torch.dtype, cuts: list[int]) -> None:
    """No chunk attends to rows that are not written yet: they hold NaN."""
    model = Model(dtype)
    ends = [*cuts, NUM_TOKENS]
    parts = [model.compute(first, end) for first, end in zip([0, *cuts], ends, strict=True)]
    assert_close(torch.cat(parts), model.exact())


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_token_by_token_equals_prefill(dtype: torch.dtype) -> None:
    model = Model(dtype)
    parts = [model.compute(0, 13)]
    parts += [model.compute(t, t + 1, launch=decode) for t in range(13, NUM_TOKENS)]
    assert_close(torch.cat(parts), model.exact())


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_a_few_drafted_tokens_equals_prefill(dtype: torch.dtype) -> None:
    model = Model(dtype)
    parts = [model.compute(0, 20), model.compute(20, NUM_TOKENS, launch=decode)]
    assert_close(torch.cat(parts), model.exact())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_warm_run_stores_the_same_bytes_and_differs_by_rounding_only(dtype: torch.dtype) -> None:
    cold, warm = Model(dtype), Model(dtype)
    cold.compute(0, NUM_TOKENS)
    warm.compute(0, 16)
    out = warm.compute(16, NUM_TOKENS)
    assert torch.equal(warm.pool.view(torch.uint8), cold.pool.view(torch.uint8))
    assert_close(out, warm.exact()[16:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_hit_on_a_wrong_block_fails_the_bound_that_a_warm_run_passes(dtype: torch.dtype) -> None:
    model = Model(dtype)
    model.compute(0, NUM_TOKENS)
    wrong = TABLE.copy()
    wrong[[0, 1]] = TABLE[[1, 0]]
    wrong[2] = TABLE[1]
    out = model.compute(16, NUM_TOKENS, table=wrong)
    assert not is_close(out, model.exact()[16:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_recomputed_token_of_a_full_hit_attends_but_is_not_written(dtype: torch.dtype) -> None:
    """Its k and v are ignored, whatever they are, and the shared block keeps its bytes."""
    model = Model(dtype)
    cold = model.compute(0, 16)
    before = model.pool.view(torch.uint8).clone()
    model.k[15] = model.v[15] = torch.nan
    out = model.compute(15, 16, first_writable=16, launch=decode)
    assert torch.equal(model.pool.view(torch.uint8), before)
    assert_close(out, cold[15:].double())


def test_sequences_that_share_blocks_do_not_disturb_each_other() -> None:
    """A forked sequence: 8 shared tokens, then other tokens in blocks of its own."""
    model, twin = Model(torch.float32), Model(torch.float32)
    fork = TABLE.copy()
    fork[2:] = [8, 9, 10, 11, 12, 13]
    twin.pool = model.pool
    twin.k[:8], twin.v[:8] = model.k[:8], model.v[:8]
    twin.k[8:], twin.v[8:] = -model.k[8:], -model.v[8:]
    model.compute(0, 8)
    shared = model.pool[TABLE[:2].tolist()].clone()
    twin_out = twin.compute(8, NUM_TOKENS, table=fork)
    out = model.compute(8, NUM_TOKENS)
    assert_close(out, model.exact()[8:])
    assert_close(twin_out, twin.exact()[8:])
    assert torch.equal(model.pool[TABLE[:2].tolist()], shared)

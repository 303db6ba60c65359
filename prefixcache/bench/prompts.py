"""Made-up prompts: token ids as a model's tokenizer spreads them, as many unlike ones as wanted."""

from __future__ import annotations

import itertools

import numpy as np

from prefixcache.types import TokenIds

VOCABULARY = 150_000
"""Most ids take five bytes in CBOR, as those of today's tokenizers do."""


class Prompts:
    """Prompts of one length. Two of them differ in their first token, so in every block's hash."""

    def __init__(self, num_tokens: int, seed: int = 0) -> None:
        ids = np.random.default_rng(seed).integers(0, VOCABULARY, num_tokens)
        self._ids: TokenIds = ids.astype(np.uint32)
        self._serial = itertools.count()

    def numbered(self, number: int) -> TokenIds:
        """The prompt of that number, `[num_tokens] uint32`; equal each time."""
        token_ids = self._ids.copy()
        token_ids[0] = number
        return token_ids

    def next(self) -> TokenIds:
        """One that `next` has not given before."""
        return self.numbered(next(self._serial))

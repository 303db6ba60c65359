"""The rates that follow from counts of queries and hits."""

from __future__ import annotations


class HitRates:
    """Of a class that has the counts as fields."""

    __slots__ = ()
    query_blocks: int
    hit_blocks: int
    query_tokens: int
    hit_tokens: int

    @property
    def hit_rate_blocks(self) -> float:
        """hit blocks / query blocks, 0 to 1; 0 without queries."""
        return self.hit_blocks / self.query_blocks if self.query_blocks else 0.0

    @property
    def hit_rate_tokens(self) -> float:
        """hit tokens / query tokens, 0 to 1; 0 without queries."""
        return self.hit_tokens / self.query_tokens if self.query_tokens else 0.0

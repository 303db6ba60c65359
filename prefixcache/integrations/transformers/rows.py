"""What a pass computes: for each sequence, the tokens that come next."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from prefixcache.client import Sequence
from prefixcache.errors import FailedPreconditionError, InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens of a sequence that a pass computes: they go on from its computed ones.

    The sequence has them already, from its prompt or by Append.
    """

    sequence: Sequence
    token_ids: Items[int]


def start_of(row: Row) -> int:
    """Position of the row's first token.

    Raises InvalidArgumentError if its tokens are not the next ones to compute, and
    FailedPreconditionError if a pass over the sequence has failed between two layers.
    """
    sequence, count = row.sequence, len(row.token_ids)
    start = sequence.num_computed_tokens
    if sequence.num_started_tokens != start:
        raise FailedPreconditionError(
            f"an earlier pass over {sequence!r} has failed between two layers: free it, and "
            f"allocate its tokens again"
        )
    if not 1 <= count <= sequence.num_tokens - start:
        raise InvalidArgumentError(
            "rows.token_ids",
            f"are {count}, and {sequence!r} has {sequence.num_tokens - start} to compute",
        )
    return start

"""What a pass computes: for each sequence, the tokens that come next. And their commits."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from prefixcache.client import Client, Sequence
from prefixcache.client.row_errors import row_error
from prefixcache.errors import FailedPreconditionError, InvalidArgumentError
from prefixcache.types import AppendResult, CommitResult, ResultCode


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


def uncommitted(sequences: Iterable[Sequence]) -> dict[Sequence, int]:
    """What an attached view has computed and the daemon does not know of, where there is some."""
    return {
        sequence: sequence.num_uncommitted_tokens
        for sequence in sequences
        if sequence.num_uncommitted_tokens
    }


def commit_all(client: Client, sequences: Iterable[Sequence]) -> None:
    """Commit all that is uncommitted, in one call if there is any."""
    counts = uncommitted(sequences)
    if counts:
        check_rows(list(counts), client.commit(list(counts), list(counts.values())))


def check_rows(sequences: Items[Sequence], results: Items[AppendResult | CommitResult]) -> None:
    """Raises the error of the first row of a batch call that was refused."""
    for sequence, result in zip(sequences, results, strict=True):
        if result.code is not ResultCode.OK:
            raise row_error(result.code, sequence.sequence_id, sequence.num_tokens)

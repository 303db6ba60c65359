"""A transformers model whose K/V are blocks of a daemon: one pass over new tokens of sequences.

Owns the way from rows of tokens to the model and back. It keeps no K/V and no tokens: sequences
do. One thread at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from prefixcache.client import Client, Sequence
from prefixcache.errors import FailedPreconditionError, InvalidArgumentError
from prefixcache.integrations.transformers.attention import (
    ATTENTION_NAME,
    ForwardPass,
    register,
)
from prefixcache.integrations.transformers.fit import check_daemon, check_model


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens of a sequence that a pass computes: they go on from its computed ones.

    The sequence has them already, from its prompt or by Append.
    """

    sequence: Sequence
    token_ids: Items[int]


class CachedModel:
    """A causal language model of transformers on the blocks of a daemon.

    model: in eval mode. Its attention implementation becomes "prefixcache", and while it is, the
        model runs through this class only; `model.set_attn_implementation("sdpa")` gives it back.
    client: of a daemon with the model's layout (`serve_flags` says which flags give that).

    Raises InvalidArgumentError, with the reason, for a model that the kernels cannot compute
    exactly or that does not fit the daemon, and NoStorageError; the model is unchanged then.
    """

    def __init__(self, model: PreTrainedModel, client: Client) -> None:
        check_model(model)
        check_daemon(model, client.server_info())
        register()
        model.set_attn_implementation(ATTENTION_NAME)
        self._model = model
        self._client = client
        self._num_layers: int = model.config.get_text_config().num_hidden_layers

    @property
    def client(self) -> Client:
        return self._client

    @torch.inference_mode()
    def forward(self, rows: Items[Row]) -> torch.Tensor:
        """Compute the next tokens of many sequences in one pass; K/V go into their blocks.

        rows: at least one, any mix of chunks of prompts and of single tokens. They are run as one
        flat batch without padding. Returns the logits of each row's last token, [rows, vocabulary].

        Raises the errors of `Client.prefill`, InvalidArgumentError for a row that does not fit its
        sequence or an attention that there is no kernel for, and FailedPreconditionError for a
        sequence that an earlier pass has failed on: it is to be freed and allocated again.
        """
        starts = [_start(row) for row in rows]
        if not rows:
            raise InvalidArgumentError("rows", "must be at least one")
        if self._model.training:
            raise FailedPreconditionError("the model is in training mode; call its eval()")
        tokens = [token for row in rows for token in row.token_ids]
        positions = [
            position
            for row, start in zip(rows, starts, strict=True)
            for position in range(start, start + len(row.token_ids))
        ]
        num_tokens = [len(row.token_ids) for row in rows]
        last = [end - 1 for end in itertools.accumulate(num_tokens)]
        sequences = [row.sequence for row in rows]
        return self._run(tokens, positions, last, ForwardPass(self._client, sequences, num_tokens))

    def _run(
        self, tokens: list[int], positions: list[int], last: list[int], forward_pass: ForwardPass
    ) -> torch.Tensor:
        """last: of which tokens logits are wanted; the vocabulary is spared the others."""
        device = self._model.device
        input_ids = torch.tensor([tokens], device=device)
        logits: torch.Tensor = self._model(
            input_ids=input_ids,
            # Without one, jumps of the positions would be taken for borders between sequences, and
            # a mask made of them.
            attention_mask=torch.ones_like(input_ids),
            position_ids=torch.tensor([positions], device=device),
            use_cache=False,
            logits_to_keep=torch.tensor(last, device=device),
            forward_pass=forward_pass,
        ).logits[0]
        if forward_pass.num_layers_done != self._num_layers:
            raise FailedPreconditionError(
                f"{forward_pass.num_layers_done} of {self._num_layers} layers had their attention "
                f"computed here: was the model's attention implementation changed?"
            )
        return logits


def _start(row: Row) -> int:
    """Where the row goes on. Raises if its tokens are not the sequence's next ones to compute."""
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

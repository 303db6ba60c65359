"""A transformers model whose K/V are blocks of a daemon: passes over new tokens, and generating.

Owns the way from rows of tokens to the model and back. It keeps no K/V and no tokens: sequences
do. One thread at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from prefixcache.client import Client
from prefixcache.errors import FailedPreconditionError, InvalidArgumentError
from prefixcache.integrations.transformers.attention import (
    ATTENTION_NAME,
    ForwardPass,
    register,
)
from prefixcache.integrations.transformers.fit import check_daemon, check_model, check_view
from prefixcache.integrations.transformers.generation import (
    FinishReason,
    Generation,
    GenerationLimits,
    Output,
)
from prefixcache.integrations.transformers.identity import Watch
from prefixcache.integrations.transformers.rows import Row, commit_all, start_of
from prefixcache.integrations.transformers.sampling import GREEDY, Sampling, own_stop_token_ids
from prefixcache.types import ExtraKeys, Lora

if TYPE_CHECKING:
    from prefixcache.attached.pool_view import PoolView


@dataclass(frozen=True, slots=True)
class Completion:
    """One result of `CachedModel.generate`."""

    token_ids: tuple[int, ...]
    """What was generated, the stop token included."""
    finish_reason: FinishReason
    """"stop" after a stop token, else "length"."""
    num_cached_tokens: int
    """Tokens of the prompt that were cached when it came."""


class CachedModel:
    """A causal language model of transformers on the blocks of a daemon.

    model: in eval mode. Its attention implementation becomes "prefixcache", and while it is, the
        model runs through this class only; `model.set_attn_implementation("sdpa")` gives it back.
    client: of a daemon with the model's layout and weights (`serve_flags` says which flags give
        that).
    view: the daemon's pool attached by the client (`prefixcache.attach`), on the model's device:
        K/V are written and attended over in this process. Without one the daemon does so, and q, k,
        v and the output travel.
    max_pass_tokens: of one pass of `generate`; longer prompts are computed in chunks.
    wait_room_s: how long `generate` waits when other clients hold all the room.
    revision: the `--model-revision` of a daemon whose operator has a name of its own for these
        weights; "" for one without. Left out, it must be the model's `weights_revision`, which
        tells models of one shape apart by their weights and config.

    Adapters of PEFT have blocks of their own: `lora`.

    Raises InvalidArgumentError, with the reason, for a model that the kernels cannot compute
    exactly or that does not fit the daemon, and NoStorageError; the model is unchanged then.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        client: Client,
        *,
        view: PoolView | None = None,
        max_pass_tokens: int = 2048,
        wait_room_s: float = 60.0,
        revision: str | None = None,
    ) -> None:
        if max_pass_tokens < 1:
            raise InvalidArgumentError("max_pass_tokens", "must be at least 1")
        check_model(model)
        info = client.server_info()
        check_daemon(model, info, revision)
        if view is not None:
            check_view(model, info, view)
        watch = Watch(model)
        register()
        model.set_attn_implementation(ATTENTION_NAME)
        if model.config.get_text_config()._attn_implementation != ATTENTION_NAME:
            raise InvalidArgumentError(
                "model", f"{type(model).__name__}: attention that goes past AttentionInterface"
            )
        self._model = model
        self._watch = watch
        self._client = client
        self._view = view
        self._num_layers: int = model.config.get_text_config().num_hidden_layers
        self._max_fork_children = info.max_fork_children
        self._max_pass_tokens = max_pass_tokens
        self._wait_room_s = wait_room_s

    @property
    def lora(self) -> Lora | None:
        """The extra key of sequences that the model computes with the adapters that are active now:
        their names and a digest of their weights. None if none is.
        """
        self._watch.look_for_adapters()
        return self._watch.lora

    @torch.inference_mode()
    def forward(
        self, rows: Items[Row], *, commit: bool = True, lora: Lora | None = None
    ) -> torch.Tensor:
        """Compute the next tokens of many sequences in one pass; K/V go into their blocks.

        rows: at least one, any mix of chunks of prompts and of single tokens. They are run as one
        flat batch without padding. Returns the logits of each row's last token, [rows, vocabulary].
        commit: with a view, commit them in a call of its own. An engine whose next step commits
            them (`Step.commit` of `Sequence.num_uncommitted_tokens`) spares it. Without a view
            the daemon commits by itself.
        lora: the one in the extra keys that the sequences were allocated with. `CachedModel.lora`
            must still be the active one; for one of another name the caller answers.

        Raises the errors of `Client.prefill` and `Client.commit`, InvalidArgumentError for a row
        that does not fit its sequence or an attention that there is no kernel for, and
        FailedPreconditionError for a sequence that an earlier pass has failed on, which is to be
        freed and allocated again, or a model whose weights or active adapters are others now.
        """
        starts = [start_of(row) for row in rows]
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
        if len(tokens) > len(rows):  # a prompt, whose pass is long beside this
            self._watch.look_for_adapters()
        self._watch.check(lora)
        last = [end - 1 for end in itertools.accumulate(num_tokens)]
        sequences = [row.sequence for row in rows]
        backend = self._client if self._view is None else self._view
        logits = self._run(tokens, positions, last, ForwardPass(backend, sequences, num_tokens))
        if commit:
            commit_all(self._client, sequences)
        return logits

    def generate(
        self,
        prompts: Items[Items[int]],
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        *,
        num_return_sequences: int = 1,
        stop_token_ids: Items[int] | None = None,
        lora: Lora | None = None,
        cache_salts: Items[str] | None = None,
    ) -> list[Completion]:
        """`stream`, and wait for all of it: the completions of each prompt, one after the other."""
        generation, outputs = self._generation(
            prompts,
            max_new_tokens,
            sampling,
            num_return_sequences,
            stop_token_ids,
            lora,
            cache_salts,
        )
        for _ in generation.run():
            pass
        return [_completion(output) for output in outputs]

    def stream(
        self,
        prompts: Items[Items[int]],
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        *,
        num_return_sequences: int = 1,
        stop_token_ids: Items[int] | None = None,
        lora: Lora | None = None,
        cache_salts: Items[str] | None = None,
    ) -> Iterator[tuple[int, int]]:
        """Generate for many prompts at once: (index, token id) of each token, as it comes.

        num_return_sequences: outputs of each prompt, which is computed once. Output j of prompt i
            has the index `i * num_return_sequences + j`.
        stop_token_ids: any of them ends an output, and is its last token. Left out, they are those
            of the model's generation config; empty for none.
        lora: the name of what is added to the weights, where the model does that in a way of its
            own. Left out, it is `CachedModel.lora`. Blocks are shared by those of the same one.
        cache_salts: one a prompt, as of tenants that must not find each other's; "" for none.

        What is cached of a prompt is not computed. If there is no room for all, prompts wait, and
        the youngest sequence is freed and computed again later, with its output unchanged. Ending
        the iteration early frees all sequences.

        Raises InvalidArgumentError; ExceedsPoolError, then or in between, for a sequence that can
        never fit the pool; NoRoomError when others have held the room for `wait_room_s`; and the
        errors of `forward`, SessionLostError among them. Everything is freed then.
        """
        generation, _ = self._generation(
            prompts,
            max_new_tokens,
            sampling,
            num_return_sequences,
            stop_token_ids,
            lora,
            cache_salts,
        )
        return generation.run()

    def _generation(
        self,
        prompts: Items[Items[int]],
        max_new_tokens: int,
        sampling: Sampling,
        num_return_sequences: int,
        stop_token_ids: Items[int] | None,
        lora: Lora | None,
        cache_salts: Items[str] | None,
    ) -> tuple[Generation, list[Output]]:
        for name, value in (
            ("max_new_tokens", max_new_tokens),
            ("num_return_sequences", num_return_sequences),
        ):
            if value < 1:
                raise InvalidArgumentError(name, f"is {value}, must be at least 1")
        if not all(len(prompt) for prompt in prompts):
            raise InvalidArgumentError("prompts", "must have at least one token each")
        if cache_salts is not None and len(cache_salts) != len(prompts):
            raise InvalidArgumentError(
                "cache_salts", f"are {len(cache_salts)}, must be one for each prompt"
            )
        if lora is None:
            lora = self.lora
        if stop_token_ids is None:
            stop_token_ids = own_stop_token_ids(self._model)
        generation = Generation(
            self._client,
            lambda rows: self.forward(rows, commit=False, lora=lora),
            sampling,
            GenerationLimits(
                max_new_tokens=max_new_tokens,
                max_pass_tokens=self._max_pass_tokens,
                wait_room_s=self._wait_room_s,
                stop_token_ids=frozenset(stop_token_ids),
            ),
            max_fork_children=self._max_fork_children,
        )
        outputs = [
            Output(index, sampling.generator(index, self._model.device))
            for index in range(len(prompts) * num_return_sequences)
        ]
        for number, prompt in enumerate(prompts):
            first = number * num_return_sequences
            salt = "" if cache_salts is None else cache_salts[number]
            generation.add(
                prompt,
                outputs[first : first + num_return_sequences],
                ExtraKeys(lora, cache_salt=salt),
            )
        return generation, outputs

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


def _completion(output: Output) -> Completion:
    assert output.finish_reason is not None, "the generation has ended"
    return Completion(tuple(output.token_ids), output.finish_reason, output.num_cached_tokens)

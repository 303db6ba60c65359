"""The model and its tokenizer, as the engine needs them: transformers on the daemon's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jinja2 import TemplateError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from examples.engine.scheduler import Chunk
from prefixcache import Client, attach
from prefixcache.attached.pool_view import PoolView
from prefixcache.integrations.transformers import CachedModel, Row


class TransformersRunner:
    """A `Runner`. attached: K/V are written and attended over here, in the daemon's pool mapped;
    else the daemon does so, and tensors travel. revision: as `CachedModel` has it.
    """

    def __init__(
        self, model: PreTrainedModel, client: Client, *, attached: bool, revision: str | None = None
    ) -> None:
        self._plain_model = model
        self._client = client
        self._revision = revision
        self._view = attach(client) if attached else None
        self._model = self._cached_model()

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        if self._view is not None and not self._view.is_valid:
            self._attach_again(self._view)
        return self._model.forward([Row(chunk.sequence, chunk.token_ids) for chunk in chunks])

    def _attach_again(self, view: PoolView) -> None:
        """The view was of a session that is lost."""
        view.close()
        self._view = attach(self._client)
        self._model = self._cached_model()

    def _cached_model(self) -> CachedModel:
        return CachedModel(
            self._plain_model, self._client, view=self._view, revision=self._revision
        )

    def close(self) -> None:
        if self._view is not None:
            self._view.close()


@dataclass(frozen=True, slots=True)
class TransformersTokenizer:
    """A `Tokenizer`. Special tokens have no text."""

    tokenizer: PreTrainedTokenizerBase

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        try:
            tokens = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        except TemplateError as error:
            raise ValueError(str(error)) from error
        return list(tokens)


def load(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """name: a folder, or a model of the hub."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    return model.eval(), AutoTokenizer.from_pretrained(name)

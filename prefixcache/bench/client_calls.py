"""The same calls as `calls`, each through the Python client, building and reading included."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np

from prefixcache.bench.calls import BATCH, SHORT_PROMPT, Kind
from prefixcache.bench.prompts import Prompts
from prefixcache.client import Client, Sequence
from prefixcache.types import TokenIds

_ONE_TOKEN = np.array([7], dtype=np.uint32)


def make_client_kinds(client: Client, num_tokens: int, ended: ExitStack) -> dict[str, Kind]:
    """By the names that `calls.make_kinds` uses. The long prompt is that one's."""
    prompt = Prompts(num_tokens).next()
    return {
        "Lookup": Lookups(client, prompt),
        "Allocate": Allocates(client, prompt),
        "Append, 1 row": Appends(client, 1, ended),
        f"Append, {BATCH} rows": Appends(client, BATCH, ended),
        "Free": Frees(client),
    }


class Lookups:
    """The same prompt each time, cached whole if the daemon lets clients commit."""

    def __init__(self, client: Client, token_ids: TokenIds) -> None:
        self._call = partial(client.lookup, token_ids)

    def make(self, count: int) -> list[Callable[[], object]]:
        return [self._call] * count

    def clean_up(self) -> None:
        pass


class Allocates:
    """The same prompt each time."""

    def __init__(self, client: Client, token_ids: TokenIds) -> None:
        self._client, self._token_ids = client, token_ids
        self._made: list[Sequence] = []

    def make(self, count: int) -> list[Callable[[], object]]:
        return [self._allocate] * count

    def _allocate(self) -> None:
        self._made.append(self._client.sequence(self._token_ids))

    def clean_up(self) -> None:
        self._client.free(self._made)
        self._made = []


class Appends:
    """One token to each of `num_rows` sequences, which live on until `ended` ends."""

    def __init__(self, client: Client, num_rows: int, ended: ExitStack) -> None:
        self._client = client
        prompts = Prompts(SHORT_PROMPT)
        self._sequences = [client.sequence(prompts.next()) for _ in range(num_rows)]
        self._tokens = [_ONE_TOKEN] * num_rows
        ended.callback(client.free, self._sequences)

    def make(self, count: int) -> list[Callable[[], object]]:
        return [partial(self._client.append, self._sequences, self._tokens)] * count

    def clean_up(self) -> None:
        pass


class Frees:
    """One short sequence a call."""

    def __init__(self, client: Client) -> None:
        self._client, self._prompts = client, Prompts(SHORT_PROMPT)

    def make(self, count: int) -> list[Callable[[], object]]:
        made = [self._client.sequence(self._prompts.next()) for _ in range(count)]
        return [sequence.free for sequence in made]

    def clean_up(self) -> None:
        pass

"""Extra keys that prompts had lately, so that it can be asked under which of them one is cached.

The pool knows its blocks by their hashes, from which no key can be read. But a prompt's block can
be hashed once more with a key that another prompt had, and looked for: that is exact, and costs a
hash for each key that is tried. So a few hundred keys are remembered, those of each namespace by
themselves: the last to be used, whether anything was cached under them or not.

Guarded by the core's lock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias, TypeVar

from prefixcache.core.extra_keys import NamespacedKeys
from prefixcache.types import ExtraKeys, Lora, MultimodalItem, PromptEmbeds

MAX_RECENT = 128
"""Of a kind, in a namespace."""
MAX_DIGESTS = 256
"""Embeddings of more blocks are not remembered."""

_OfPrompt: TypeAlias = tuple[Lora | None, str]
"""What all of a prompt has: adapter and cache salt."""
_Span = TypeVar("_Span", bound=MultimodalItem | PromptEmbeds)
_Value = TypeVar("_Value")


class _Recent:
    """The keys of one namespace. Each dict is a set in the order of last use."""

    def __init__(self) -> None:
        self.of_prompts: dict[_OfPrompt, None] = {}
        self.items: dict[MultimodalItem, None] = {}
        self.embeds: dict[PromptEmbeds, None] = {}


class RecentKeys:
    """A namespace has an entry once one of its prompts had a key; there are few namespaces."""

    def __init__(self) -> None:
        self._by_namespace: dict[str, _Recent] = {}

    def note(self, extra_keys: ExtraKeys) -> None:
        """A prompt has these."""
        of_prompt = (extra_keys.lora, extra_keys.cache_salt)
        spans = extra_keys.multimodal_items or extra_keys.prompt_embeds
        if of_prompt == (None, "") and not spans:
            return
        recent = self._by_namespace.setdefault(_namespace(extra_keys), _Recent())
        _use(recent.of_prompts, of_prompt)
        for item in extra_keys.multimodal_items[-MAX_RECENT:]:
            _use(recent.items, item)
        for embeds in extra_keys.prompt_embeds[-MAX_RECENT:]:
            if len(embeds.digests) <= MAX_DIGESTS:
                _use(recent.embeds, embeds)

    def alternatives(self, extra_keys: ExtraKeys, start: int, end: int) -> Iterator[ExtraKeys]:
        """The keys of a prompt with others in place of those that its tokens `[start, end)` have.

        One thing is changed at a time: adapter and salt, items, or embeddings. What is left out
        altogether is tried first. Adapter and salt are in the hash of the first block already, so
        blocks that follow a hit have them in common with it.
        """
        recent = self._by_namespace.get(_namespace(extra_keys), _Recent())
        of_prompts: list[_OfPrompt] = [(None, ""), *reversed(recent.of_prompts)]
        for lora, cache_salt in of_prompts if start == 0 else ():
            if (lora, cache_salt) != (extra_keys.lora, extra_keys.cache_salt):
                yield replace(extra_keys, lora=lora, cache_salt=cache_salt)
        for items in _other_spans(extra_keys.multimodal_items, recent.items, start, end):
            yield replace(extra_keys, multimodal_items=items)
        for embeds in _other_spans(extra_keys.prompt_embeds, recent.embeds, start, end):
            yield replace(extra_keys, prompt_embeds=embeds)


def _namespace(extra_keys: ExtraKeys) -> str:
    return extra_keys.namespace if isinstance(extra_keys, NamespacedKeys) else ""


def _use(recent: dict[_Value, None], value: _Value) -> None:
    recent.pop(value, None)
    recent[value] = None
    if len(recent) > MAX_RECENT:
        del recent[next(iter(recent))]


def _other_spans(
    spans: tuple[_Span, ...], recent: dict[_Span, None], start: int, end: int
) -> Iterator[tuple[_Span, ...]]:
    def overlaps(span: _Span) -> bool:
        return span.offset < end and start < span.offset + span.num_tokens

    rest = tuple(span for span in spans if not overlaps(span))
    if len(rest) < len(spans):
        yield rest
    for span in reversed(recent):
        if overlaps(span) and span not in spans:
            yield (*rest, span)

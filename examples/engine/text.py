"""The text of tokens as they come, up to a stop text.

A character may take several tokens, and a stop text may come in parts: what may still change is
held back. One answer, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """decode: token ids to text. stop: texts that end it and are no part of it."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self.is_stopped = False
        self._decode = decode
        self._stop = stop
        # How a token reads hangs on the ones before it, so the last of those are decoded again.
        self._context: list[int] = []
        self._unread: list[int] = []
        self._held = ""

    def push(self, token: int) -> str:
        """Returns the text that is certain now. Nothing may come after a stop text."""
        self._unread.append(token)
        before = self._decode(self._context)
        text = self._decode(self._context + self._unread)
        if text.endswith(_UNFINISHED):
            return ""
        self._context, self._unread = self._unread, []
        return self._release(text[len(before) :])

    def finish(self) -> str:
        """The text that was held back, as nothing comes after it."""
        before = self._decode(self._context)
        rest = self._held + self._decode(self._context + self._unread)[len(before) :]
        self._held, self._unread = "", []
        return "" if self.is_stopped else rest

    def _release(self, text: str) -> str:
        text = self._held + text
        ends = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if ends:
            self.is_stopped, self._held = True, ""
            return text[: min(ends)]
        num_held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the text's end may be the beginning of a stop text."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0

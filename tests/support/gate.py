"""Holds a function of the daemon at its start, so that a test sees what happens meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.waiting import WAIT_S


class Gate:
    """Each `wait` is for one call to come to the gate; all go on once `release` is called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._entered = threading.Semaphore(0)
        self._released = threading.Event()
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._entered.release()
        assert self._released.wait(WAIT_S), "nobody released the gate"
        return self._function(*args, **kwargs)

    def wait(self) -> None:
        assert self._entered.acquire(timeout=WAIT_S), "no call came to the gate"

    @property
    def has_call(self) -> bool:
        """Whether a call has come that nobody has waited for."""
        has_one = self._entered.acquire(blocking=False)
        if has_one:
            self._entered.release()
        return has_one

    def release(self) -> None:
        self._released.set()


@contextmanager
def held(owner: Any, name: str) -> Iterator[Gate]:
    """Calls of `owner.name` stop at a gate; when the block ends they go on."""
    gate = Gate(getattr(owner, name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, gate)
        try:
            yield gate
        finally:
            gate.release()

"""An engine that stands still before a step, so that a test sees what happens meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from examples.engine.loop import Engine
from tests.support.waiting import until


@contextmanager
def held_after(engine: Engine, num_steps: int, may_go_on: Callable[[], object]) -> Iterator[None]:
    """It makes so many more steps, and further ones only while `may_go_on` holds."""
    step, last = engine.step, engine.counters.steps + num_steps

    def held_step() -> bool:
        if engine.counters.steps >= last:
            until(may_go_on)
        return step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", held_step)
        yield

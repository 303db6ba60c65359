"""An engine's step through the Python client: its four calls one by one, or as one Step.

A batch of sequences decodes. In each step the prompt of the step before is freed, what was computed
is committed, each sequence of the batch appends a token, and another prompt, which is cached,
begins.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from prefixcache.bench.calls import BATCH, SHORT_PROMPT
from prefixcache.bench.measure import Laps, Progress, Rounds, run_rounds
from prefixcache.bench.prompts import Prompts
from prefixcache.bench.report import Ratio, Row
from prefixcache.client import Client, Sequence
from prefixcache.client.sync_steps import StepStream

SECTION = f"An engine's step, {BATCH} sequences decoding"
_CALLS, _STEP = "its four calls", "one Step"
_STEPS_A_ROUND = 50
_ONES = [1] * BATCH
_TOKENS = [np.array([7], dtype=np.uint32)] * BATCH


def measure_engine_step(
    client: Client, num_tokens: int, rounds: Rounds, progress: Progress
) -> tuple[Row, ...]:
    """client: of a daemon that lets clients commit. num_tokens: of the prompt that begins."""
    laps: Laps[str] = Laps()
    with client.steps() as stream:
        by_call, by_step = Engine(client, num_tokens), Engine(client, num_tokens)
        ways: dict[str, Callable[[], None]] = {
            _CALLS: by_call.make_calls,
            _STEP: partial(by_step.make_step, stream),
        }
        run_rounds(
            [partial(_repeat, laps, name, way) for name, way in ways.items()],
            rounds,
            warmed_up=laps.clear,
            on_round=partial(progress, "steps of an engine"),
        )
        for engine in (by_call, by_step):
            engine.close()
    calls = laps.summary(_CALLS).median
    return (
        Row(section=SECTION, name=_CALLS, summary=laps.summary(_CALLS)),
        Row(
            section=SECTION,
            name=_STEP,
            summary=(step := laps.summary(_STEP)),
            ratios=(Ratio(_CALLS, step.median / calls),),
        ),
    )


def _repeat(laps: Laps[str], name: str, way: Callable[[], None]) -> None:
    for _ in range(_STEPS_A_ROUND):
        laps.time(name, way)


class Engine:
    """A batch that decodes, and a prompt that ends with the step after its own."""

    def __init__(self, client: Client, num_tokens: int) -> None:
        self._client, self._prompt = client, Prompts(num_tokens).next()
        shorts = Prompts(SHORT_PROMPT)
        self._running = [client.sequence(shorts.next()) for _ in range(BATCH)]
        computed = [one.num_tokens - one.num_cached_tokens for one in self._running]
        client.commit(self._running, computed)
        client.append(self._running, _TOKENS)
        self._guest: Sequence = client.sequence(self._prompt)

    def make_calls(self) -> None:
        client = self._client
        client.free([self._guest])
        client.commit(self._running, _ONES)
        client.append(self._running, _TOKENS)
        self._guest = client.sequence(self._prompt)

    def make_step(self, stream: StepStream) -> None:
        step = stream.new_step()
        step.free([self._guest])
        step.commit(self._running, _ONES)
        rows = step.append(self._running, _TOKENS)
        guest = step.sequence(self._prompt)
        stream.run(step)
        rows.result()
        self._guest = guest.result()

    def close(self) -> None:
        self._client.free([*self._running, self._guest])

"""Append of a token a sequence through the Python client: as a call, and as a Step, of which one
or several are on their way.

Steps that are on their way at the same time have sequences of their own, as the API asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np

from prefixcache.bench.calls import BATCH, SHORT_PROMPT
from prefixcache.bench.measure import Laps, Progress, Rounds, run_rounds
from prefixcache.bench.prompts import Prompts
from prefixcache.bench.report import Ratio, Row
from prefixcache.client import Client, Sequence
from prefixcache.client.sync_steps import StepStream

SECTION = "Append by Step"
_DEPTHS = (1, 2, 4)
_APPENDS_A_TURN = 48
_ONE_TOKEN = np.array([7], dtype=np.uint32)


@dataclass(frozen=True, slots=True)
class Way:
    """num_rows: of an Append. depth: steps on their way; None for the call Append."""

    num_rows: int
    depth: int | None = None

    @property
    def name(self) -> str:
        how = "call" if self.depth is None else f"Step, {self.depth} on the way"
        return f"Append, {self.num_rows} row{'s' * (self.num_rows > 1)}: {how}"


_WAYS = tuple(Way(num_rows, depth) for num_rows in (1, BATCH) for depth in (None, *_DEPTHS))


def measure_step_appends(client: Client, rounds: Rounds, progress: Progress) -> tuple[Row, ...]:
    """Seconds an Append: a sample is the mean of a turn."""
    laps: Laps[Way] = Laps()
    with client.steps() as stream:
        run_rounds(
            [partial(_turn, laps, client, stream, way) for way in _WAYS],
            rounds,
            warmed_up=laps.clear,
            on_round=partial(progress, "appends by step"),
        )
    return tuple(_row(laps, way) for way in _WAYS)


def _turn(laps: Laps[Way], client: Client, stream: StepStream, way: Way) -> None:
    prompts = Prompts(SHORT_PROMPT)
    batches = [
        [client.sequence(prompts.next()) for _ in range(way.num_rows)]
        for _ in range(way.depth or 1)
    ]
    append = partial(_call, client) if way.depth is None else partial(_send, stream)
    laps.time_each(way, _APPENDS_A_TURN, partial(append, batches))
    for batch in batches:
        client.free(batch)


def _call(client: Client, batches: Rows[list[Sequence]]) -> None:
    (batch,) = batches
    tokens = [_ONE_TOKEN] * len(batch)
    for _ in range(_APPENDS_A_TURN):
        client.append(batch, tokens)


def _send(stream: StepStream, batches: Rows[list[Sequence]]) -> None:
    """As many steps are on their way as there are batches."""
    tokens = [_ONE_TOKEN] * len(batches[0])
    on_the_way: deque[Any] = deque()
    for batch in islice(cycle(batches), _APPENDS_A_TURN):
        if len(on_the_way) == len(batches):
            stream.wait(on_the_way.popleft())
        step = stream.new_step()
        step.append(batch, tokens)
        stream.send(step)
        on_the_way.append(step)
    for step in on_the_way:
        stream.wait(step)


def _row(laps: Laps[Way], way: Way) -> Row:
    summary, call = laps.summary(way), laps.summary(Way(way.num_rows))
    return Row(
        section=SECTION,
        name=way.name,
        summary=summary,
        ratios=() if way.depth is None else (Ratio("the call", summary.median / call.median),),
    )

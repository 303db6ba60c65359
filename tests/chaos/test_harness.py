"""The load, the fuzzer and the counts find what they are there for."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import grpc
import pytest

from prefixcache.core import growth
from prefixcache.server import checks
from tests.chaos import fuzz, soak, writers
from tests.chaos.broken_daemon import SOAKED, VARIABLE, no_quarantine
from tests.chaos.daemon_process import Usage
from tests.chaos.flatness import MAX_GROWTH_BYTES, judge
from tests.chaos.link import LONG_S, Link
from tests.chaos.report import Figures, table
from tests.chaos.tally import Tally

SEED = 5


@pytest.mark.chaos
@pytest.mark.parametrize("defect", [defect.__name__ for defect in SOAKED])
def test_a_soak_finds_a_defect_of_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: str
) -> None:
    monkeypatch.setenv(VARIABLE, defect)
    program = "tests.chaos.broken_daemon"
    figures = soak.soak(tmp_path, "none", random.Random(SEED), 2.0, program=program, free_s=2.0)
    assert not figures.is_clean
    if defect == "wrong_hits":
        assert figures.wrong > 0
    else:
        assert figures.leaked > 0


@pytest.mark.chaos
def test_writers_find_blocks_that_are_given_away_too_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, no_quarantine.__name__)
    program, rng = "tests.chaos.broken_daemon", random.Random(SEED)
    figures = writers.run(tmp_path, rng, 15, stall_every=1, program=program, quarantine_s=2.0)
    assert figures.wrong > 0


def fuzzed(tmp_path: Path) -> Figures:
    return fuzz.run(tmp_path, random.Random(SEED), 900)


@pytest.mark.chaos
def test_the_fuzzer_finds_a_handler_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def request_id(value: str, field: str = "request_id") -> str:
        assert value.isascii()
        assert len(value) < 15
        return value

    monkeypatch.setattr(checks, "request_id", request_id)
    figures = fuzzed(tmp_path)
    assert any("INTERNAL" in problem for problem in figures.problems)


@pytest.mark.chaos
def test_the_fuzzer_finds_a_refused_call_that_changes_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_position = growth.check_position

    def check_too_late(sequence: Any, given: int, expected: int) -> None:
        sequence.num_lookahead_tokens = 0
        check_position(sequence, given, expected)

    monkeypatch.setattr(growth, "check_position", check_too_late)
    figures = fuzzed(tmp_path)
    assert figures.wrong > 0
    assert any("has changed sequences" in problem for problem in figures.problems)


def test_memory_that_grows_is_reported() -> None:
    step = MAX_GROWTH_BYTES // 10
    grown, flat = Figures("soak"), Figures("soak")
    judge(grown, "daemon", [Usage(2**28 + i * step, 20, 10) for i in range(100)])
    assert ["memory grew" in problem for problem in grown.problems] == [True]
    judge(flat, "daemon", [Usage(2**28 + i % 3 * step, 20, 10) for i in range(100)])
    assert flat.is_clean


def test_descriptors_that_stay_open_are_reported() -> None:
    figures = Figures("soak")
    judge(figures, "daemon", [*[Usage(2**28, 20, 10)] * 100, Usage(2**28, 20, 20)])
    assert ["descriptors" in problem for problem in figures.problems] == [True]


class Silent(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED


class SilentChannel:
    """Of a daemon that answers nothing."""

    def unary_unary(self, path: str, **serializers: Any) -> Any:
        def call(request: Any, **options: Any) -> Any:
            raise Silent

        return call


def test_a_call_without_an_answer_is_counted_as_lost(tmp_path: Path) -> None:
    tally = Tally(tmp_path / "tally", 1, create=True)
    channel: Any = SilentChannel()
    link = Link(channel, tally.of_row(0), random.Random(SEED))
    with pytest.raises(Silent):
        link.unary_unary("/service/Lookup")(b"", timeout=LONG_S)
    assert (tally.total("started"), tally.total("late")) == (1, 1)


def test_a_call_that_has_not_ended_is_counted(tmp_path: Path) -> None:
    row = Tally(tmp_path / "tally", 1, create=True).of_row(0)
    for ending in ("started", "started", "answered"):
        row.count("Append", ending)
    assert row.num_unanswered() == 1


@pytest.mark.parametrize("name", ["lost", "leaked", "wrong"])
def test_one_of_a_kind_is_enough_to_fail(name: str) -> None:
    figures = Figures("a part")
    assert figures.is_clean
    setattr(figures, name, 1)
    assert not figures.is_clean
    assert table([figures]).splitlines()[-1].split()[-4:].count("1") == 1

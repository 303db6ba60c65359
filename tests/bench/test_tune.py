"""`--tune`: every rule of every table is reached, and the kernel runs with the tiles tried.

The kernel runs in the interpreter here, where times mean nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from prefixcache.attention.selection import LATENT_TABLES, TABLES, Rule, Tiles, find_rule
from prefixcache.bench.measure import Rounds
from prefixcache.bench.tune import Call, TuneSettings, tiles_to_try, tune, workload_of
from prefixcache.cli import main
from tests.support.tolerances import assert_close
from tests.support.triton_interpreter import repaired

TINY = TuneSettings(
    device="cpu",
    num_kv_heads=1,
    sequences=2,
    context=20,
    new=5,
    cached=7,
    keys=(16, 32),
    num_warps=(1,),
    num_stages=(1,),
    rounds=Rounds.exactly(1),
)
RULES = [
    pytest.param(architecture, rule, is_latent, id=f"{architecture}-{name}-{index}")
    for name, tables, is_latent in (("kv", TABLES, False), ("latent", LATENT_TABLES, True))
    for architecture, rules in tables.items()
    for index, rule in enumerate(rules)
]


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with repaired():
        yield
    gc.collect()  # the interpreter leaves cycles, which hold pools


@pytest.mark.parametrize(("architecture", "rule", "is_latent"), RULES)
def test_the_workload_of_a_rule_reaches_it(architecture: str, rule: Rule, is_latent: bool) -> None:
    shapes = workload_of(rule, TuneSettings(), is_latent=is_latent).shapes
    assert find_rule(shapes, architecture) is rule


@pytest.mark.parametrize(("architecture", "rule", "is_latent"), RULES)
def test_its_own_tiles_are_tried_first_and_none_is_smaller_than_a_dot(
    architecture: str, rule: Rule, is_latent: bool
) -> None:
    tried = tiles_to_try(rule, TuneSettings())
    assert tried[0] == rule.tiles
    assert len(set(tried)) == len(tried) > 20
    assert all(tiles.rows >= 16 and tiles.keys >= 16 for tiles in tried)


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("stored_bytes", "is_latent"), [(None, False), (1, False), (None, True)])
def test_all_tiles_give_the_same_output(stored_bytes: int | None, is_latent: bool) -> None:
    tiles = Tiles(16, 16, 1, 1)
    rule = Rule(None, 32, 4, tiles, "", stored_bytes)
    call = Call(workload_of(rule, TINY, is_latent=is_latent), "cpu")
    expected = call.launch(tiles).double()
    assert call.runs_with(Tiles(32, 32, 1, 1))
    assert_close(call.launch(Tiles(32, 32, 1, 1)), expected)


@pytest.mark.usefixtures("interpreter")
def test_a_run_orders_the_tiles_and_prints_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Rule(None, 32, 4, Tiles(16, 16, 1, 1), "")
    monkeypatch.setattr("prefixcache.bench.tune.TABLES", {"interpreter": (rule,)})
    monkeypatch.setattr("prefixcache.bench.tune.LATENT_TABLES", {"interpreter": ()})
    report = tune(TINY, lambda step, share: None)
    medians = [row.summary.median for row in report.rows]
    assert medians == sorted(medians)
    tried = [Tiles(*(int(row.labels[name]) for name in Tiles.__slots__)) for row in report.rows]
    assert set(tried) == set(tiles_to_try(rule, TINY))
    (present,) = [row for row in report.rows if row.name == "Tiles(16, 16, 1, 1)"]
    assert present.ratios[0].value == 1
    assert report.notes[1] == "TABLES['interpreter']"
    assert report.notes[2].startswith(f'Rule(None, 32, 4, {report.rows[0].name}, "timed: ')
    assert report.notes[2].endswith('as fast as Tiles(16, 16, 1, 1)"),')


def test_without_a_gpu_it_says_that_it_needs_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "attention", "--tune"])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert "needs a GPU" in captured.err
    assert captured.out == ""

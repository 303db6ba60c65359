"""`prefixcache explain` with a running daemon, and what it prints for each reason."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

from prefixcache import Client
from prefixcache.cli import main
from prefixcache.server.daemon import CacheOptions
from prefixcache.types import (
    CacheUse,
    Explanation,
    ExtraKeys,
    KeyDifference,
    KeyKind,
    Lora,
    MissReason,
)
from tests.support.daemon import RunningDaemon, running_daemon

PROMPT = list(range(1, 13))


class Asked:
    """The command, with a daemon of blocks of 4 tokens, and a client of that."""

    def __init__(
        self, running: RunningDaemon, client: Client, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.running = running
        self.client = client
        self._capsys = capsys

    def run(self, *arguments: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as caught:
            main(["explain", "--target", self.running.target, *arguments])
        printed = self._capsys.readouterr()
        assert caught.value.code == code, printed.err
        return printed.out if code == 0 else printed.err

    def rows(self, tokens: list[int], *arguments: str) -> dict[str, str]:
        lines = self.run(*map(str, tokens), *arguments).splitlines()
        return dict(tuple(part.strip() for part in line.split("  ", 1)) for line in lines)

    def fill(self, tokens: list[int], extra_keys: ExtraKeys | None = None) -> None:
        with self.client.sequence(tokens, extra_keys=extra_keys) as sequence:
            if sequence.num_cached_tokens < len(tokens) - 1:
                sequence.commit(len(tokens) - sequence.num_cached_tokens)


@pytest.fixture
def options() -> CacheOptions:
    return CacheOptions(16, 4)


@pytest.fixture
def asked(options: CacheOptions, capsys: pytest.CaptureFixture[str]) -> Iterator[Asked]:
    with running_daemon(options) as running, Client(running.target) as client:
        yield Asked(running, client, capsys)


def test_a_prompt_goes_through_its_reasons(asked: Asked) -> None:
    rows = asked.rows(PROMPT)
    assert rows["cached tokens"] == "0 of 12 (0.0%)"
    assert rows["missed"] == "block 0, tokens 0 to 3"
    assert rows["reason"] == "never cached since the start, or since the last reset"
    assert rows["note"].endswith("--verify-hits tells")
    with asked.client.sequence(PROMPT) as sequence:
        rows = asked.rows(PROMPT)
        assert rows["reason"] == "a live sequence is computing it now"
        assert rows["pending tokens"] == "11"
        sequence.commit(12)
        sequence.append([13, 14, 15, 16])
    rows = asked.rows(PROMPT)
    assert rows["cached tokens"] == "11 of 12 (91.7%)"
    assert rows["cached blocks"] == "3"
    assert "missed" not in rows
    assert rows["reason"] == "all of it is cached; the end is always computed again"
    rows = asked.rows([*PROMPT, 0])
    assert rows["missed"] == "block 3, tokens 12 to 12"
    assert rows["reason"].startswith("the tokens left fill no block")
    rows = asked.rows(PROMPT, "--lora", "adapter")
    assert rows["reason"].endswith("goes on with another LoRA")
    assert rows["LoRA"] == "none in the cache, adapter here"
    asked.client.reset_cache()
    assert asked.rows(PROMPT)["reason"].endswith("s ago, by a reset of the cache")


def test_an_evicted_block_is_told(asked: Asked) -> None:
    for first in range(100, 136, 4):
        asked.fill(list(range(first, first + 8)))
    reason = asked.rows(list(range(100, 109)))["reason"]
    assert reason.startswith("evicted ") and reason.endswith(" s ago, to make room")


def test_what_a_live_sequence_has_and_nobody_finds_is_told(asked: Asked) -> None:
    with asked.client.sequence(PROMPT, cache_use=CacheUse.NO_WRITE) as sequence:
        sequence.commit(12)
        assert asked.rows(PROMPT)["reason"] == "a live sequence has it, and never caches it"
    with asked.client.sequence(PROMPT[:3]) as sequence:
        sequence.commit(3)
        sequence.append([4])
        reason = asked.rows(PROMPT[:5])["reason"]
        assert reason == "a live sequence has it, but has not committed it yet"


class TestVerified:
    @pytest.fixture
    def options(self) -> CacheOptions:
        return CacheOptions(16, 4, verify_hits=True)

    def test_the_first_token_that_differs_is_told(self, asked: Asked) -> None:
        asked.fill(PROMPT)
        rows = asked.rows([*PROMPT[:6], 0, *PROMPT[7:]])
        assert rows["missed"] == "block 1, tokens 4 to 7"
        assert rows["reason"].endswith("the nearest cached chain goes on with another token 6")
        assert "note" not in rows

    def test_json_has_all_of_it(self, asked: Asked) -> None:
        asked.fill(PROMPT, ExtraKeys(lora=Lora("adapter", "v1")))
        printed = json.loads(asked.run(*map(str, PROMPT), "--json"))
        assert len(bytes.fromhex(printed.pop("block_hash"))) == 32
        assert printed == {
            "num_tokens": 12,
            "num_cached_tokens": 0,
            "num_cached_blocks": 0,
            "num_pending_tokens": 0,
            "reason": "diverged",
            "age_s": None,
            "first_different_token": None,
            "key_differences": [{"kind": "lora", "in_prompt": "", "in_cache": "adapter (v1)"}],
            "keeps_content": True,
        }


def test_a_prompt_comes_from_standard_input_too(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked.fill(PROMPT)
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(PROMPT)))
    assert json.loads(asked.run("-", "--json", "--full-hit", "last_block")) | {
        "block_hash": ""
    } == (
        json.loads(asked.run(*map(str, PROMPT), "--json", "--full-hit", "last_block"))
        | {"block_hash": ""}
    )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "token ids"),
        (["x"], "no token id"),
        (["1", "--lora-path", "/l"], "--lora"),
        (["1", "--tenant", "team-a"], "tenant"),
    ],
)
def test_bad_usage_is_refused(asked: Asked, arguments: list[str], problem: str) -> None:
    assert problem in asked.run(*arguments, code=2)


@pytest.mark.parametrize("reason", MissReason)
def test_each_reason_has_a_text(
    reason: MissReason, monkeypatch: pytest.MonkeyPatch, asked: Asked
) -> None:
    differences = (
        KeyDifference(KeyKind.LORA, "one", "two"),
        KeyDifference(KeyKind.MULTIMODAL_ITEM, "a at token 3", ""),
        KeyDifference(KeyKind.CACHE_SALT, "", "sha256:00"),
        KeyDifference(KeyKind.PROMPT_EMBEDS, "sha256:01", "sha256:02"),
    )
    found = Explanation(4, 1, 0, reason, b"h" * 32, 1234.56, 5, differences, True)

    def explain(self: Client, tokens: list[int], **options: Any) -> Explanation:
        return found

    monkeypatch.setattr(Client, "explain", explain)
    rows = asked.rows(PROMPT)
    assert "{" not in rows["reason"]
    if reason in (MissReason.EVICTED, MissReason.RESET):
        assert "1,234.6 s ago" in rows["reason"]
    if reason is MissReason.DIVERGED:
        names = "LoRA and item and cache salt and embeddings"
        assert rows["reason"].endswith(f"with another token 5 and another {names}")
    assert rows["item"] == "none in the cache, a at token 3 here"

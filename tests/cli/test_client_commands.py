"""What info, stats and lookup ask of a client and how they print its answers."""

from __future__ import annotations

import dataclasses
import io
import json
import tomllib
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, Self

import pytest
import typer

from prefixcache.cli.prompt_options import parse_tokens
from prefixcache.cli.stats import follow
from prefixcache.client import Credentials, ServerInfo, TlsCredentials
from prefixcache.core.stats import PoolStats, TenantStats
from prefixcache.errors import DeadlineExceededError, UnavailableError
from prefixcache.server.auth_file import parse_auth_rules, token_hash
from prefixcache.server.callers import Caller
from prefixcache.storage.layout import KVLayout, LatentLayout, Quantization
from prefixcache.types import ExtraKeys, FullHit, LookupResult, Lora, PoolAccess
from tests.support.command_line import output_of

INFO = ServerInfo(
    api_version="v1",
    version="1.2.3",
    boot_id=bytes(range(16)),
    layout=KVLayout(2, 3, 64, 16, "bfloat16"),
    fingerprint=b"\xab" * 32,
    num_blocks=12345,
    block_size=16,
    device="cpu",
    hash_algorithm="xxh3",
    hash_recipe_version=1,
    hash_seeded=False,
    none_hash_digest=b"\xcd" * 32,
    verify_hits=True,
    prefix_caching=True,
    max_message_bytes=2**20,
    max_fork_children=7,
    max_step_allocates=8,
    capabilities=("attention",),
    model_name="",
    model_revision="r1",
    owner_ttl_s=600.0,
    max_sessions=256,
    max_session_ttl_s=3600.0,
    max_sequences_per_session=16384,
    reconnect_grace_s=0.5,
    max_tokens_per_call=2**22,
    max_queued_calls=1024,
    max_queue_wait_s=60.0,
    max_owners=4096,
    max_connections=1024,
    max_streams_per_connection=1024,
    max_step_streams=256,
    max_wait_pending_s=60.0,
    max_pending_waits=256,
    max_rows_per_call=65536,
    max_fields_per_request=327680,
    max_arena_bytes=2**30,
    core="native",
)
STATS = PoolStats(
    **{field.name: 0 for field in dataclasses.fields(PoolStats)}
    | {
        "tenants": (),
        "calls": (),
        "num_blocks": 1000,
        "block_size": 16,
        "referenced": 450,
        "evictable": 300,
        "blank": 250,
        "requests": 10,
        "queries_tokens": 2000,
        "hit_tokens": 1500,
        "queries_blocks": 125,
        "hit_blocks": 100,
        "evictions": 40,
    }
)
LOOKUP = LookupResult(32, 2, 1, 5, (b"\x01" * 32, b"\x02" * 32), 16)


class FakeClient:
    """Answers with the constants above and keeps what it was asked."""

    info: ServerInfo = INFO
    made: list[tuple[str, float]]
    lookups: list[tuple[list[int], dict[str, Any]]]
    error: Exception | None
    shown: Credentials

    def __init__(self, target: str, *, timeout_s: float, credentials: Credentials) -> None:
        FakeClient.shown = credentials
        FakeClient.made.append((target, timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def server_info(self) -> ServerInfo:
        if FakeClient.error is not None:
            raise FakeClient.error
        return self.info

    def stats(self) -> PoolStats:
        return STATS

    def lookup(self, tokens: list[int], **options: Any) -> LookupResult:
        FakeClient.lookups.append((tokens, options))
        return LOOKUP


@pytest.fixture(autouse=True)
def fake_client(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    FakeClient.made, FakeClient.lookups, FakeClient.error = [], [], None
    monkeypatch.setattr("prefixcache.client.Client", FakeClient)
    monkeypatch.setenv("PREFIXCACHE_TARGET", "unix:/run/test.sock")
    return FakeClient


def rows_of(text: str) -> dict[str, str]:
    """Rows `name  value`, by name."""
    return {name.strip(): value for line in text.splitlines() for name, _, value in [split(line)]}


def split(line: str) -> tuple[str, str, str]:
    name, gap, value = line.lstrip().partition("  ")
    return name, gap, value.lstrip()


def test_target_is_the_flag_then_the_environment_then_the_default_socket(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    output_of(capsys, "info", "--target", "localhost:7", "--timeout", "2.5")
    output_of(capsys, "info")
    monkeypatch.delenv("PREFIXCACHE_TARGET")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "prefixcache.sock").touch()
    output_of(capsys, "info")
    assert FakeClient.made == [
        ("localhost:7", 2.5),
        ("unix:/run/test.sock", 10.0),
        (f"unix:{tmp_path}/prefixcache.sock", 10.0),
    ]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            UnavailableError("connection refused"),
            "no daemon can be reached at unix:/run/test.sock: connection refused",
        ),
        (
            DeadlineExceededError("deadline"),
            "the daemon at unix:/run/test.sock did not answer within 10 s",
        ),
    ],
)
def test_a_silent_daemon_is_named_in_one_line(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    FakeClient.error = error
    assert output_of(capsys, "info", code=1) == f"prefixcache: {line}\n"


def test_info_as_json_has_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    printed = json.loads(output_of(capsys, "info", "--json"))
    assert printed.keys() == {field.name for field in dataclasses.fields(ServerInfo)}
    assert printed["boot_id"] == "000102030405060708090a0b0c0d0e0f"
    assert printed["layout"] == {
        "kind": "kv",
        "num_layers": 2,
        "num_kv_heads": 3,
        "head_dim": 64,
        "block_size": 16,
        "dtype": "bfloat16",
        "quantization": None,
    }
    assert printed["capabilities"] == ["attention"]


def test_info_for_people_has_units_and_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(output_of(capsys, "info"))
    assert rows["version"] == "1.2.3"
    assert rows["num blocks"] == "12,345"
    assert rows["layout dtype"] == "bfloat16"
    assert rows["max message"] == "1MiB (1,048,576)"
    assert rows["owner ttl"] == "600 s"
    assert rows["hash seeded"] == "no"
    assert rows["model name"] == "-"
    assert rows["fingerprint"] == "ab" * 32


def test_info_shows_the_kind_of_kv(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(output_of(capsys, "info"))
    assert (rows["layout kind"], rows["layout quantization"]) == ("kv", "-")
    quantised = dataclasses.replace(INFO.layout, quantization=Quantization("int8", "tensor"))
    for layout, expected in (
        (quantised, {"layout quantization dtype": "int8", "layout quantization scales": "tensor"}),
        (
            LatentLayout(2, 512, 64, 16, "bfloat16"),
            {"layout kind": "latent", "layout latent dim": "512", "layout rope dim": "64"},
        ),
    ):
        monkeypatch.setattr(FakeClient, "info", dataclasses.replace(INFO, layout=layout))
        assert expected.items() <= rows_of(output_of(capsys, "info")).items()


def test_stats_as_json_has_every_counter_and_the_ratios(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = json.loads(output_of(capsys, "stats", "--json"))
    counters = {field.name for field in dataclasses.fields(PoolStats)}
    assert printed.keys() == counters | {"hit_rate", "pool_usage"}
    assert printed["hit_rate"] == 0.75
    assert printed["pool_usage"] == 0.45


def test_stats_for_people_have_the_hit_rate_and_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(output_of(capsys, "stats"))
    assert rows["hit rate"] == "75.0% (1,500 of 2,000 prompt tokens)"
    assert rows["hit blocks"] == "80.0% (100 of 125 full blocks)"
    bar, usage = rows["pool usage"].split(" ", 1)
    assert bar == "#" * 14 + "+" * 8 + "." * 8
    assert usage.startswith("45.0%")
    assert rows["evictions"] == "40"


def test_quarantined_blocks_are_a_part_of_the_bar_if_there_are_any(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = dataclasses.replace(STATS, blank=150, quarantined=100)
    monkeypatch.setattr(FakeClient, "stats", lambda client: stats)
    rows = rows_of(output_of(capsys, "stats"))
    assert rows["quarantined"] == "100"
    bar, usage = rows["pool usage"].split(" ", 1)
    assert bar == "#" * 14 + "!" * 2 + "+" * 10 + "." * 4
    assert usage == "45.0% (# referenced, ! quarantined, + evictable, . blank)"


def test_stats_have_a_row_for_arenas_where_there_are_some(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "arenas" not in rows_of(output_of(capsys, "stats"))
    stats = dataclasses.replace(STATS, arenas=3, arena_bytes=768 * 2**20)
    monkeypatch.setattr(FakeClient, "stats", lambda client: stats)
    assert rows_of(output_of(capsys, "stats"))["arenas"] == "3, 768MiB"


def test_stats_have_a_row_a_tenant(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants = (
        TenantStats("team-a", "shared", 400, None, 450, 100, 7, 0),
        TenantStats("team-b", "shared", 0, 2000, 0, 200, 40, 3),
    )
    monkeypatch.setattr(
        FakeClient, "stats", lambda client: dataclasses.replace(STATS, tenants=tenants)
    )
    rows = rows_of(output_of(capsys, "stats"))
    assert rows["tenant team-a"] == (
        "450 held, 400 guaranteed; 100 evictable, 7 evictions, 0 refused"
    )
    assert rows["tenant team-b"] == (
        "0 held, 0 guaranteed, at most 2,000; 200 evictable, 40 evictions, 3 refused"
    )
    printed = json.loads(output_of(capsys, "stats", "--json"))
    assert printed["tenants"] == [dataclasses.asdict(tenant) for tenant in tenants]


def test_rates_are_differences_over_time_and_absent_after_a_restart() -> None:
    def after(**counters: int) -> PoolStats:
        return dataclasses.replace(STATS, **counters)

    snapshots = iter([STATS, after(requests=14, hit_tokens=1510, evictions=41), after(requests=0)])
    slept: list[float] = []
    views = follow(lambda: next(snapshots), 2.0, map(float, count(0, 2)).__next__, slept.append)
    assert next(views) == (STATS, None)
    _, rates = next(views)
    assert rates == {"requests": 2.0, "queries_tokens": 0.0, "hit_tokens": 5.0, "evictions": 0.5}
    assert next(views)[1] is None
    assert slept == [2.0, 2.0]


@pytest.fixture
def interrupted_after_two(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Control-C in the second pause; holds the pauses."""
    slept: list[float] = []

    def watched(read: Any, interval_s: float) -> Iterator[Any]:
        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 2:
                raise KeyboardInterrupt

        return follow(read, interval_s, map(float, count()).__next__, sleep)

    monkeypatch.setattr("prefixcache.cli.stats.follow", watched)
    return slept


def test_watch_follows_until_interrupted_and_exits_with_0(
    interrupted_after_two: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    views = output_of(capsys, "stats", "--watch", "0.5").strip().split("\n\n")
    assert interrupted_after_two == [0.5, 0.5]
    assert len(views) == 2
    assert "evictions/s" not in rows_of(views[0])
    assert rows_of(views[1])["evictions/s"] == "0.0"


def test_watch_without_seconds_takes_two(
    interrupted_after_two: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = output_of(capsys, "stats", "--watch", "--json").splitlines()
    assert interrupted_after_two == [2.0, 2.0]
    assert [json.loads(line)["rates_per_s"] is None for line in lines] == [True, False]


def test_lookup_passes_everything_on(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--lora", "l", "--lora-path", "/l", "--salt", "s", "--lookahead", "4", "--hashes"]
    output_of(capsys, "lookup", "1", "2", "3", *options, "--full-hit", "last_block")
    expected = {
        "extra_keys": ExtraKeys(lora=Lora("l", "/l"), cache_salt="s"),
        "num_lookahead_tokens": 4,
        "full_hit": FullHit.LAST_BLOCK,
        "want_hashes": True,
    }
    assert FakeClient.lookups == [([1, 2, 3], expected)]
    output_of(capsys, "lookup", "1")
    expected = {
        "extra_keys": ExtraKeys(),
        "num_lookahead_tokens": 0,
        "full_hit": FullHit.LAST_TOKEN,
        "want_hashes": False,
    }
    assert FakeClient.lookups[1] == ([1], expected)


def test_tokens_come_from_arguments_a_file_or_stdin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "tokens"
    path.write_text("[1, 2]")
    output_of(capsys, "lookup", "--tokens-file", str(path))
    for arguments in (["-"], ["--tokens-file", "-"]):
        monkeypatch.setattr("sys.stdin", io.StringIO("3 4\n5"))
        output_of(capsys, "lookup", *arguments)
    assert [tokens for tokens, _ in FakeClient.lookups] == [[1, 2], [3, 4, 5], [3, 4, 5]]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["1", "--tokens-file", "-"],
        ["--tokens-file", "/no/such/file"],
        ["1", "--lora-path", "/l"],
        ["1", "--lookahead", "-1"],
        ["1", "--full-hit", "none"],
        ["x"],
    ],
)
def test_lookup_refuses_contradictions(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    output_of(capsys, "lookup", *arguments, code=2)
    assert FakeClient.made == []


@pytest.mark.parametrize("text", ["1 2 3", "1,2,3", " 1\n2\t3\n", "[1, 2, 3]", " [1,2,\n3] "])
def test_token_ids_are_a_json_list_or_separated_by_white_space_or_commas(text: str) -> None:
    assert parse_tokens(text) == [1, 2, 3]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "[1, ", "[1.5]", "[true]", '["1"]', "[[1]]", "1 -1", "4294967296", "1e3", "٣"],
)
def test_what_are_no_token_ids_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_tokens(text)


def test_lookup_for_people_says_what_is_cached_and_whether_it_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = rows_of(output_of(capsys, "lookup", *["1"] * 40, "--hashes"))
    assert rows["cached tokens"] == "32 of 40 (80.0%)"
    assert rows["blocks needed"] == "1 of 5 free"
    assert rows["fits now"] == "yes"
    assert rows["block 1 hash"] == "02" * 32


def test_lookup_as_json_has_hashes_only_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    printed = json.loads(output_of(capsys, "lookup", "1", "--json"))
    assert printed == {
        "num_tokens": 1,
        "num_cached_tokens": 32,
        "num_cached_blocks": 2,
        "num_blocks_needed": 1,
        "num_blocks_free": 5,
        "num_pending_tokens": 16,
    }
    printed = json.loads(output_of(capsys, "lookup", "1", "--json", "--hashes"))
    assert printed["block_hashes"] == ["01" * 32, "02" * 32]


# ---- credentials


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    texts = {"token": " from-a-file\n", "ca": "the CA", "cert": "the cert", "key": "the key"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return {name: str(tmp_path / name) for name in texts}


def test_the_token_is_that_of_the_file_then_of_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, files: dict[str, str]
) -> None:
    output_of(capsys, "info")
    assert FakeClient.shown == Credentials()
    monkeypatch.setenv("PREFIXCACHE_TOKEN", "from-the-environment")
    for command in (["info"], ["stats"], ["lookup", "1"]):
        FakeClient.shown = Credentials()
        output_of(capsys, *command)
        assert FakeClient.shown == Credentials("from-the-environment")
    monkeypatch.setenv("PREFIXCACHE_TOKEN_FILE", files["token"])
    output_of(capsys, "info")
    assert FakeClient.shown == Credentials("from-a-file")
    output_of(capsys, "info", "--token-file", files["cert"], code=2)


def test_files_of_tls_come_from_flags_or_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, files: dict[str, str]
) -> None:
    expected = Credentials(tls=TlsCredentials(b"the CA", b"the cert", b"the key"))
    given = {"--tls-ca": files["ca"], "--tls-cert": files["cert"], "--tls-key": files["key"]}
    output_of(capsys, "info", *[word for pair in given.items() for word in pair])
    assert FakeClient.shown == expected
    output_of(capsys, "info", "--tls-ca", files["ca"])
    assert FakeClient.shown == Credentials(tls=TlsCredentials(b"the CA"))
    for name, path in (("CA", "ca"), ("CERT", "cert"), ("KEY", "key")):
        monkeypatch.setenv(f"PREFIXCACHE_CLIENT_TLS_{name}", files[path])
    output_of(capsys, "info")
    assert FakeClient.shown == expected


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["--token-file", "/none"], "--token-file: /none: No such file"),
        (["--tls-ca", "/none"], "--tls-ca: /none: No such file"),
        (["--tls-cert", "/none"], "--tls-key: is missing"),
        (["--tls-key", "/none"], "--tls-cert: is missing"),
    ],
)
def test_a_file_that_is_not_there_is_named(
    arguments: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flag in output_of(capsys, "info", *arguments, code=2)


def test_a_bad_token_is_not_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFIXCACHE_TOKEN", "my secret")
    problem = output_of(capsys, "info", code=2)
    assert problem.startswith("prefixcache: PREFIXCACHE_TOKEN: must be")
    assert "secret" not in problem


def test_a_new_token_comes_with_the_entry_that_admits_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = (
        output_of(capsys, "token", "new", "--tenant", "team-a", *more)
        for more in ([], ["--role", "admin", "--role", "client", "--days", "3"])
    )
    for printed, roles in ((first, {"client"}), (second, {"admin", "client"})):
        token, entry = printed.split("\n", 1)
        rules = parse_auth_rules(tomllib.loads(entry))
        identity = rules.by_token[token_hash(token)]
        assert token not in entry
        assert identity.caller == Caller(
            "team-a", "team-a", frozenset(roles), PoolAccess.WRITE
        )  # the only tenant's
    assert first.split("\n", 1)[0] != second.split("\n", 1)[0]
    assert rules.by_token[token_hash(token)].expires_at_s is not None
    assert "must be 1 to 63" in output_of(capsys, "token", "new", "--tenant", "team a", code=2)

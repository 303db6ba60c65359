"""`bench access`: Lookup through the Python client, with access control and without.

Daemons that differ in nothing differ in speed for as long as they live, so there are several of
either kind, and their samples are taken together. All of them serve on Unix sockets: TLS is not
what is measured.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from prefixcache.bench.children import daemon_process
from prefixcache.bench.machine import machine_facts
from prefixcache.bench.measure import Laps, Progress, Rounds, run_rounds
from prefixcache.bench.prompts import Prompts
from prefixcache.bench.report import Ratio, Report, Row, Target
from prefixcache.client import Client, Credentials
from prefixcache.server.auth_file import token_hash
from prefixcache.types import TokenIds

_ROUNDS = Rounds(fewest=10, most=200, budget_s=30.0)
_TARGET = 1.15
_TOKEN = "of-the-benchmark"

Way = Literal["open", "token", "user"]
_NAMES: dict[Way, str] = {
    "open": "without access control",
    "token": "with a token",
    "user": "as a user of the host",
}


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """tokens: lengths of the cached prompts. calls: of a turn. daemons: of either kind."""

    tokens: tuple[int, ...] = (100, 2_000)
    calls: int = 50
    daemons: int = 3
    rounds: Rounds = _ROUNDS


def quick_settings() -> AccessSettings:
    """One round."""
    return AccessSettings(calls=20, daemons=1, rounds=Rounds.exactly(1))


@dataclass(frozen=True, slots=True)
class Key:
    way: Way
    tokens: int


def bench_access(settings: AccessSettings, progress: Progress) -> Report:
    """Measure everything. Raises UnavailableError if a daemon does not start."""
    start = time.perf_counter()
    laps: Laps[Key] = Laps()
    prompts = {num_tokens: Prompts(num_tokens).next() for num_tokens in settings.tokens}
    with ExitStack() as stack:
        clients: list[tuple[Way, Client]] = []
        for _ in range(settings.daemons):
            flags = ("--storage", "none", "--num-blocks", "1000")
            plain = stack.enter_context(daemon_process(*flags))
            auth = stack.enter_context(_auth_file())
            guarded = stack.enter_context(daemon_process(*flags, "--auth", str(auth)))
            clients.append(("open", stack.enter_context(Client(plain))))
            with_token = Client(guarded, credentials=Credentials(_TOKEN))
            clients.append(("token", stack.enter_context(with_token)))
            clients.append(("user", stack.enter_context(Client(guarded))))
        for _, client in clients:
            for prompt in prompts.values():
                _cache(client, prompt)
        run_rounds(
            [
                partial(_turn, laps, Key(way, num_tokens), client, prompt, settings.calls)
                for num_tokens, prompt in prompts.items()
                for way, client in clients
            ],
            settings.rounds,
            warmed_up=laps.clear,
            on_round=partial(progress, "lookups"),
        )
    return Report(
        bench="access",
        machine=machine_facts(),
        settings=asdict(settings),
        rows=tuple(_row(laps, way, count) for count in settings.tokens for way in _NAMES),
        seconds=time.perf_counter() - start,
    )


@contextmanager
def _auth_file() -> Iterator[Path]:
    """One that knows the token, and this user, as tenants of their own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "auth.toml"
        path.touch(0o600)
        path.write_text(
            f'[[identities]]\ntoken_sha256 = "{token_hash(_TOKEN).hex()}"\ntenant = "token"\n'
            f'[[identities]]\nuid = {os.geteuid()}\ntenant = "user"\n'
        )
        yield path


def _cache(client: Client, prompt: TokenIds) -> None:
    with client.sequence(prompt) as sequence:
        sequence.commit(sequence.num_tokens - sequence.num_cached_tokens)


def _turn(laps: Laps[Key], key: Key, client: Client, prompt: TokenIds, calls: int) -> None:
    for _ in range(calls):
        laps.time(key, partial(client.lookup, prompt))


def _row(laps: Laps[Key], way: Way, num_tokens: int) -> Row:
    summary, plain = laps.summary(Key(way, num_tokens)), laps.summary(Key("open", num_tokens))
    is_open = way == "open"
    ratio = Ratio(_NAMES["open"], summary.median / plain.median)
    return Row(
        section="Lookup",
        name=_NAMES[way],
        labels={"tokens": num_tokens},
        summary=summary,
        ratios=() if is_open else (ratio,),
        target=None if is_open else Target(_TARGET, _NAMES["open"]),
    )

"""The status page: the numbers of GetStats, a valid document of its own, and nothing of clients."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from html.parser import HTMLParser

import pytest

from prefixcache.client import Client
from prefixcache.core.stats import PoolStats
from prefixcache.core.tenants import TenantQuota
from prefixcache.server.daemon import CacheOptions, ModelOptions
from prefixcache.server.overview import INTERVAL_S, MAX_AGE_S, NUM_INTERVALS, Observer
from prefixcache.server.status_page import POLICY, make_html, make_json, make_pages
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.stubs import Peer, Stubs, connected

NUM_BLOCKS, BLOCK_SIZE = 16, 4
VOID = {"meta", "rect", "path", "br"}


@dataclass
class Clock:
    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Watched:
    running: RunningDaemon
    observer: Observer
    clock: Clock
    is_serving: bool = True

    def tick(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.observer.tick()

    def page(self) -> Document:
        return read_page(make_html(self.observer.overview()).decode())

    def json(self) -> dict:
        return json.loads(make_json(self.observer.overview()))


@pytest.fixture
def watched() -> Iterator[Watched]:
    clock = Clock()
    model = ModelOptions(name="<m&m>", revision='"1"')
    with running_daemon(CacheOptions(NUM_BLOCKS, BLOCK_SIZE), model, clock=clock) as running:
        daemon, counts = running.daemon, running.server.call_counts
        yield (found := Watched(running, Observer(daemon, counts, lambda: found.is_serving), clock))


@pytest.fixture
def stubs(watched: Watched) -> Iterator[Stubs]:
    with connected(watched.running.target) as stubs:
        yield stubs


@dataclass
class Document(HTMLParser):
    """A page, after a check that every element is closed and every id is there once."""

    data: dict[str, int] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    text: str = ""
    inline: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        assert len(known) == len(attrs), f"{tag} has an attribute twice"
        self.tags.append((tag, known))
        if known.get("id"):
            self.ids.append(str(known["id"]))
        if tag == "data":
            self.data[str(known["id"])] = int(str(known["value"]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("style", "script"):
            self.inline[self.open[-1]] = data
        else:
            self.text += data


def read_page(html: str) -> Document:
    assert html.startswith("<!DOCTYPE html>")
    document = Document()
    document.feed(html)
    document.close()
    assert document.open == []
    assert len(set(document.ids)) == len(document.ids)
    return document


def use(stubs: Stubs) -> None:
    """Hits, evictions, a live sequence and a refusal."""
    peer = Peer(stubs)
    for start in (0, 0, 100, 200, 300, 0, 300):
        reply = peer.allocate(range(start, start + 22))
        cached = reply.num_cached_tokens
        peer.commit(reply.sequence_id, cached, 22 - cached)
        peer.free(reply.sequence_id)
    peer.commit(peer.allocate(range(300, 309)).sequence_id, 8, 1)
    stubs.refused("Truncate", b"")


def test_every_number_is_the_one_of_get_stats(watched: Watched, stubs: Stubs) -> None:
    use(stubs)
    page, document = watched.page(), watched.json()
    stats = stubs.stats()
    shown = {field.name for field in fields(PoolStats)} - {"tenants", "calls", "uptime_s"}
    assert shown <= page.data.keys()
    for name in shown:
        assert page.data[name] == document["stats"][name] == getattr(stats, name), name
    for call in stats.calls:
        assert page.data[f"calls_{call.method}"] == call.ended
    assert [call["method"] for call in document["stats"]["calls"]] == [
        call.method for call in stats.calls
    ]
    assert document["stats"]["evictions"] > 0 and document["stats"]["hit_tokens"] > 0
    assert document["stats"]["hit_rate"] == stats.hit_tokens / stats.queries_tokens


@pytest.mark.parametrize("is_serving", [True, False])
def test_a_fresh_daemon_has_a_whole_page(watched: Watched, is_serving: bool) -> None:
    watched.is_serving = is_serving
    text = watched.page().text
    assert ("Not serving" in text) == (not is_serving)
    assert "No sequences." in text and "No calls yet." in text


def test_what_it_holds_comes_with_it_and_no_policy_lets_more_in(watched: Watched) -> None:
    page = watched.page()
    for name in ("style", "script"):
        digest = hashlib.sha256(page.inline[name].encode()).digest()
        assert f"{name}-src 'sha256-{base64.b64encode(digest).decode()}'" in POLICY
    assert "default-src 'none'" in POLICY and "unsafe" not in POLICY
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "base", "form")
        assert not attributes.keys() & {"src", "href", "style", "action"}
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"https?:|//|@import|url\(", page.inline["style"])
    assert "http" not in page.inline["script"]


def test_texts_of_the_operator_are_escaped(watched: Watched) -> None:
    quotas = [TenantQuota("<b>team</b>", "x"), TenantQuota("b", "b", 4, 8)]
    sequences = watched.running.daemon.sequences
    with sequences.lock:
        sequences.tenants.apply(quotas)
    text = watched.page().text
    assert '<m&m> "1"' in text
    assert "<b>team</b>" in text


def test_nothing_that_a_client_sends_is_shown(watched: Watched, stubs: Stubs) -> None:
    with Client(watched.running.target, client_name="my secret name") as client:
        sequence = client.sequence([77_777_777, 2, 3], request_id="my secret request")
        html = make_html(watched.observer.overview()).decode()
        document = make_json(watched.observer.overview()).decode()
        (session,) = client.list_sessions()
        for text in (html, document):
            assert "secret" not in text and "77777777" not in text.replace(",", "")
            assert str(sequence.sequence_id) not in text
            assert session.owner_digest in text


def test_every_drawing_and_every_wide_table_has_a_label(watched: Watched, stubs: Stubs) -> None:
    use(stubs)
    page = watched.page()
    drawings = [known for tag, known in page.tags if tag == "svg"]
    assert len(drawings) == 4
    assert all(known["role"] == "img" and known["aria-label"] for known in drawings)
    regions = [known for _, known in page.tags if known.get("class") == "scroll"]
    assert len(regions) == 2  # of sequences and RPCs; there are no sessions
    assert all(known["aria-label"] and known["tabindex"] == "0" for known in regions)
    assert ("html", {"lang": "en"}) in page.tags


def test_the_largest_sequences_come_first_and_only_some(watched: Watched, stubs: Stubs) -> None:
    peer = Peer(stubs)
    for length in [1] * 10 + [9, 5]:
        peer.allocate(range(length))
    rows = watched.json()["largest_sequences"]
    assert [row["num_blocks"] for row in rows] == [3, 2] + [1] * 8


# ---- the history


def test_the_history_is_of_the_last_minutes_however_long_it_runs(watched: Watched) -> None:
    for _ in range(NUM_INTERVALS + 30):
        watched.tick(INTERVAL_S)
    history = watched.json()["history"]
    assert len(history) == NUM_INTERVALS
    assert history[-1]["end_s"] == watched.running.daemon.uptime_s()
    assert history[-1]["end_s"] - history[0]["start_s"] == INTERVAL_S * NUM_INTERVALS


def test_ticks_between_intervals_keep_nothing(watched: Watched) -> None:
    for _ in range(int(4 * INTERVAL_S) * 3):
        watched.tick(0.25)
    assert len(watched.json()["history"]) == 2


def test_the_history_has_the_rates_of_each_interval(watched: Watched, stubs: Stubs) -> None:
    watched.tick(0.0)
    use(stubs)
    watched.tick(INTERVAL_S)
    watched.tick(INTERVAL_S)
    first, second = watched.json()["history"]
    stats = stubs.stats()
    assert first["hit_rate"] == stats.hit_tokens / stats.queries_tokens
    assert first["evictions_per_s"] == stats.evictions / INTERVAL_S
    assert first["requests_per_s"] == stats.requests / INTERVAL_S
    assert first["calls_per_s"] == sum(call.ended for call in stats.calls) / INTERVAL_S
    assert (second["hit_rate"], second["calls_per_s"]) == (None, 0.0)


def test_who_asks_often_gets_the_same_overview_for_a_while(watched: Watched, stubs: Stubs) -> None:
    before = watched.json()
    Peer(stubs).allocate(range(4))
    watched.clock.now_s += MAX_AGE_S / 2
    assert watched.json() == before
    watched.clock.now_s += MAX_AGE_S / 2
    assert watched.json()["stats"]["requests"] == 1


def test_the_pages_have_the_policy_and_their_types(watched: Watched) -> None:
    pages = make_pages(watched.observer)
    assert pages.keys() == {"/", "/status.json"}
    types = {path: page().content_type for path, page in pages.items()}
    assert types == {"/": "text/html; charset=utf-8", "/status.json": "application/json"}
    for page in pages.values():
        headers = dict(page().headers)
        assert headers["Content-Security-Policy"] == POLICY
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_a_point_between_gaps_is_drawn_and_the_line_breaks(watched: Watched) -> None:
    watched.tick(0.0)
    for _ in range(5):
        watched.tick(INTERVAL_S)
    history = watched.observer.overview().history
    rates = (0.5, None, 1.0, 0.0, None)
    seen = replace(
        watched.observer.overview(),
        history=tuple(replace(i, hit_rate=r) for i, r in zip(history, rates, strict=True)),
    )
    lines = [
        known["d"]
        for tag, known in read_page(make_html(seen).decode()).tags
        if tag == "path" and known["class"] == "line"
    ]
    assert re.fullmatch(r"M[\d.]+ 50\.0h0M[\d.]+ 0\.0h0L[\d.]+ 100\.0", str(lines[0]))

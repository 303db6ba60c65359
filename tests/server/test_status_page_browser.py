"""The status page in a real browser: at a phone's and a desktop's size, light, dark, live."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixcache.address import TcpAddress
from prefixcache.client import Client
from prefixcache.server.daemon import CacheOptions
from prefixcache.server.metrics import make_registry
from prefixcache.server.metrics_http import MetricsServer
from prefixcache.server.overview import Observer
from prefixcache.server.status_page import make_pages
from tests.support.chromium import Page, browser
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.waiting import until

pytestmark = pytest.mark.browser

SIZES = {"phone": (390, 844), "desktop": (1280, 900)}

TEXT_COLOURS = """
[...document.querySelectorAll("h1, h2, p, li, td, th, .axis span, .state")].map((element) => {
  let behind = element;
  while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") {
    behind = behind.parentElement;
  }
  return [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor];
})
"""


@pytest.fixture
def running() -> Iterator[RunningDaemon]:
    with running_daemon(CacheOptions(64, 4)) as running:
        yield running


@pytest.fixture
def client(running: RunningDaemon) -> Iterator[Client]:
    """Has used the daemon."""
    with Client(running.target, client_name="engine") as client:
        for number in range(20):
            with client.sequence(range(number, number + 30)) as sequence:
                sequence.commit(sequence.num_tokens - sequence.num_cached_tokens)
        client.sequence(range(50))
        yield client


@pytest.fixture
def observer(running: RunningDaemon) -> Observer:
    found = Observer(running.daemon, running.server.call_counts, lambda: running.server.is_serving)
    found.tick()
    return found


@pytest.fixture
def http(running: RunningDaemon, observer: Observer) -> Iterator[MetricsServer]:
    registry = make_registry(running.daemon, running.server.call_counts)
    server = MetricsServer(TcpAddress("127.0.0.1", 0), registry, lambda: True, make_pages(observer))
    server.start()
    yield server
    server.close()


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with browser(tmp_path / "profile") as page:
        yield page


def number(page: Page, name: str) -> int:
    return int(page.value(f"document.getElementById('{name}').value"))


def contrast(first: str, second: str) -> float:
    """Of two colours `rgb(r, g, b)`, after WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in colour.removeprefix("rgb(").rstrip(")").split(",")]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_fits_and_can_be_read(
    size: str, scheme: str, page: Page, http: MetricsServer, client: Client, tmp_path: Path
) -> None:
    width, height = SIZES[size]
    page.resize(width, height)
    page.prefer(scheme)
    page.open(f"http://{http.address}/")
    assert page.value("innerWidth") == width
    assert page.value("document.documentElement.scrollWidth") <= width
    assert page.value("parseFloat(getComputedStyle(document.body).fontSize)") >= 16
    for text, behind in page.value(TEXT_COLOURS):
        assert contrast(text, behind) >= 4.5, (text, behind)
    page.screenshot(tmp_path / f"{size}-{scheme}.png")
    assert page.problems == []


def test_it_follows_the_daemon_by_itself(page: Page, http: MetricsServer, client: Client) -> None:
    page.open(f"http://{http.address}/")
    before = number(page, "requests")
    client.sequence(range(7))
    until(lambda: number(page, "requests") == before + 1)
    assert number(page, "requests") == client.stats().requests
    assert page.problems == []


def test_without_scripts_it_is_a_snapshot(page: Page, http: MetricsServer, client: Client) -> None:
    page.allow_scripts(False)
    page.open(f"http://{http.address}/")
    assert number(page, "requests") == client.stats().requests
    assert page.value("document.querySelectorAll('svg').length") == 4


def test_a_daemon_that_is_gone_is_said_and_one_that_is_back_is_shown(
    page: Page, http: MetricsServer, running: RunningDaemon, observer: Observer, client: Client
) -> None:
    page.open(f"http://{http.address}/")
    assert page.value("document.getElementById('lost').hidden") is True
    http.close()
    until(lambda: page.value("!document.getElementById('lost').hidden"))
    assert number(page, "requests") == client.stats().requests
    registry = make_registry(running.daemon, running.server.call_counts)
    again = MetricsServer(http.address, registry, lambda: True, make_pages(observer))
    again.start()
    try:
        until(lambda: page.value("document.getElementById('lost').hidden"))
    finally:
        again.close()

"""Dashboards and alert rules ask for metrics and labels that a daemon has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from prefixcache.core.tenants import TenantQuota
from prefixcache.server.daemon import CacheOptions
from tests.deploy.files import ALERTS, ALERTS_TEST, DASHBOARD, alert_names
from tests.support.daemon import running_daemon
from tests.support.promql import Selector, grouping_labels, selectors
from tests.support.scrape import Scrape, scrape

TARGET_LABELS = {"instance", "job"}
"""Prometheus adds them to all that it scrapes."""


def panels() -> list[Any]:
    found: list[Any] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def dashboard_queries() -> Iterator[str]:
    for panel in panels():
        for target in panel.get("targets", ()):
            yield target["expr"]


def alert_queries() -> Iterator[str]:
    """Each `expr` up to the next key."""
    yield from re.findall(r"expr: (.*?)\n +(?:for|labels):", ALERTS.read_text(), re.DOTALL)


QUERIES = [*dashboard_queries(), *alert_queries()]


@pytest.fixture(scope="module")
def found() -> Iterator[Scrape]:
    with running_daemon(CacheOptions(8, 4)) as running:
        with running.daemon.sequences.lock:
            running.daemon.sequences.tenants.apply([TenantQuota("one", "one", 1, 2)])
        yield scrape(running)


def labels_by_metric(found: Scrape) -> dict[str, set[str]]:
    labels: dict[str, set[str]] = {"up": set(TARGET_LABELS)}
    for name, pairs in found.names():
        labels.setdefault(name, set(TARGET_LABELS)).update(label for label, _ in pairs)
    return labels


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_asks_for_what_is_there(query: str, found: Scrape) -> None:
    known = labels_by_metric(found)
    asked = list(selectors(query))
    assert asked
    for selector in asked:
        assert selector.metric in known
        assert selector.labels <= known[selector.metric]
    assert grouping_labels(query) <= set().union(*(known[s.metric] for s in asked))


def test_all_queries_were_found() -> None:
    assert len(list(alert_queries())) == len(alert_names()) > 0
    assert len(list(dashboard_queries())) == DASHBOARD.read_text().count('"expr"') > 0


def test_every_metric_of_the_daemon_is_on_the_dashboard_or_in_an_alert(found: Scrape) -> None:
    """What nobody looks at need not be there."""
    asked = {selector.metric for query in QUERIES for selector in selectors(query)}
    asked |= {selector.metric for selector in selectors(DASHBOARD.read_text())}
    ours = {name for name, _ in found.names() if name.startswith("prefixcache_")}
    # A rate of a sum is enough of a histogram, and info is for joins.
    unseen = {name for name in ours - asked if not name.endswith(("_count", "_sum", "_info"))}
    # Those of resumed sequences are parts of a ratio that few engines need.
    assert unseen <= {
        "prefixcache_hit_blocks_total",
        "prefixcache_queries_blocks_total",
        "prefixcache_resumed_hit_tokens_total",
        "prefixcache_resumed_queries_tokens_total",
    }


def test_every_alert_is_tested_to_fire_and_not_to_fire() -> None:
    text = ALERTS_TEST.read_text()
    for name in alert_names():
        cases = re.findall(rf"alertname: {name}\n +exp_alerts:(.*)", text)
        assert " []" in cases and "" in cases, name


def test_panels_have_ids_and_places_of_their_own() -> None:
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_selectors_are_read_as_prometheus_reads_them() -> None:
    query = 'sum by (le, method) (rate(prefixcache_rpc_total{code=~"a}|b", method="x"}[5m])) > up'
    assert list(selectors(query)) == [
        Selector("prefixcache_rpc_total", frozenset({"code", "method"})),
        Selector("up", frozenset()),
    ]
    assert grouping_labels(query) == {"le", "method"}

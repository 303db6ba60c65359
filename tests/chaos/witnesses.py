"""What a daemon says of itself beside its RPCs: metrics and the record, which must say the same."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from prefixcache import PoolStats
from tests.chaos.report import Figures

_EQUAL = {
    "prefixcache_requests_total": "requests",
    "prefixcache_queries_tokens_total": "queries_tokens",
    "prefixcache_hit_tokens_total": "hit_tokens",
    "prefixcache_sequences": "sequences",
    "prefixcache_sessions": "sessions",
}
"""Metrics that are a number of GetStats."""
_TIMEOUT_S = 20.0


class Witnesses:
    """options: of `serve`, for the metrics and a record in that file."""

    def __init__(self, record: Path) -> None:
        self.options = ("--metrics-listen", "127.0.0.1:0", "--record", str(record))
        self._record = record

    def scrape(self, log: Path) -> dict[str, float]:
        """Metrics without labels, by name. log: the daemon's, which says where they are."""
        found = _get(_metrics_address(log), "/metrics")
        return {
            sample.name: sample.value
            for family in text_string_to_metric_families(found)
            for sample in family.samples
            if not sample.labels
        }

    def check_metrics(self, figures: Figures, log: Path, stats: PoolStats) -> None:
        """stats: of a daemon that nobody has called since."""
        metrics = self.scrape(log)
        told = {name: metrics.get(name) for name in _EQUAL}
        expected = {name: float(getattr(stats, counter)) for name, counter in _EQUAL.items()}
        if told != expected:
            figures.problems.append(f"metrics say {told}, and GetStats {expected}")

    def check_record(self, figures: Figures, stats: PoolStats) -> None:
        """The daemon has ended: all sequences that have read the cache are in it."""
        tokens = {False: 0, True: 0}
        for request in self._requests():
            if request.get("cache_use") != "no_read":
                tokens[request.get("resumed", False)] += request["input_length"]
        expected = {False: stats.queries_tokens, True: stats.resumed_queries_tokens}
        if tokens != expected:
            figures.problems.append(f"the record has {tokens} tokens, and GetStats {expected}")

    def _requests(self) -> Iterator[dict[str, Any]]:
        with self._record.open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)


def _metrics_address(log: Path) -> str:
    events = [json.loads(line) for line in log.read_text("utf-8").splitlines() if line[:1] == "{"]
    return str([event for event in events if event["event"] == "serving metrics"][-1]["address"])


def _get(address: str, path: str) -> str:
    connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read().decode()
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise RuntimeError(f"{path} answers {response.status}: {body}")
    return body

"""Metrics, alert rules and the dashboard's queries, checked by Prometheus' own tool."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from prefixcache.server.daemon import CacheOptions
from prefixcache.server.metrics import make_registry
from tests.deploy.files import ALERTS, ALERTS_TEST, DOCKER, SCRAPE
from tests.deploy.test_queries import dashboard_queries
from tests.support.daemon import running_daemon
from tests.support.stubs import Peer, Refused, connected

pytestmark = pytest.mark.promtool


def promtool(*arguments: str, stdin: bytes = b"") -> str:
    """What it prints; fails if it finds anything."""
    program = os.environ.get("PROMTOOL") or shutil.which("promtool")
    assert program is not None, "no promtool on PATH: `make promtool` fetches one"
    done = subprocess.run(
        [program, *arguments],
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
        check=False,
    )
    printed = done.stdout.decode()
    assert done.returncode == 0, printed
    return printed


def test_a_scrape_has_nothing_to_be_said_about() -> None:
    with running_daemon(CacheOptions(8, 4)) as running, connected(running.target) as stubs:
        peer = Peer(stubs)
        for _ in range(3):
            sequence_id = peer.allocate(range(9)).sequence_id
            peer.commit(sequence_id, 0, 9)
            peer.free(sequence_id)
        with pytest.raises(Refused):
            peer.allocate(range(100))
        text = generate_latest(make_registry(running.daemon, running.server.call_counts))
    assert promtool("check", "metrics", stdin=text) == ""


@pytest.mark.parametrize("config", [DOCKER / "prometheus.yml", SCRAPE], ids=lambda path: path.name)
def test_the_configurations_are_prometheus(config: Path, tmp_path: Path) -> None:
    shutil.copy(ALERTS, tmp_path)
    copy = shutil.copy(config, tmp_path / "prometheus.yml")
    assert "SUCCESS" in promtool("check", "config", str(copy))


def test_the_alert_rules_are_rules() -> None:
    assert "SUCCESS" in promtool("check", "rules", str(ALERTS))


def test_alerts_fire_when_they_should_and_not_otherwise() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(ALERTS_TEST))


def test_the_dashboards_queries_are_promql(tmp_path: Path) -> None:
    rules = [
        {"record": f"query_{number}", "expr": re.sub(r"\$__rate_interval", "1m", query)}
        for number, query in enumerate(dashboard_queries())
    ]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(path))

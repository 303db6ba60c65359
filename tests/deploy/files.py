"""What `deploy` holds for Prometheus, Grafana and systemd."""

from __future__ import annotations

import re
from pathlib import Path

_FOLDER = Path(__file__).parents[2] / "deploy"
ALERTS = _FOLDER / "prometheus" / "alerts.yml"
ALERTS_TEST = _FOLDER / "prometheus" / "alerts_test.yml"
UNIT = _FOLDER / "systemd" / "prefixcache.service"
DASHBOARD = _FOLDER / "grafana" / "prefixcache.json"


def alert_names() -> list[str]:
    return re.findall(r"- alert: (\w+)", ALERTS.read_text())

"""The systemd unit, checked by systemd's own tool where there is one, and against the daemon."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prefixcache.address import SYSTEM_FOLDER
from prefixcache.options import OPTIONS, make_config
from tests.deploy.files import UNIT, USERS

_ANALYZE = shutil.which("systemd-analyze")
_SYSUSERS = shutil.which("systemd-sysusers")


def service() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(strict=True, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(UNIT.read_text())
    return unit["Service"]


@pytest.mark.skipif(_ANALYZE is None, reason="no systemd here")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    program = service()["ExecStart"].split()[0]
    copy.write_text(UNIT.read_text().replace(program, sys.executable))
    assert _ANALYZE is not None
    done = subprocess.run(
        [_ANALYZE, "verify", str(copy)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_unit_fits_the_daemons_defaults() -> None:
    unit = service()
    assert Path("/run", unit["RuntimeDirectory"]) == Path(SYSTEM_FOLDER)
    config = make_config({"listen": ("127.0.0.1:0",), "storage": "none", "num_blocks": 1})
    assert int(unit["TimeoutStopSec"]) > config.process.drain_timeout
    assert int(unit["LimitNOFILE"]) > 2 * config.limits.max_connections
    assert unit["ExecReload"] == "/bin/kill -HUP $MAINPID"
    flags = {word for word in unit["ExecStart"].split() if word.startswith("--")}
    assert flags <= {option.flag for option in OPTIONS.values()} | {"--config"}


@pytest.mark.skipif(_SYSUSERS is None, reason="no systemd here")
def test_systemd_makes_the_user_and_the_group_of_the_unit(tmp_path: Path) -> None:
    assert _SYSUSERS is not None
    (tmp_path / "etc").mkdir()
    done = subprocess.run(
        [_SYSUSERS, "--dry-run", f"--root={tmp_path}", str(USERS)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    unit = service()
    assert f"Creating group '{unit['Group']}'" in done.stderr
    assert f"Creating user '{unit['User']}'" in done.stderr

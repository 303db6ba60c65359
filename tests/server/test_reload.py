"""SIGHUP's part of the daemon: all of a new configuration is put in force, or nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import structlog

from prefixcache.config import ServeConfig
from prefixcache.errors import InvalidArgumentError
from prefixcache.options import make_config
from prefixcache.server.reload import Reload

OLD = {"listen": ("127.0.0.1:0",), "storage": "none", "num_blocks": 4}


class Level:
    """A part that has the log level of the configuration in force."""

    def __init__(self) -> None:
        self.value = "as before"

    def prepare(self, config: ServeConfig) -> Callable[[], None]:
        return lambda: setattr(self, "value", config.process.log_level)


def reload_of(new: dict[str, object]) -> Reload:
    return Reload(make_config(OLD), lambda: make_config({**OLD, **new}))


def test_every_part_gets_the_new_configuration() -> None:
    reload, first, second = reload_of({"log_level": "debug"}), Level(), Level()
    reload.add(first.prepare, "log_level")
    reload.add(second.prepare)
    assert reload.run()
    assert (first.value, second.value) == ("debug", "debug")


def test_a_bad_configuration_changes_nothing_and_is_logged() -> None:
    reload, level = reload_of({"log_level": "loud"}), Level()
    reload.add(level.prepare, "log_level")
    with structlog.testing.capture_logs() as log:
        assert not reload.run()
    assert level.value == "as before"
    assert (log[0]["log_level"], len(log)) == ("error", 1)
    assert "--log-level" in log[0]["problem"]


@pytest.mark.parametrize("bad_comes_first", [False, True])
def test_one_bad_part_keeps_all_of_them_as_they_are(bad_comes_first: bool) -> None:
    def bad(config: ServeConfig) -> Callable[[], None]:
        raise InvalidArgumentError("--some-file", "is not what it should be")

    reload, level = reload_of({"log_level": "debug"}), Level()
    for prepare in (bad, level.prepare) if bad_comes_first else (level.prepare, bad):
        reload.add(prepare)
    with structlog.testing.capture_logs() as log:
        assert not reload.run()
    assert level.value == "as before"
    assert "--some-file" in log[0]["problem"]


def test_settings_that_need_a_restart_are_named_without_their_values() -> None:
    reload = reload_of({"num_blocks": 5, "hash_seed": "a seed of some length"})
    with structlog.testing.capture_logs() as log:
        assert reload.run()
    (warning,) = (line for line in log if line["log_level"] == "warning")
    assert warning["settings"] == ["--num-blocks", "--hash-seed"]
    assert "a seed of some length" not in str(log)


def test_settings_that_a_part_puts_in_force_need_no_restart() -> None:
    reload = reload_of({"log_level": "debug"})
    reload.add(Level().prepare, "log_level")
    with structlog.testing.capture_logs() as log:
        assert reload.run()
    assert [line["event"] for line in log] == ["reloaded"]

"""What changes while the daemon serves: settings and files that SIGHUP has read again.

All or nothing: each part first checks its share of the new configuration, and none is applied if
one of them is bad.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from prefixcache.config import ServeConfig
from prefixcache.errors import InvalidArgumentError
from prefixcache.options import OPTIONS

_log = structlog.get_logger(__name__)

Apply = Callable[[], object]
Prepare = Callable[[ServeConfig], Apply]
"""Reads and checks a part of a configuration, files that it names included, and changes nothing;
gives what puts it in force, which cannot fail. Raises InvalidArgumentError."""


class Reload:
    """config: the one in force. read_config: reads it again; raises InvalidArgumentError."""

    def __init__(self, config: ServeConfig, read_config: Callable[[], ServeConfig]) -> None:
        self._config = config
        self._read_config = read_config
        self._parts: list[Prepare] = []
        self._keys: set[str] = set()

    def add(self, prepare: Prepare, *keys: str) -> None:
        """A part to reload from now on. keys: the settings that it puts in force."""
        self._parts.append(prepare)
        self._keys.update(keys)

    def run(self) -> bool:
        """Whether the new configuration is in force now; if not, the log says why."""
        try:
            config = self._read_config()
            changes = [prepare(config) for prepare in self._parts]
        except InvalidArgumentError as error:
            _log.error("reload refused, nothing is changed", problem=str(error))
            return False
        for apply in changes:
            apply()
        _log.info("reloaded", settings=sorted(self._keys))
        late = [
            option.flag
            for key, option in OPTIONS.items()
            if key not in self._keys and option.value_in(config) != option.value_in(self._config)
        ]
        if late:
            _log.warning("changed settings that need a restart", settings=late)
        return True

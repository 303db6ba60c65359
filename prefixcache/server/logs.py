"""How the daemon logs: structlog to standard error, as lines for people or as JSON."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress

import structlog

from prefixcache.server.calls import add_call_fields


def configure_logs(log_format: str, level: str) -> None:
    """log_format: "console", "json", or "auto" (console on a terminal). level: a logging name.

    May be called again: loggers that were used before follow.
    """
    as_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    renderer: structlog.types.Processor = (
        structlog.processors.JSONRenderer()
        if as_json
        # A traceback without local variables: those hold prompts, salts and the hash seed.
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    processors: list[structlog.types.Processor] = [
        add_call_fields,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if as_json:
        processors += [structlog.processors.format_exc_info, _names_first]
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        logger_factory=structlog.WriteLoggerFactory(_StandardError()),  # type: ignore[arg-type]
    )


class _StandardError:
    """A file whose reader may go away: the daemon goes on, and what it logs then is lost.

    Nothing is buffered: the rest would fail once more at the end of the process, and be its exit
    code.
    """

    def write(self, text: str) -> None:
        data = memoryview(text.encode(errors="backslashreplace"))
        with suppress(OSError):
            while data:
                data = data[os.write(sys.stderr.fileno(), data) :]

    def flush(self) -> None:
        """Nothing to do."""


def _names_first(
    logger: object, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """When, how bad and what stand first in a line of JSON, for people who read it all the same."""
    first = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event}
    return {**first, **event}

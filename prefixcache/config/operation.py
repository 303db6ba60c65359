"""What an operator sees of the daemon, and its process."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import model_validator

from prefixcache.address import Address, TcpAddress, parse_address
from prefixcache.config.section import MAX_SECONDS, Section, Size, setting
from prefixcache.errors import InvalidArgumentError
from prefixcache.sizes import format_size

DEFAULT_EVENT_BUFFER_BYTES = 64 * 2**20


class MetricsSection(Section):
    title: ClassVar[str] = "Metrics"

    metrics_listen: str | None = setting(
        None,
        "Address that answers HTTP with Prometheus metrics (/metrics), a status page (/), /healthz "
        "and /readyz: host:port, [ipv6]:port or unix:/path. Left out, there is none.",
    )

    @property
    def address(self) -> Address | None:
        """`metrics_listen`, parsed."""
        return None if self.metrics_listen is None else parse_address(self.metrics_listen)

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            _ = self.address
        except ValueError as error:
            raise InvalidArgumentError("--metrics-listen", str(error)) from None
        return self


class TracingSection(Section):
    title: ClassVar[str] = "Tracing"

    otlp_endpoint: str | None = setting(
        None,
        "URL of an OpenTelemetry collector, such as http://127.0.0.1:4317, that gets a span for "
        "each call over OTLP. The environment's OTEL_* say the rest. Left out, there are none.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.otlp_endpoint is not None and not _is_web_address(self.otlp_endpoint):
            raise InvalidArgumentError(
                "--otlp-endpoint", f"is {self.otlp_endpoint!r}, must be http://... or https://..."
            )
        return self


class EventsSection(Section):
    title: ClassVar[str] = "Events"

    event_buffer: Size | None = setting(
        None,
        "Keep the last events of the cache, so many bytes of them, for `prefixcache events` and "
        f"other watchers. Left out, there are none, or {format_size(DEFAULT_EVENT_BUFFER_BYTES)} "
        "with --events-zmq.",
        unit="bytes",
        ge=2**20,
    )
    events_zmq: str | None = setting(
        None,
        "Address that publishes events over ZeroMQ as vLLM does: tcp://host:port, where * is any "
        "host.",
    )
    events_zmq_replay: str | None = setting(
        None, "Address where a subscriber of --events-zmq asks for events that it has missed."
    )
    events_topic: str = setting("", "Topic of the messages of --events-zmq.", max_length=256)

    @property
    def buffer_bytes(self) -> int:
        """0 for no events."""
        default = 0 if self.events_zmq is None else DEFAULT_EVENT_BUFFER_BYTES
        return default if self.event_buffer is None else self.event_buffer

    @property
    def open_endpoints(self) -> tuple[str, ...]:
        """Those that other machines may reach."""
        given = (self.events_zmq, self.events_zmq_replay)
        return tuple(text for text in given if text is not None and not _is_loopback(text))

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("events_zmq", "events_zmq_replay"):
            endpoint = getattr(self, name)
            if endpoint is not None:
                try:
                    _is_loopback(endpoint)
                except ValueError as error:
                    flag = "--" + name.replace("_", "-")
                    raise InvalidArgumentError(flag, str(error)) from None
        if self.events_zmq is None:
            if self.events_zmq_replay is not None:
                raise InvalidArgumentError("--events-zmq-replay", "needs --events-zmq")
            if self.events_topic:
                raise InvalidArgumentError("--events-topic", "needs --events-zmq")
        return self


class RecordSection(Section):
    title: ClassVar[str] = "Record of requests"

    record: Path | None = setting(
        None,
        "File for a record of the prompts that come, as hashes of their blocks, which `prefixcache "
        "analyze` and `replay` read. Only its owner may read it. An earlier one becomes FILE.1.",
    )
    record_limit: Size = setting(
        2**30,
        "Largest size of the record. At half of it, the file becomes FILE.1 and a new one begins.",
        unit="bytes",
        ge=2**16,
    )


class ProcessSection(Section):
    title: ClassVar[str] = "Process"

    threads: int | None = setting(
        None,
        "Threads of one attention call; torch's own choice if left out.",
        unit="threads",
        ge=1,
        le=1024,
    )
    drain_timeout: float = setting(
        30.0, "Wait so long for running calls when stopped.", unit="seconds", ge=0, le=MAX_SECONDS
    )
    log_format: Literal["auto", "console", "json"] = setting(
        "auto", "Form of the log on stderr; auto is console on a terminal, else json."
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Least severity that is logged."
    )


def _is_web_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _is_loopback(endpoint: str) -> bool:
    """Of ZeroMQ. Raises ValueError for one that is not `tcp://host:port`."""
    scheme, separator, text = endpoint.partition("://")
    if (scheme, separator) != ("tcp", "://"):
        raise ValueError(f"{endpoint!r} is no address; write tcp://host:port")
    if text.startswith("*:"):
        parse_address(f"0.0.0.0{text[1:]}")
        return False
    address = parse_address(text)
    if not isinstance(address, TcpAddress):
        raise ValueError(f"{endpoint!r} is no address; write tcp://host:port")
    return address.is_loopback

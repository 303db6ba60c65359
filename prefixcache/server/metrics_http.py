"""The HTTP of `--metrics-listen`: /metrics for Prometheus, /healthz and /readyz for supervisors.

More pages are given to it.

A server of its own, in one thread with an event loop: a peer that sends or reads slowly costs a
connection and no thread. A connection carries one GET and has `REQUEST_TIMEOUT_S` for all of it;
when there are too many, the one that has been open longest is cut. The standard library's server
was rejected: it takes a thread a connection, and its timeouts begin anew with every byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qs

import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from prefixcache.address import Address, TcpAddress, UnixAddress
from prefixcache.errors import InvalidArgumentError

_log = structlog.get_logger(__name__)

MAX_CONNECTIONS = 64
MAX_REQUEST_BYTES = 16 * 2**10
"""Of the request line and the headers; a body is not read."""
REQUEST_TIMEOUT_S = 10.0
_BACKLOG = 128
_PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Reply:
    """headers: besides those of every reply; no line breaks."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[str, str], ...] = ()


class MetricsServer:
    """Serves a registry on one address from `start` to `close`.

    address: port 0 lets the kernel choose; `self.address` has the port. is_ready: whether calls
    are served now. Raises InvalidArgumentError if the address cannot be bound; the folder of a
    Unix socket, and who owns its path, is the caller's business. pages: more of them, by path.
    """

    def __init__(
        self,
        address: Address,
        registry: CollectorRegistry,
        is_ready: Callable[[], bool],
        pages: Mapping[str, Callable[[], Reply]] | None = None,
        *,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        self._registry = registry
        self._is_ready = is_ready
        self._pages = pages or {}
        self._request_timeout_s = request_timeout_s
        self._open: dict[asyncio.StreamWriter, asyncio.Task[None]] = {}
        self._socket = _bind(address)
        self.address: Address = address
        if isinstance(address, TcpAddress):
            self.address = TcpAddress(address.host, self._socket.getsockname()[1])
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Returns once nothing is served any more; open connections are cut."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()
        self._loop.close()
        self._socket.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._accept, sock=self._socket, limit=MAX_REQUEST_BYTES
        )
        await self._ended.wait()
        server.close()
        ending = list(self._open.values())
        while self._open:
            self._cut_oldest()
        await asyncio.gather(*ending)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) == MAX_CONNECTIONS:
            self._cut_oldest()
        self._open[writer] = self._loop.create_task(self._serve_one(reader, writer))

    def _cut_oldest(self) -> None:
        writer = next(iter(self._open))
        del self._open[writer]
        writer.transport.abort()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The peer may be too slow, or go away.
        with contextlib.suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            async with asyncio.timeout(self._request_timeout_s):
                writer.write(_encoded(await self._answer(reader)))
                writer.close()
                await writer.wait_closed()
        self._open.pop(writer, None)
        writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader) -> Reply:
        try:
            head = await reader.readuntil(_HEAD_END)
        except asyncio.LimitOverrunError:
            text = f"a request may have {MAX_REQUEST_BYTES} bytes"
            return _plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text)
        line, *headers = head.removesuffix(_HEAD_END).decode("latin-1").split("\r\n")
        words = line.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _plain(HTTPStatus.BAD_REQUEST, "this is no HTTP/1 request")
        method, target, _ = words
        if method != "GET":
            return _plain(HTTPStatus.METHOD_NOT_ALLOWED, "GET is all that there is")
        try:
            return self._page(target, headers)
        except Exception:  # noqa: BLE001 - the border: a scrape that fails is said in the log
            _log.exception("metrics failed", target=target)
            return _plain(HTTPStatus.INTERNAL_SERVER_ERROR, "see the daemon's log")

    def _page(self, target: str, headers: list[str]) -> Reply:
        path, _, query = target.partition("?")
        match path:
            case "/metrics":
                return self._metrics(parse_qs(query).get("name[]"), headers)
            case "/healthz":
                return _plain(HTTPStatus.OK, "alive")
            case "/readyz" if self._is_ready():
                return _plain(HTTPStatus.OK, "serving")
            case "/readyz":
                return _plain(HTTPStatus.SERVICE_UNAVAILABLE, "not serving")
        if path in self._pages:
            return self._pages[path]()
        there = ", ".join(("/metrics", "/healthz", "/readyz", *self._pages))
        return _plain(HTTPStatus.NOT_FOUND, f"there are {there}")

    def _metrics(self, names: list[str] | None, headers: list[str]) -> Reply:
        """names: of the samples asked for, None for all."""
        registry = self._registry
        collector = registry.restricted_registry(names) if names else registry
        if _accepts_openmetrics(headers):
            body = openmetrics.generate_latest(collector)  # type: ignore[no-untyped-call]
            return Reply(HTTPStatus.OK, body, openmetrics.CONTENT_TYPE_LATEST)
        body = generate_latest(collector)
        return Reply(HTTPStatus.OK, body, _PROMETHEUS_TEXT)


def _accepts_openmetrics(headers: list[str]) -> bool:
    for header in headers:
        name, _, value = header.partition(":")
        if name.lower() == "accept" and "application/openmetrics-text" in value.lower():
            return True
    return False


def _plain(status: HTTPStatus, text: str) -> Reply:
    return Reply(status, f"{text}\n".encode())


def _encoded(reply: Reply) -> bytes:
    lines = [
        f"HTTP/1.1 {reply.status.value} {reply.status.phrase}",
        f"Content-Type: {reply.content_type}",
        f"Content-Length: {len(reply.body)}",
        "Allow: GET",
        "Connection: close",
        *(f"{name}: {value}" for name, value in reply.headers),
    ]
    return "\r\n".join(lines).encode("latin-1") + _HEAD_END + reply.body


def _bind(address: Address) -> socket.socket:
    try:
        if isinstance(address, UnixAddress):
            return _bind_unix(address.path)
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        return socket.create_server(
            (address.host, address.port), family=found[0][0], backlog=_BACKLOG
        )
    except OSError as error:
        raise InvalidArgumentError(
            "metrics_listen", f"cannot listen on {address}: {error.strerror}"
        ) from error


def _bind_unix(path: str) -> socket.socket:
    with contextlib.ExitStack() as undo:
        listening = undo.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(path)
        listening.listen(_BACKLOG)
        undo.pop_all()
    return listening

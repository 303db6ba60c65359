"""A peer that speaks HTTP/2 by hand (RFC 9113), so that it can do what no gRPC client does."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 4, 6, 7, 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_MAX_FRAME = 2**14
_INITIAL_WINDOW_SIZE = 4
MAX_CONCURRENT_STREAMS = 3
"""A setting's number."""


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


class RawPeer:
    """Sends calls, and reads nothing of their replies.

    target: `unix:/path`. None of them may be sent before `open_window`. Use as a context manager.
    """

    def __init__(self, target: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(20.0)
        self._socket.connect(target.removeprefix("unix:"))
        self._next_stream = 1
        self._socket.sendall(_PREFACE)
        self._send(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, 0))
        self._send(_SETTINGS, _ACK, 0, b"")

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def open_window(self, num_bytes: int) -> None:
        """So much of every reply, and of all together, may be sent from now on."""
        self._send(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, num_bytes))
        self._send(_WINDOW_UPDATE, 0, 0, struct.pack(">I", num_bytes))

    def call(self, path: str, message: bytes) -> None:
        """Begin a unary call. path: `/package.Service/Method`."""
        stream = self.begin(path)
        data = struct.pack(">BI", 0, len(message)) + message
        for start in range(0, len(data), _MAX_FRAME):
            part = data[start : start + _MAX_FRAME]
            is_last = start + len(part) == len(data)
            self._send(_DATA, _END_STREAM if is_last else 0, stream, part)

    def begin(self, path: str) -> int:
        """Send the headers of a call, and no request; returns the number of its stream."""
        stream = self._next_stream
        self._next_stream += 2
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "localhost",
            "content-type": "application/grpc",
            "te": "trailers",
        }
        block = b"".join(_literal(name) for name in headers.items())
        self._send(_HEADERS, _END_HEADERS, stream, block)
        return stream

    def send_pings(self, count: int) -> None:
        self._socket.sendall(count * _frame(_PING, 0, 0, bytes(8)))

    def ping(self) -> None:
        """Send a PING and wait for its answer; the connection must stay."""
        self.send_pings(1)
        for frame in self._frames():
            assert frame.kind != _GOAWAY, frame.payload
            if frame.kind == _PING and frame.flags & _ACK:
                return

    def goodbye(self) -> str:
        """Why the daemon ends the connection, which it must."""
        goaway = next(frame for frame in self._frames() if frame.kind == _GOAWAY)
        return goaway.payload[8:].decode()

    def settings(self) -> dict[int, int]:
        """What the daemon says in its first frame."""
        frame = next(self._frames())
        assert frame.kind == _SETTINGS
        return dict(struct.iter_unpack(">HI", frame.payload))

    def _frames(self) -> Iterator[Frame]:
        while True:
            high, low, kind, flags, stream = struct.unpack(">BHBBI", self._read(9))
            yield Frame(kind, flags, stream, self._read(high << 16 | low))

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self._socket.recv(count - len(data))
            if not part:
                raise ConnectionResetError("the daemon has closed the connection")
            data += part
        return data

    def _send(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self._socket.sendall(_frame(kind, flags, stream, payload))


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    length = len(payload)
    return struct.pack(">BHBBI", length >> 16, length & 0xFFFF, kind, flags, stream) + payload


def _literal(header: tuple[str, str]) -> bytes:
    """A header field without indexing or Huffman code (RFC 7541, section 6.2.2)."""
    name, value = (text.encode() for text in header)
    assert len(name) < 127 > len(value)
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value

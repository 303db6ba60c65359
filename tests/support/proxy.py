"""A link between a client and a daemon that a test can cut: forwards bytes between Unix sockets."""

from __future__ import annotations

import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class Proxy:
    """`target` is what the client is told. Connections are refused while `is_down`."""

    def __init__(self, path: Path, behind: str) -> None:
        self.target = f"unix:{path}"
        self.is_down = False
        self.num_connections = 0
        self._behind = behind.removeprefix("unix:")
        self._open: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Both ends see the connection close."""
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open.clear()

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                front, _ = self._listener.accept()
                if self.is_down:
                    front.close()
                    continue
                self.num_connections += 1
                back = socket.socket(socket.AF_UNIX)
                back.connect(self._behind)
                self._open += [front, back]
                for source, sink in ((front, back), (back, front)):
                    threading.Thread(target=_forward, args=(source, sink), daemon=True).start()


def _forward(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxy_to(target: str) -> Iterator[Proxy]:
    with tempfile.TemporaryDirectory() as folder:
        proxy = Proxy(Path(folder) / "proxy.sock", target)
        try:
            yield proxy
        finally:
            proxy.close()

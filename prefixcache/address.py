"""Where a daemon listens and a client connects: `host:port`, `[ipv6]:port`, `unix:/path`.

Owns the two forms of an address, the default socket, and the rules for the folder of a socket.
Owns no connection. Parsing is pure; only the functions that say so look at the host. Stateless.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass

from prefixcache.errors import InvalidArgumentError

MAX_SOCKET_PATH_BYTES = 107
"""Linux keeps a socket's path in 108 bytes, the last of which is 0 (unix(7), `sun_path`)."""
SOCKET_NAME = "prefixcache.sock"
PEER_SUFFIX = ".peer"
"""After a daemon's socket: the one where it learns which user a client is."""
SYSTEM_FOLDER = "/run/prefixcache"

_FORMS = "write host:port, [ipv6]:port or unix:/path"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """A socket in the file system; a relative path is relative to the working directory."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"

    @property
    def target(self) -> str:
        """What gRPC takes for it; it decodes percent signs."""
        return "unix:" + self.path.replace("%", "%25")

    @property
    def folder(self) -> str:
        return os.path.dirname(self.path) or "."


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A TCP port. `host` has no brackets. Port 0 lets the kernel choose, when listening."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def target(self) -> str:
        """What gRPC takes for it."""
        return str(self)

    @property
    def is_loopback(self) -> bool:
        """False for every name but `localhost`: what a name resolves to may change."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host.lower() == "localhost"


Address = UnixAddress | TcpAddress


def parse_address(text: str) -> Address:
    """Read an address. Raises ValueError, which says what is wrong with it."""
    if text.startswith("unix:"):
        return _parse_unix(text)
    host, colon, port = text.rpartition(":")
    if not colon:
        raise ValueError(f"{text!r} is no address; {_FORMS}")
    if not host:
        raise ValueError(f"{text!r} has no host; write 127.0.0.1{text} or 0.0.0.0{text}")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise ValueError(f"{text!r}: {host!r} is no IPv6 address") from None
    elif ":" in host:
        raise ValueError(f"{text!r} is no address; {_FORMS}")
    elif not re.fullmatch(r"[A-Za-z0-9._-]+", host):
        raise ValueError(f"{text!r}: {host!r} is no host; {_FORMS}")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError(f"{text!r}: the port must be 0 to 65535, is {port!r}")
    return TcpAddress(host, int(port))


def _parse_unix(text: str) -> UnixAddress:
    path = text.removeprefix("unix:")
    if path.startswith("//"):  # unix:///path, the URI form
        path = path[2:]
        if not path.startswith("/"):
            raise ValueError(f"{text!r} names a host; write unix:/path")
    if not path or path.endswith("/"):
        raise ValueError(f"{text!r} names no socket file")
    if "\0" in path:
        raise ValueError(f"{text!r} has a NUL byte in its path")
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"{text!r}: the path has {num_bytes} bytes, a Unix socket's may have "
            f"{MAX_SOCKET_PATH_BYTES}"
        )
    return UnixAddress(path)


def check_socket_folder(address: UnixAddress) -> None:
    """Look at the folder of a socket that is to be made.

    Raises ValueError if it does not exist, or if every user of the host may write to it: they
    could put a socket of their own there first and be taken for the daemon.
    """
    try:
        mode = os.stat(address.folder).st_mode
    except OSError as error:
        raise ValueError(f"{str(address)!r}: folder {address.folder}: {error.strerror}") from None
    if not stat.S_ISDIR(mode):
        raise ValueError(f"{str(address)!r}: {address.folder} is not a folder")
    if mode & stat.S_IWOTH:
        raise ValueError(
            f"{str(address)!r}: every user can write to {address.folder}; "
            "choose a folder of your own, mode 0700 for instance"
        )


def default_listen_address(environ: Mapping[str, str]) -> UnixAddress:
    """The socket of a daemon without `--listen`; looks at `/run/prefixcache`.

    Raises InvalidArgumentError where there is no folder for it.
    """
    runtime_folder = environ.get("XDG_RUNTIME_DIR")
    if runtime_folder:
        return UnixAddress(os.path.join(runtime_folder, SOCKET_NAME))
    if _is_ours(SYSTEM_FOLDER):
        return UnixAddress(os.path.join(SYSTEM_FOLDER, SOCKET_NAME))
    raise InvalidArgumentError(
        "--listen",
        f"needed, for XDG_RUNTIME_DIR is unset and {SYSTEM_FOLDER} is not a folder of this user; "
        "for instance --listen 127.0.0.1:50051",
    )


def default_target(environ: Mapping[str, str]) -> UnixAddress:
    """Where a client looks for a daemon with the default socket: the user's, or the system's.

    Raises InvalidArgumentError where there can be neither.
    """
    runtime_folder = environ.get("XDG_RUNTIME_DIR")
    folders = [runtime_folder, SYSTEM_FOLDER] if runtime_folder else [SYSTEM_FOLDER]
    sockets = [os.path.join(folder, SOCKET_NAME) for folder in folders]
    for path in sockets:
        if os.path.exists(path):
            return UnixAddress(path)
    if not runtime_folder:
        raise InvalidArgumentError(
            "--target",
            f"needed, for XDG_RUNTIME_DIR is unset and {sockets[0]} does not exist",
        )
    return UnixAddress(sockets[0])


def _is_ours(folder: str) -> bool:
    try:
        status = os.stat(folder)
    except OSError:
        return False
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & stat.S_IWOTH
    )

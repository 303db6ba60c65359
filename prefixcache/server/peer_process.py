"""The process at the other end of a Unix socket, as the kernel knows it. No state."""

from __future__ import annotations

import errno
import os
import socket
import struct
from dataclasses import dataclass

_SO_PEERGROUPS = 59
_SO_PEERPIDFD = 77
_MAX_GROUPS_BYTES = 1024
"""The most that Python asks the kernel for."""
_CREDENTIALS = struct.Struct("=iII")
_GROUP = struct.Struct("=I")
_DESCRIPTOR = struct.Struct("=i")


@dataclass(frozen=True, slots=True)
class Peer:
    """A process and its user at the time it connected, with its groups (only the first if it has
    more than 256).

    pid: 0 for a process that cannot be seen from here.
    """

    pid: int
    uid: int
    gids: frozenset[int]


def peer_of(connected: socket.socket) -> Peer:
    """Raises OSError if it is gone."""
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(data)
    try:
        groups = connected.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_GROUPS_BYTES)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        groups = b""  # more than fit: its own group alone counts
    return Peer(pid, uid, frozenset((gid, *(group for (group,) in _GROUP.iter_unpack(groups)))))


def open_pidfd(connected: socket.socket, peer: Peer) -> int:
    """A descriptor that can be read from once the process has ended (pidfd_open(2)).

    The caller closes it. Raises OSError if the process is gone.
    """
    try:
        data = connected.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, _DESCRIPTOR.size)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
    else:
        (pidfd,) = _DESCRIPTOR.unpack(data)
        return int(pidfd)
    # Before Linux 6.5 the number is all there is. It may have become another's only if the process
    # has ended, and its connection with it.
    pidfd = os.pidfd_open(peer.pid)
    if not _is_connected(connected):
        os.close(pidfd)
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return pidfd


def _is_connected(connected: socket.socket) -> bool:
    try:
        return bool(connected.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False

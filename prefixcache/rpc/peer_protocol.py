"""Messages of the peer socket, `NAME.peer` beside a daemon's Unix socket `NAME`.

What gRPC cannot do goes there: the kernel says who is at the other end, and descriptors travel
with messages (SCM_RIGHTS, unix(7)). Both ways a message is its length (4 bytes, big-endian), one
byte that says what kind it is, and the rest. The length counts the kind and the rest. A process
asks, and waits for the answer before it asks again; the daemon never speaks unasked. An answer is
of the request's kind, or REFUSED, with the reason in UTF-8; the connection is then closed.
Descriptors come with the first byte of their message.
"""

from __future__ import annotations

import socket
import struct
from array import array
from collections.abc import Sequence
from enum import IntEnum, unique

HEADER = struct.Struct(">I")
ARENA_ID = struct.Struct(">Q")
MAX_REQUEST_BYTES = 8192
MAX_ANSWER_BYTES = 2**20
MAX_DESCRIPTORS = 4
"""Of one message. More end the connection."""
_MAX_RIGHTS = 253
"""What the kernel lets a message have (SCM_MAX_FD). What has no room here it closes by itself."""


@unique
class PeerMessage(IntEnum):
    """Kinds. What is in the rest is said by those who answer them."""

    REFUSED = 0
    TICKET = 1
    """`prefixcache.server.peer_tickets`"""
    ARENA = 2
    """`prefixcache.server.peer_arenas`"""
    ATTACH = 3
    """`prefixcache.server.attachments`"""
    DETACH = 4
    """`prefixcache.server.attachments`"""


def message_of(kind: int, rest: bytes = b"") -> bytes:
    """A whole message."""
    return HEADER.pack(1 + len(rest)) + bytes((kind,)) + rest


def receive(connected: socket.socket, num_bytes: int, descriptors: list[int]) -> bytes:
    """Up to so many bytes, none at the end; descriptors that come with them are added to the list.

    Raises ConnectionAbortedError if there are more than a message may have, or than this process
    can open, and what `recvmsg` raises. `socket.recv_fds` of Python 3.11 drops its flags, and
    children would inherit them.
    """
    space = socket.CMSG_LEN(_MAX_RIGHTS * array("i").itemsize)
    data, controls, flags, _ = connected.recvmsg(num_bytes, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in controls:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.extend(array("i", content))
    if flags & socket.MSG_CTRUNC or len(descriptors) > MAX_DESCRIPTORS:
        raise ConnectionAbortedError("too many descriptors came")
    return data


def send(connected: socket.socket, message: bytes, descriptors: Sequence[int]) -> bool:
    """Whether it went as a whole. Raises OSError."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))]
    sent = connected.sendmsg([message], rights if descriptors else [], socket.MSG_NOSIGNAL)
    return sent == len(message)

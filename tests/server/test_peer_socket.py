"""The peer socket: requests and descriptors, whose process it is, and what peers cannot do."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

import pytest

from prefixcache.address import UnixAddress
from prefixcache.client import peer_connection
from prefixcache.client.peer_connection import PeerRefusedError
from prefixcache.rpc.peer_protocol import (
    MAX_ANSWER_BYTES,
    MAX_DESCRIPTORS,
    MAX_REQUEST_BYTES,
    PeerMessage,
    message_of,
)
from prefixcache.server import peer_process, peer_socket
from prefixcache.server.peer_socket import (
    FIRST_ANSWER_TIMEOUT_S,
    MAX_UNCLOSED_A_USER,
    PeerAnswer,
    PeerConnection,
    PeerRequest,
    PeerSocket,
    peer_socket_path,
)
from tests.support.waiting import WAIT_S, until

KIND = PeerMessage.TICKET
ASK = message_of(KIND, b"hello")


class Owner:
    """Answers with what it was asked, and with its descriptors; keeps those of `b"keep"`."""

    def __init__(self) -> None:
        self.ended: SimpleQueue[PeerConnection] = SimpleQueue()
        self.process_ended: SimpleQueue[int] = SimpleQueue()
        self.connections: list[PeerConnection] = []
        self.kept: list[int] = []
        self.seen: list[int] = []

    def answer(self, connection: PeerConnection, request: PeerRequest) -> PeerAnswer:
        if request.rest == b"bug":
            raise ZeroDivisionError
        if request.rest == b"refuse":
            raise peer_socket.PeerRefusedError("not this")
        if connection not in self.connections:
            self.connections.append(connection)
            connection.on_end(lambda: self.ended.put(connection))
        if request.rest == b"watch":
            connection.on_process_end(lambda: self.process_ended.put(connection.peer.pid))
        self.seen = list(request.descriptors)
        if request.rest == b"keep":
            self.kept = list(request.descriptors)
            request.descriptors.clear()
        return PeerAnswer(request.rest, tuple(request.descriptors))


class Served:
    def __init__(self, path: Path, peers: PeerSocket, clock_s: list[float]) -> None:
        self.path, self.peers, self.clock_s = path, peers, clock_s
        self.owner = Owner()
        peers.answer(KIND, self.owner.answer)
        peers.listen(peer_socket_path(path))
        peers.start()

    @contextmanager
    def connection(self) -> Iterator[peer_connection.PeerConnection]:
        connected = peer_connection.PeerConnection(UnixAddress(str(self.path)))
        try:
            yield connected
        finally:
            connected.close()

    @contextmanager
    def raw(self) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX) as connected:
            connected.settimeout(WAIT_S)
            connected.connect(str(peer_socket_path(self.path)))
            yield connected


Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    with ExitStack() as opened:

        def start(**limits: int) -> Served:
            clock_s = [0.0]
            peers = PeerSocket(clock=lambda: clock_s[0], **limits)
            opened.callback(peers.close)
            return Served(tmp_path / "sock", peers, clock_s)

        yield start


def received(connected: socket.socket) -> tuple[int, bytes]:
    """Kind and rest of the next message."""
    with connected.makefile("rb", buffering=0) as file:
        header = file.read(4)
        assert header is not None
        (length,) = struct.unpack(">I", header)
        message = file.read(length)
        assert message is not None
    return message[0], message[1:]


def is_closed(connected: socket.socket) -> bool:
    try:
        return connected.recv(1) == b""
    except ConnectionResetError:
        return True


# ---- requests and answers


def test_requests_are_answered_one_after_another(serve: Serve) -> None:
    served = serve()
    with served.connection() as one, served.connection() as other:
        assert one.ask(KIND, b"a").rest == b"a"
        assert other.ask(KIND).rest == b""
        longest = bytes(MAX_REQUEST_BYTES - 1)
        assert one.ask(KIND, longest).rest == longest
        assert one.is_open


def test_a_request_may_come_in_pieces_and_many_at_once(serve: Serve) -> None:
    served = serve()
    with served.raw() as one:
        one.sendall(ASK[:2])
        one.sendall(ASK[2:6])
        one.sendall(ASK[6:] + ASK)
        assert received(one) == received(one) == (KIND, b"hello")


def test_a_refusal_says_why_and_ends_the_connection(serve: Serve) -> None:
    served = serve()
    with served.connection() as one, served.connection() as other:
        assert other.ask(KIND).rest == b""
        with pytest.raises(PeerRefusedError, match="not this"):
            one.ask(KIND, b"refuse")
        until(lambda: not one.is_open)
        assert other.ask(KIND, b"on").rest == b"on"


def test_a_bug_of_one_handler_leaves_the_others_alone(serve: Serve) -> None:
    served = serve()
    with served.connection() as one, served.connection() as other:
        with pytest.raises(PeerRefusedError, match="internal"):
            one.ask(KIND, b"bug")
        assert other.ask(KIND, b"on").rest == b"on"


@pytest.mark.parametrize(
    "request_bytes",
    [
        struct.pack(">IB", 1, 250),
        struct.pack(">IB", 1, 0),
        struct.pack(">I", 0),
        struct.pack(">IB", MAX_REQUEST_BYTES + 1, KIND),
        b"\xff" * 300,
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_request_ends_the_connection(serve: Serve, request_bytes: bytes) -> None:
    served = serve()
    with served.raw() as bad, served.connection() as good:
        bad.sendall(request_bytes)
        kind, problem = received(bad)
        assert (kind, bool(problem)) == (PeerMessage.REFUSED, True)
        assert is_closed(bad)
        assert good.ask(KIND, b"on").rest == b"on"


def test_silent_peers_are_sent_away_and_hold_nobody_up(serve: Serve) -> None:
    served = serve()
    with served.raw() as silent, served.raw() as slow, served.connection() as good:
        slow.sendall(ASK[:3])
        good.ask(KIND)
        served.clock_s[0] = FIRST_ANSWER_TIMEOUT_S
        assert is_closed(silent)
        assert is_closed(slow)
        assert good.ask(KIND, b"on").rest == b"on"


@pytest.mark.parametrize(
    "limits", [{"max_peers": 2, "max_peers_a_user": 9}, {"max_peers_a_user": 2}, {"max_peers": 7}]
)
def test_no_more_peers_than_the_limit(serve: Serve, limits: dict[str, int]) -> None:
    served = serve(**limits)
    with served.connection() as one, served.connection() as two, served.raw() as three:
        one.ask(KIND)
        two.ask(KIND)
        assert received(three)[0] == PeerMessage.REFUSED
        assert is_closed(three)
        with served.connection() as four:
            until(lambda: not four.is_open)
            with pytest.raises(PeerRefusedError, match="too many"):
                four.ask(KIND)
        one.close()
        until(lambda: _is_answered(served))


def _is_answered(served: Served) -> bool:
    with served.raw() as connected:
        # A refusal comes without a request, and then there is nobody who reads one.
        with suppress(BrokenPipeError):
            connected.sendall(ASK)
        return received(connected)[0] == KIND


def test_a_peer_that_reads_no_answers_is_dropped(serve: Serve) -> None:
    served = serve()
    with served.raw() as deaf, served.connection() as good:
        deaf.setblocking(False)
        with pytest.raises((BlockingIOError, BrokenPipeError, ConnectionResetError)):
            while True:
                deaf.send(ASK * 1000)
        assert served.owner.ended.get(timeout=WAIT_S) is served.owner.connections[0]
        assert good.ask(KIND, b"on").rest == b"on"


def test_the_end_of_a_connection_is_told(serve: Serve) -> None:
    served = serve()
    with served.connection() as one, served.connection() as other:
        one.ask(KIND)
        other.ask(KIND)
        one.close()
        assert served.owner.ended.get(timeout=WAIT_S) is served.owner.connections[0]
        assert served.owner.ended.empty()
        served.peers.close()
        assert served.owner.ended.get(timeout=WAIT_S) is served.owner.connections[1]


def test_closing_ends_all_connections_and_the_thread(tmp_path: Path) -> None:
    served = Served(tmp_path / "sock", PeerSocket(), [])
    path = peer_socket_path(served.path)
    assert path.name == "sock.peer"
    assert path.stat().st_mode & 0o777 == 0o660
    with served.connection() as connected:
        connected.ask(KIND, b"watch")
        served.peers.close()
        assert not connected.is_open
        with pytest.raises(ConnectionError):
            connected.ask(KIND)
    assert served.owner.process_ended.empty()
    assert "peer-socket" not in {thread.name for thread in threading.enumerate()}


# ---- descriptors


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def has_no_writer(read_end: int) -> bool:
    poll = select.poll()
    poll.register(read_end, select.POLLIN)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def test_descriptors_go_both_ways_and_no_child_inherits_them(serve: Serve) -> None:
    served = serve()
    with served.connection() as one, pipe() as (read_end, write_end):
        answer = one.ask(KIND, b"x", [write_end])
        (copy,) = answer.descriptors
        os.write(copy, b"through the daemon")
        assert os.read(read_end, 100) == b"through the daemon"
        assert not os.get_inheritable(copy)
        os.close(copy)


def test_descriptors_that_no_handler_takes_are_closed(serve: Serve) -> None:
    served = serve()
    with served.connection() as one:
        read_end, write_end = os.pipe()
        for rest in (b"x", b"refuse"):
            with suppress(PeerRefusedError):
                os.close(one.ask(KIND, rest, [write_end]).descriptors[0])
        os.close(write_end)
        until(lambda: has_no_writer(read_end))
        os.close(read_end)


def test_a_handler_may_keep_descriptors(serve: Serve) -> None:
    served = serve()
    read_end, write_end = os.pipe()
    with served.connection() as one:
        assert one.ask(KIND, b"keep", [write_end]).descriptors == ()
        os.close(write_end)
    served.owner.ended.get(timeout=WAIT_S)
    (kept,) = served.owner.kept
    assert not os.get_inheritable(kept)
    assert not has_no_writer(read_end)
    os.close(kept)
    assert has_no_writer(read_end)
    os.close(read_end)


@pytest.mark.parametrize("at_once", [True, False])
def test_more_descriptors_than_a_message_may_have_end_the_connection(
    serve: Serve, at_once: bool
) -> None:
    served = serve()
    read_end, write_end = os.pipe()
    with served.raw() as bad:
        if at_once:
            socket.send_fds(bad, [ASK], [write_end] * (MAX_DESCRIPTORS + 1))
        else:
            unfinished = message_of(KIND, bytes(100))
            for position in range(MAX_DESCRIPTORS + 1):
                socket.send_fds(bad, [unfinished[position : position + 1]], [write_end])
        assert is_closed(bad)
    os.close(write_end)
    until(lambda: has_no_writer(read_end))
    os.close(read_end)
    assert served.owner.seen == []


@contextmanager
def lingering_socket() -> Iterator[socket.socket]:
    """Whoever closes it last would wait for a reader that never reads."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        with listener.accept()[0], sender:
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 600))
            sender.setblocking(False)
            with suppress(BlockingIOError):
                while sender.send(bytes(2**20)):
                    pass
            yield sender


@pytest.mark.parametrize("count", [1, MAX_DESCRIPTORS + 1])
@pytest.mark.parametrize("message", [ASK, ASK[:-1]], ids=["whole", "unfinished"])
@pytest.mark.parametrize("are_read", [True, False])
def test_descriptors_that_do_not_close_at_once_hold_nobody_up(
    serve: Serve, count: int, message: bytes, are_read: bool
) -> None:
    served = serve()
    with served.raw() as bad, lingering_socket() as lingering:
        if not are_read:  # what follows a bad request is still there when the connection is dropped
            bad.sendall(message_of(99))
        try:
            socket.send_fds(bad, [message], [lingering.fileno()] * count)
        except (BrokenPipeError, ConnectionResetError):  # dropped already, so it is closed here
            lingering.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
        lingering.close()
        bad.close()
        with served.connection() as other:
            assert other.ask(KIND, b"x").rest == b"x"


@contextmanager
def socket_that_does_not_close() -> Iterator[int]:
    """Whoever closes it last closes what is in its queue, which lingers until the end."""
    one, other = socket.socketpair()
    with lingering_socket() as lingering:
        socket.send_fds(other, [b"x"], [lingering.fileno()])
        lingering.close()
        other.close()
        yield one.detach()


def leave_descriptor(served: Served, fd: int) -> None:
    """To the daemon alone, which has no use for it."""
    message = message_of(KIND, b"refuse")
    with served.raw() as bad:
        socket.send_fds(bad, [message[:-1]], [fd])
        os.close(fd)
        bad.sendall(message[-1:])
        assert received(bad)[0] == PeerMessage.REFUSED


def test_a_descriptor_that_does_not_close_at_all_holds_up_its_user_alone(serve: Serve) -> None:
    """What is behind it may as well be a file system of the peer's own."""
    served, uid = serve(), os.getuid()
    read_end, write_end = os.pipe()
    with served.connection() as early:
        assert early.ask(KIND, b"x").rest == b"x"
        with socket_that_does_not_close() as stuck:
            leave_descriptor(served, stuck)
            for number in range(1, MAX_UNCLOSED_A_USER):
                until(lambda at=number: served.peers.sent.num_unclosed(uid) == at)
                leave_descriptor(served, os.dup(write_end))
            os.close(write_end)
            until(lambda: served.peers.sent.num_unclosed(uid) == MAX_UNCLOSED_A_USER)
            with served.raw() as late:
                assert received(late) == (PeerMessage.REFUSED, b"too many processes are connected")
            assert served.peers.sent.num_unclosed(uid + 1) == 0
            assert early.ask(KIND, b"y").rest == b"y"
            assert not has_no_writer(read_end)
        until(lambda: has_no_writer(read_end))
        os.close(read_end)
        until(lambda: not served.peers.sent.num_unclosed(uid))
        with served.connection() as late:
            assert late.ask(KIND, b"z").rest == b"z"


def test_a_close_that_fails_ends_nothing(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a network's file does whose server has gone."""
    served, close, failed = serve(), os.close, threading.Event()

    def fail(fd: int) -> None:
        close(fd)
        if threading.current_thread().name == "peer-closing":
            failed.set()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "close", fail)
    for _ in range(2):
        with served.connection() as one, open("/dev/null") as null:
            os.close(one.ask(KIND, b"x", [null.fileno()]).descriptors[0])
        assert failed.wait(WAIT_S)
        failed.clear()
    until(lambda: not served.peers.sent.num_unclosed(os.getuid()))


# ---- the process


CONNECT = """
import socket, sys
connected = socket.socket(socket.AF_UNIX)
connected.connect(sys.argv[1])
connected.sendall(bytes.fromhex(sys.argv[2]))
connected.recv(100)
if sys.argv[3] == "leave":
    connected.close()
print("connected", flush=True)
sys.stdin.read()
"""


@contextmanager
def process(served: Served, what: str) -> Iterator[subprocess.Popen[bytes]]:
    """It asks to be watched, and stays."""
    path, request = str(peer_socket_path(served.path)), message_of(KIND, b"watch").hex()
    command = [sys.executable, "-c", CONNECT, path, request, what]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"connected\n"
        try:
            yield child
        finally:
            child.kill()


@pytest.fixture(params=["by the kernel", "before Linux 6.5"])
def pidfds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "before Linux 6.5":
        # An option that no kernel has.
        monkeypatch.setattr(peer_process, "_SO_PEERPIDFD", 9999)


@pytest.mark.usefixtures("pidfds")
def test_the_end_of_a_process_is_told(serve: Serve) -> None:
    served = serve()
    with process(served, "stay") as child:
        assert served.owner.connections[0].peer.pid == child.pid
        assert served.owner.process_ended.empty()
        child.send_signal(signal.SIGKILL)
        assert served.owner.process_ended.get(timeout=WAIT_S) == child.pid
        served.owner.ended.get(timeout=WAIT_S)


@pytest.mark.usefixtures("pidfds")
def test_a_process_is_watched_beyond_its_connection_and_counts_as_a_peer(serve: Serve) -> None:
    served = serve(max_peers=1)
    with process(served, "leave") as child:
        served.owner.ended.get(timeout=WAIT_S)
        with served.raw() as another:
            assert received(another)[0] == PeerMessage.REFUSED
        assert served.owner.process_ended.empty()
        child.send_signal(signal.SIGKILL)
        assert served.owner.process_ended.get(timeout=WAIT_S) == child.pid
    assert served.owner.process_ended.empty()
    until(lambda: _is_answered(served))


CONNECT_AND_LEAVE_IT_TO_A_CHILD = """
import os, socket, sys
connected = socket.socket(socket.AF_UNIX)
connected.connect(sys.argv[1])
if os.fork() == 0:
    sys.stdin.read()
"""


@pytest.mark.usefixtures("pidfds")
def test_a_process_that_is_gone_is_not_taken_for_its_child(tmp_path: Path) -> None:
    path = str(tmp_path / "sock")
    read_end, write_end = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        command = [sys.executable, "-c", CONNECT_AND_LEAVE_IT_TO_A_CHILD, path]
        subprocess.run(command, stdin=read_end, check=True)
        with listener.accept()[0] as accepted:
            # Its number is free, or the kernel remembers that it has ended.
            with suppress(ProcessLookupError):
                pidfd = peer_process.open_pidfd(accepted, peer_process.peer_of(accepted))
                assert select.select([pidfd], [], [], 0)[0] == [pidfd]
                os.close(pidfd)
            os.close(write_end)
            os.close(read_end)


# ---- clients


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\0\0\0\0",
        struct.pack(">IB", MAX_ANSWER_BYTES + 1, KIND),
        struct.pack(">IB", 2, KIND + 1) + b"x",
        struct.pack(">IB", 9, KIND) + b"short",
    ],
)
def test_a_client_takes_no_nonsense_and_keeps_no_descriptor_of_it(
    tmp_path: Path, answer: bytes
) -> None:
    read_end, write_end = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "sock.peer"))
        listener.listen()
        connected = peer_connection.PeerConnection(UnixAddress(str(tmp_path / "sock")))
        accepted, _ = listener.accept()
        with accepted:
            if answer:
                socket.send_fds(accepted, [answer], [write_end])
            os.close(write_end)
            accepted.shutdown(socket.SHUT_WR)
            with pytest.raises(ConnectionError):
                connected.ask(KIND)
            assert has_no_writer(read_end)
        connected.close()
    os.close(read_end)


def test_without_a_peer_socket_there_is_no_connection(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        peer_connection.PeerConnection(UnixAddress(str(tmp_path / "sock")))

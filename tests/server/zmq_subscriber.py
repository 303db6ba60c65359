"""A router's side of the ZeroMQ publisher, by the documented format alone."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from tests.support.mirror import Mirror

TIMEOUT_MS = 20_000
END = (-1).to_bytes(8, "big", signed=True)


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Subscriber:
    """numbers, payloads: of the messages that came. `with` closes its sockets."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.connect(endpoint)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.messages: list[tuple[bytes, int, bytes]] = []

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *error: object) -> None:
        self._context.destroy(0)

    def read(self) -> list[Event]:
        """The events of the next message."""
        topic, number, payload = self._socket.recv_multipart()
        self.messages.append((topic, int.from_bytes(number, "big"), payload))
        return events_in(payload)

    def poll(self, timeout_ms: int) -> bool:
        """Whether there is a message."""
        return bool(self._socket.poll(timeout_ms))

    def send_to(self, endpoint: str, *requests: tuple[bytes, ...]) -> None:
        """Requests to a replay socket, which nobody waits for an answer of."""
        socket = self._context.socket(zmq.DEALER)
        socket.connect(endpoint)
        for request in requests:
            socket.send_multipart(request)

    def replay(self, endpoint: str, number: int) -> list[tuple[bytes, int, bytes]]:
        """What the replay socket has from that number on."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        socket.connect(endpoint)
        socket.send_multipart((b"", number.to_bytes(8, "big")))
        found = []
        while True:
            empty, topic, seen, payload = socket.recv_multipart()
            assert empty == b""
            if seen == END:
                assert (topic, payload) == (b"", b"")
                return found
            found.append((topic, int.from_bytes(seen, "big"), payload))


def events_in(payload: bytes) -> list[Event]:
    batch = msgspec.msgpack.decode(payload, type=Batch)
    assert batch.ts > 0
    assert batch.data_parallel_rank == 0
    return batch.events


def apply(mirror: Mirror, event: Event) -> None:
    """Hashes are 8 bytes here."""
    match event:
        case BlockStored(block_hashes=hashes, parent_block_hash=parent):
            mirror.store(map(as_bytes, hashes), None if parent is None else as_bytes(parent))
        case BlockRemoved(block_hashes=hashes):
            mirror.remove(map(as_bytes, hashes))
        case AllBlocksCleared():
            mirror.clear()


def as_bytes(block_hash: int) -> bytes:
    return block_hash.to_bytes(8, "big")

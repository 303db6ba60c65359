"""Events in the wire format of vLLM 0.33, for routers that are made for it.

A message of one event is msgpack of the array `[ts, [event], data_parallel_rank]`; an event is a
map whose "type" names it: BlockStored, BlockRemoved or AllBlocksCleared, with vLLM's field names
(`vllm/distributed/kv_events.py`). Pure; needs msgspec (`pip install 'prefixcache[events]'`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cbor2
import msgspec
import numpy as np

from prefixcache.core.events import Event, Removed, Stored

_HASH_BYTES = 8
_RANK = 0
_GROUP = 0


class VllmEncoder:
    """medium: where the K/V are, GPU or CPU. digest_bytes: of all hashes."""

    def __init__(self, *, block_size: int, digest_bytes: int, medium: str) -> None:
        self._block_size = block_size
        self._digest_bytes = digest_bytes
        self._medium = medium
        self._pack = msgspec.msgpack.Encoder().encode

    def encode(self, event: Event) -> bytes:
        """The payload of the event's message."""
        change = event.change
        fields: dict[str, Any]
        if isinstance(change, Stored):
            fields = {"type": "BlockStored", **self._stored(change)}
        elif isinstance(change, Removed):
            hashes = self._hashes(change.hashes)
            fields = {"type": "BlockRemoved", "block_hashes": hashes, **self._place}
        else:
            fields = {"type": "AllBlocksCleared"}
        return self._pack([event.time_s, [fields], _RANK])

    def _stored(self, change: Stored) -> dict[str, Any]:
        keys = [_keys(encoded) for encoded in change.extra_keys or ()]
        loras = [key[1] for block in keys for key in block if key[0] == "lora"]
        fields = {
            "block_hashes": self._hashes(change.hashes),
            "parent_block_hash": self._hashes(change.parent)[0] if change.parent else None,
            "token_ids": change.token_ids.tolist(),
            "block_size": self._block_size,
            "lora_id": None,
            "lora_name": loras[0] if loras else None,
            **self._place,
        }
        if keys:
            fields["extra_keys"] = [_untagged(block) for block in keys]
        return fields

    @property
    def _place(self) -> dict[str, Any]:
        return {"medium": self._medium, "group_idx": _GROUP}

    def _hashes(self, hashes: bytes) -> list[int]:
        """As vLLM gives them by default: the last 8 bytes, as an integer."""
        rows = np.frombuffer(hashes, dtype=np.uint8).reshape(-1, self._digest_bytes)
        return rows[:, -_HASH_BYTES:].copy().view(">u8").ravel().tolist()


def _keys(encoded: bytes) -> Sequence[Sequence[Any]]:
    return cbor2.loads(encoded) if encoded else ()


def _untagged(keys: Sequence[Sequence[Any]]) -> list[Any] | None:
    """An item's identifier and offset, of any other key its value; None for no keys."""
    return [key[1:] if key[0] == "mm" else key[1] for key in keys] or None

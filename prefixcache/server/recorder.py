"""A record of the sequences that a daemon starts, in the format of request traces.

One JSON line a successful Allocate, in the order in which they took their blocks:

    timestamp      milliseconds since the start of the record
    input_length   prompt tokens
    trace_block    tokens of a block, for which an id stands
    hash_ids       48 bits of the hash of each full block, as an integer
    cache_use      only if it is "no_read" or "no_write"
    resumed        only if true

No token is written, and no extra key. An id tells blocks after the same prefix apart, which is all
that a trace asks of it; who knows the daemon's hash seed can compare ids with those of a guess.

`add` only puts a reference into a queue, so that no call waits for the disk; a thread of the
recorder's own writes. What does not fit into the queue is dropped, counted and said in the log.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import structlog

from prefixcache.core.sequence import Prompt
from prefixcache.server.record_file import RecordFile
from prefixcache.types import CacheUse

_log = structlog.get_logger(__name__)

_ID_BYTES = 6
_INTERVAL_S = 0.25
_MAX_QUEUED_BYTES = 64 * 2**20
_BYTES_A_REQUEST = 256  # of a queue's entry, beside the hashes
# A join is one step of the interpreter, in which no other thread runs.
_IDS_A_JOIN = 1024


@dataclass(frozen=True, slots=True)
class _Request:
    """hashes: `digest_bytes` each, as in `BlockHashes`."""

    at_s: float
    num_tokens: int
    hashes: bytes
    digest_bytes: int
    cache_use: CacheUse
    resumed: bool


class Recorder:
    """Safe to call from many threads. `close` writes what is queued and ends the thread.

    max_queued_bytes: of hashes that wait to be written; more is dropped.
    """

    def __init__(
        self,
        file: RecordFile,
        block_size: int,
        *,
        max_queued_bytes: int = _MAX_QUEUED_BYTES,
        close_timeout_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file
        self._block_size = block_size
        self._max_queued_bytes = max_queued_bytes
        self._close_timeout_s = close_timeout_s
        self._clock = clock
        self._started_s = clock()
        self._lock = threading.Lock()
        self._queue: list[_Request] = []
        self._queued_bytes = 0
        self._num_dropped = 0
        self._num_said = 0
        self._has_failed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    @property
    def num_dropped(self) -> int:
        """Requests that are not in the record."""
        return self._num_dropped

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Returns once all is written, or after `close_timeout_s` if the disk does not answer.

        Requests that come later are lost.
        """
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(self._close_timeout_s)
        if self._thread.is_alive():
            _log.error("the record has no end: the disk does not answer")
            return
        self.write()
        self._file.close()
        if self._num_dropped:
            _log.warning("requests are missing in the record", missing=self._num_dropped)

    def add(self, prompt: Prompt, cache_use: CacheUse, resumed: bool) -> None:
        """A sequence has started. One that does not use the cache is no part of the record."""
        if cache_use is CacheUse.NONE or prompt.chain is None:
            return
        hashes = prompt.chain.hashes
        request = _Request(
            at_s=self._clock(),
            num_tokens=len(prompt.token_ids),
            hashes=hashes.data,
            digest_bytes=hashes.digest_bytes,
            cache_use=cache_use,
            resumed=resumed,
        )
        num_bytes = len(hashes.data) + _BYTES_A_REQUEST
        with self._lock:
            if self._has_failed or self._queued_bytes + num_bytes > self._max_queued_bytes:
                self._num_dropped += 1
                return
            self._queue.append(request)
            self._queued_bytes += num_bytes

    def write(self) -> None:
        """Write what is queued, as the thread does four times a second."""
        with self._lock:
            queue, self._queue, self._queued_bytes = self._queue, [], 0
        for index, request in enumerate(queue):
            try:
                is_written = self._file.append(self._line(request))
            except OSError as error:
                self._fail(error, len(queue) - index)
                break
            if not is_written:
                self._drop(1)
        self._say_drops()

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self.write()

    def _fail(self, error: OSError, num_lost: int) -> None:
        with self._lock:
            self._has_failed = True
        self._drop(num_lost)
        _log.error("the record ends here: it cannot be written", problem=str(error))

    def _drop(self, count: int) -> None:
        with self._lock:
            self._num_dropped += count

    def _say_drops(self) -> None:
        """When it begins, and each time that there are twice as many."""
        dropped = self._num_dropped
        if dropped and dropped >= 2 * self._num_said:
            _log.warning("requests are missing in the record", missing=dropped)
            self._num_said = dropped

    def _line(self, request: _Request) -> bytes:
        head: dict[str, object] = {
            "timestamp": round(1000 * (request.at_s - self._started_s)),
            "input_length": request.num_tokens,
            "trace_block": self._block_size,
        }
        if request.cache_use is not CacheUse.READ_WRITE:
            head["cache_use"] = request.cache_use.name.lower()
        if request.resumed:
            head["resumed"] = True
        ids = ",".join(_joined_ids(request))
        return f'{json.dumps(head)[:-1]}, "hash_ids": [{ids}]}}\n'.encode()


def _joined_ids(request: _Request) -> Iterator[str]:
    """The ids in decimal, many to a text."""
    digests = np.frombuffer(request.hashes, dtype=np.uint8).reshape(-1, request.digest_bytes)
    ids = np.zeros((len(digests), 8), dtype=np.uint8)
    ids[:, :_ID_BYTES] = digests[:, :_ID_BYTES]
    numbers = ids.view("<u8").reshape(-1)
    for start in range(0, len(numbers), _IDS_A_JOIN):
        yield ",".join(map(str, numbers[start : start + _IDS_A_JOIN].tolist()))

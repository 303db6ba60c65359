"""A daemon with K/V storage, and calls of it that a test holds in the middle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefixcache import engine
from prefixcache.rpc._pb import cache_pb2
from prefixcache.storage.layout import KVLayout
from tests.support.daemon import RunningDaemon
from tests.support.gate import Gate, held
from tests.support.invariants import check_invariants
from tests.support.stubs import Peer, Row, Stubs, read_append
from tests.support.tolerances import assert_close
from tests.support.toy_model import Run, ToyModel, attention_request, split_output

BLOCK_SIZE, NUM_BLOCKS = 4, 16
LAYOUT = KVLayout(2, 2, 8, BLOCK_SIZE, "float32")


class Served:
    def __init__(self, running: RunningDaemon, stubs: Stubs) -> None:
        self.daemon = running.daemon
        self.sequences = running.daemon.sequences
        self.stubs = stubs
        self.model = ToyModel(LAYOUT, num_query_heads=4)

    def run(self, tokens: range, peer: Peer | None = None, **fields: int) -> Run:
        return Run(peer or Peer(self.stubs), self.model, list(tokens)).allocate(**fields)

    @contextmanager
    def running(self, name: str, layer: int, run: Run, count: int) -> Iterator[RunningCall]:
        """A Prefill or Decode that has written its K/V and is about to attend."""
        request = attention_request(name, layer, [(run, count)])
        with self.running_request(name, request) as (gate, future):
            yield RunningCall(self, gate, future, layer, run, count)

    @contextmanager
    def running_request(self, name: str, request: Any) -> Iterator[tuple[Gate, Any]]:
        """The same of any request; the caller finishes it."""
        with held(engine, name.lower()) as gate:
            future = self.stubs.start(name, request)
            gate.wait()
            yield gate, future

    def free_blocks(self) -> set[int]:
        with self.sequences.lock:
            return set(self.sequences.pool.free_order().tolist())

    def found(self, tokens: range) -> int:
        return self.stubs.lookup([*tokens, 99]).num_cached_tokens

    def check(self) -> None:
        with self.sequences.lock:
            check_invariants(self.sequences)


class RunningCall:
    """A call at the gate. `finish` lets it go and checks its output against float64."""

    def __init__(
        self, served: Served, gate: Gate, future: Any, layer: int, run: Run, count: int
    ) -> None:
        self._served, self._gate, self._future = served, gate, future
        self._layer, self._run, self._count = layer, run, count

    def finish(self) -> None:
        self._gate.release()
        reply = self._served.stubs.finish(self._future)
        run, start = self._run, self._run.positions[self._layer]
        end = start + self._count
        (out,) = split_output(reply, [(run, self._count)])
        assert_close(out, run.model.exact(self._layer, run.tokens[:end], start))
        run.positions[self._layer] = end


@contextmanager
def copying(served: Served, peer: Peer | None = None) -> Iterator[tuple[Run, Run, Gate, Any]]:
    """Parent and child share a partly filled block; the copy for the parent is at the gate."""
    parent = served.run(range(6), peer)
    parent.compute()
    child = parent.forked(parent.peer.fork(parent.sequence_id, 6)[0])
    request = parent.peer.append_request([Row(parent.sequence_id, 6, (70, 71))])
    with held(engine, "copy_blocks") as gate:
        future = served.stubs.start("Append", request)
        gate.wait()
        yield parent, child, gate, future


def finished(served: Served, gate: Gate, future: Any) -> tuple[int, int]:
    """Let the copy go; returns its source and destination."""
    gate.release()
    (row,) = read_append(served.stubs.finish(future))
    assert row.code == cache_pb2.RESULT_CODE_OK
    return row.copies[0]

"""`prefixcache serve` as it is, in a process that also says whether its invariants hold.

A program: `python -m tests.chaos.checked_daemon serve ...`. Commands come as lines on its standard
input and are answered by a line of JSON on its standard output. Nothing of the daemon is replaced:
the block manager is looked at under its own lock, and the server gets an interceptor that kills
clients whose calls ask for it.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import zlib
from collections.abc import Callable
from typing import Any

import grpc

from prefixcache.cli import main
from prefixcache.server import lifecycle
from prefixcache.server.daemon import Daemon
from tests.chaos.killer import ClientKiller
from tests.support.invariants import check_invariants, snapshot


class Control:
    """Answers commands from a thread of its own, for as long as standard input is open."""

    def __init__(self, killer: ClientKiller) -> None:
        self._killer = killer
        self._daemon: Daemon | None = None
        self._commands: dict[str, Callable[[Daemon], Any]] = {
            "check": broken_invariant,
            "left": what_is_left,
            "contents": contents,
            "kills": lambda daemon: self._killer.counts(),
        }

    def watch(self, daemon: Daemon) -> None:
        self._daemon = daemon
        threading.Thread(target=self._run, name="control", daemon=True).start()

    def _run(self) -> None:
        assert self._daemon is not None
        for line in sys.stdin:
            print(json.dumps(self._commands[line.strip()](self._daemon)), flush=True)


def broken_invariant(daemon: Daemon) -> str:
    """Which invariant of the block manager does not hold; empty if all do."""
    with daemon.sequences.lock:
        try:
            check_invariants(daemon.sequences)
        except AssertionError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def what_is_left(daemon: Daemon) -> dict[str, int]:
    """Entries of tables that must be empty once there are no clients; those that are not."""
    sequences = daemon.sequences
    with sequences.lock:
        counts = {
            "owners": sequences.live.num_owners,
            "holders of blocks": len(list(sequences.live.all_holders())),
            "calls that wait for pending blocks": sequences.pending.num_waiters,
            "sequences that compute pending blocks": sequences.pending.num_fillers,
        }
    return {name: count for name, count in counts.items() if count}


def contents(daemon: Daemon) -> list[tuple[str, int]]:
    """The hash of each committed block, and a digest of the K/V in it."""
    assert daemon.engine is not None
    sequences, spans = daemon.sequences, daemon.engine.memory.spans.numpy()
    with sequences.lock:
        hashes = map(sequences.pool.hash_of, range(sequences.pool.num_blocks))
        return [
            (block_hash.hex(), zlib.crc32(spans[block]))
            for block, block_hash in enumerate(hashes)
            if block_hash is not None
        ]


def manager_state(daemon: Daemon) -> dict[str, Any]:
    """All that a refused call must leave alone. The lock is the caller's.

    A session's time and the highest call that its client waits for no more are not in it: every
    call in a session renews it and says the latter, refused or not.
    """
    sequences = daemon.sequences
    state = snapshot(sequences)
    state["sessions"] = [
        (session.session_id, session.client_name, session.ttl_s, session.request_id)
        for session in sequences.live.sessions
    ]
    state["pending"] = [
        (serial, filler.num_cached, filler.chain)
        for serial, filler in sequences.pending._fillers.items()
    ]
    state["waiters"] = sequences.pending.num_waiters
    if daemon.engine is not None:
        memory = daemon.engine.memory
        state["memory"] = zlib.crc32(memory.spans.cpu().numpy())
    return state


def run() -> None:
    killer = ClientKiller()
    control = Control(killer)
    make_daemon = lifecycle.make_daemon

    def watched_daemon(*args: Any) -> Daemon:
        daemon = make_daemon(*args)
        control.watch(daemon)
        return daemon

    lifecycle.make_daemon = watched_daemon
    grpc.server = functools.partial(grpc.server, interceptors=(killer,))
    main()


if __name__ == "__main__":
    run()

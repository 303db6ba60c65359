"""Engines as processes: what one has computed outlives it."""

from __future__ import annotations

import threading
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

from examples.engine.fleet import EngineProcess, engines
from prefixcache.client import Client
from tests.examples.engine import tiny_model
from tests.examples.engine.endpoint import BLOCK_SIZE, daemon_for
from tests.examples.engine.tiny_model import plain_answer
from tests.support.waiting import until

SYSTEM = "You answer questions about the library. "
WHOLE_BLOCKS = len(SYSTEM) // BLOCK_SIZE * BLOCK_SIZE


def test_an_engine_that_was_killed_and_restarted_is_warm(tmp_path: Path) -> None:
    folder = tiny_model.save(tmp_path / "model")
    with daemon_for(folder) as running, engines(folder, [running.target]) as fleet:
        cold = fleet[0].complete(SYSTEM + "Where is it?", 6)
        assert (cold.text, cold.num_cached_tokens) == (plain_answer(SYSTEM + "Where is it?", 6), 0)

        long_request = threading.Thread(target=ask_in_vain, args=(fleet[0],))
        long_request.start()
        with Client(running.target) as client:
            until(lambda: client.stats().referenced > 0)
            fleet[0].kill()
            long_request.join()

            fleet[0] = EngineProcess(folder, running.target)
            fleet[0].wait_until_ready()
            warm = fleet[0].complete(SYSTEM + "When is it open?", 6)
            assert warm.text == plain_answer(SYSTEM + "When is it open?", 6)
            assert warm.num_cached_tokens == WHOLE_BLOCKS

            # What the killed one held is free again.
            def frees_all() -> bool:
                running.sweep()
                return client.stats().referenced == 0

            until(frees_all)


def ask_in_vain(engine: EngineProcess) -> None:
    with suppress(OSError, HTTPException):
        engine.complete("x", 250)

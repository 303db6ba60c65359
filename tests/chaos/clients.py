"""Client processes: forked from a parent that has imported everything and used nothing of it.

So a client costs milliseconds, and no gRPC state is ever forked.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch

from prefixcache import Client, Credentials
from prefixcache.client.channel import channel_options
from tests.chaos.kv import kv_store
from tests.chaos.link import LONG_S, Link
from tests.chaos.tally import ClientTally, Tally
from tests.chaos.tenants import TENANTS, Tenant
from tests.chaos.walk import Walk

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["tests.chaos.clients", "tests.chaos.lives", "tests.chaos.attached"]
)


@dataclass(frozen=True)
class World:
    """What the clients of one daemon share.

    folder: with the socket, the tally and the K/V. has_tenants: each row is one of `TENANTS`.
    """

    folder: Path
    storage: str
    num_rows: int
    has_tenants: bool = False

    @property
    def target(self) -> str:
        return f"unix:{self.folder}/daemon.sock"

    def tally(self, *, create: bool = False) -> Tally:
        return Tally(self.folder / "tally", self.num_rows, create=create)

    def generation(self, *, create: bool = False) -> np.memmap[Any, Any]:
        mode = "w+" if create else "r+"
        return np.memmap(self.folder / "generation", np.uint64, mode, shape=(1,))

    def tenant(self, row: int) -> Tenant | None:
        return TENANTS[row % len(TENANTS)] if self.has_tenants else None

    def prepare(self) -> None:
        self.tally(create=True)
        self.generation(create=True)
        kv_store(self.storage, self.folder, create=True)


@dataclass
class ClientProcess:
    """row: its own of the tally. problems: once it has ended by itself."""

    process: BaseProcess
    row: int
    _problems: Connection

    def wait(self, timeout_s: float) -> bool:
        self.process.join(timeout_s)
        return self.process.exitcode is not None

    @property
    def was_killed(self) -> bool:
        return self.process.exitcode == -signal.SIGKILL

    def problems(self) -> list[str]:
        """Of one that has ended, or was killed: then there are none."""
        try:
            found: list[str] = self._problems.recv() if self._problems.poll() else []
        except EOFError:
            found = []
        self._problems.close()
        if not found and self.process.exitcode not in (0, -signal.SIGKILL):
            found = [f"a client ended with exit code {self.process.exitcode}"]
        return found


def start_client(life: Any, world: World, row: int, *arguments: Any) -> ClientProcess:
    """life: a function of `tests.chaos.lives`, of (world, row, *arguments)."""
    reader, writer = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_live, args=(writer, life, world, row, *arguments))
    process.start()
    writer.close()
    return ClientProcess(process, row, reader)


def _live(writer: Connection, life: Any, world: World, row: int, *arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        problems = life(world, row, *arguments)
    except BaseException:  # noqa: BLE001 - whatever it is, the driver must hear of it
        problems = [traceback.format_exc()]
    writer.send(problems)
    writer.close()
    sys.stdout.flush()
    os._exit(0)


@dataclass(frozen=True)
class Connected:
    client: Client
    link: Link
    walk: Walk
    rng: random.Random
    tally: ClientTally


@contextmanager
def connected(
    world: World,
    row: int,
    seed: int,
    *,
    faults: tuple[type[Any], ...] = (),
    cut_rate: float = 0.0,
    session_ttl_s: float | None = 60.0,
) -> Iterator[Connected]:
    """A client and its walk. The session is the caller's to close."""
    rng = random.Random(seed)
    tally = world.tally().of_row(row)
    generation, tenant = world.generation(), world.tenant(row)
    with grpc.insecure_channel(world.target, channel_options()) as channel:
        link = Link(channel, tally, random.Random(seed + 1), cut_rate)
        client = Client(
            channel=link,
            timeout_s=LONG_S,
            session_ttl_s=session_ttl_s,
            client_name=f"client {row}",
            credentials=tenant.credentials if tenant else Credentials(),
        )
        walk = Walk(
            client,
            kv_store(world.storage, world.folder),
            rng,
            tally,
            has_storage=world.storage == "cpu",
            faults=faults,
            generation=lambda: int(generation[0]),
            namespace=tenant.namespace if tenant else 0,
        )
        yield Connected(client, link, walk, rng, tally)

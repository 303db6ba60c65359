"""Processes that are forked from one that uses a client: they get errors and do the parent no harm.

The daemon ends a session as soon as its connection breaks, so a parent whose connection was touched
has lost its sequence.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prefixcache.client import Client
from tests.support.program import MANAGER, serving
from tests.support.waiting import until

TIMEOUT_S = 60.0

SYNC = """
import multiprocessing, os, sys, threading
from prefixcache import Client
from prefixcache.errors import ForkedClientError

client = Client(sys.argv[1])
sequence = client.sequence(range(10))
steps = client.steps()
open_step = steps.new_step()

def refused(call):
    try:
        call()
    except ForkedClientError:
        return
    raise AssertionError("it was not refused")

def in_child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print("child:", repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

def go_on():
    sequence.append([sequence.num_tokens])
    steps.run(steps.new_step())
    (session,) = client.list_sessions()
    assert session.is_connected
    print("the parent goes on", flush=True)
"""

USE = """
def use():
    refused(client.stats)
    refused(lambda: client.lookup([1]))
    refused(lambda: client.sequence([1]))
    refused(lambda: sequence.append([1]))
    refused(lambda: client.append([sequence], [[1]]))
    refused(sequence.free)
    refused(client.steps)
    refused(lambda: steps.send(open_step))
    refused(lambda: steps.wait(open_step))
    steps.close()
    client.close()
in_child(use)
go_on()
"""

# Another thread holds the lock under which a session is opened, and the child has no such thread.
LOCKED = """
client.close()
client = Client(sys.argv[1])
client.server_info()
with client._connection._opening.held(30):
    thread = threading.Thread(target=client.sequence, args=([1],))
    thread.start()
    in_child(lambda: refused(lambda: client.sequence([1])))
thread.join()
print("the parent goes on", flush=True)
"""

NEW_CLIENT = """
def use():
    with Client(sys.argv[1]) as own, own.sequence(range(5)) as other:
        other.append([5])
        assert len(own.list_sessions()) == 2
in_child(use)
go_on()
"""

# What the interpreter finalizes at its end, it does in the child too.
EXIT = """
pid = os.fork()
if pid == 0:
    del sequence, steps, client
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
go_on()
"""

MULTIPROCESSING = """
def use():
    refused(client.stats)
child = multiprocessing.get_context("fork").Process(target=use)
child.start()
child.join()
assert child.exitcode == 0
go_on()
"""

# gRPC's own fork handler may crash a child of a process that uses its asyncio side.
ASYNC = """
import asyncio, os, sys
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
from prefixcache import AsyncClient
from prefixcache.errors import ForkedClientError

async def refused(work):
    try:
        await work
    except ForkedClientError:
        return
    raise AssertionError("it was not refused")

async def use(client, sequence, steps, open_step):
    await refused(client.stats())
    await refused(sequence.append([1]))
    await refused(steps.wait(open_step))
    await steps.close()
    await client.close()
    try:
        AsyncClient(sys.argv[1])
    except ForkedClientError:
        pass
    else:
        raise AssertionError("it was not refused")
async def main():
    client = AsyncClient(sys.argv[1])
    sequence = await client.sequence(range(10))
    steps = await client.steps()
    open_step = steps.new_step()
    pid = os.fork()
    if pid == 0:
        try:
            # The parent's loop counts as no running one here.
            asyncio.new_event_loop().run_until_complete(use(client, sequence, steps, open_step))
        except BaseException as error:
            print("child:", repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    status = await asyncio.to_thread(os.waitpid, pid, 0)
    assert status[1] == 0
    await sequence.append([1])
    await steps.run(steps.new_step())
    (session,) = await client.list_sessions()
    assert session.is_connected
    print("the parent goes on", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    "program",
    [SYNC + USE, SYNC + LOCKED, SYNC + NEW_CLIENT, SYNC + EXIT, SYNC + MULTIPROCESSING, ASYNC],
    ids=["use", "locked", "new client", "exit", "multiprocessing", "async"],
)
@pytest.mark.parametrize("transport", ["unix", "tcp", "unix with a ticket"])
def test_a_child_gets_errors_and_the_parent_goes_on(
    program: str, transport: str, tmp_path: Path
) -> None:
    address = "127.0.0.1:0" if transport == "tcp" else f"unix:{tmp_path}/own.sock"
    flags = [*MANAGER, "--reconnect-grace", "0", "--listen", address]
    if "ticket" in transport:
        auth = tmp_path / "auth.toml"
        auth.touch(0o600)
        auth.write_text(
            f'[[identities]]\nuid = {os.geteuid()}\ntenant = "t"\nroles = ["client", "admin"]\n'
        )
        flags += ["--auth", str(auth)]
    with serving(tmp_path, *flags) as daemon:
        done = subprocess.run(
            [sys.executable, "-c", program, daemon.addresses[0]],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout == "the parent goes on\n", done.stderr


def test_a_child_does_not_keep_the_session_of_a_parent_that_has_died(tmp_path: Path) -> None:
    orphan = (
        SYNC
        + """
if os.fork() == 0:
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""
    )
    with (
        serving(tmp_path, *MANAGER, "--reconnect-grace", "0") as daemon,
        subprocess.Popen(
            [sys.executable, "-c", orphan, daemon.addresses[0]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as parent,
        Client(daemon.addresses[0]) as operator,
    ):
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        assert len(operator.list_sessions()) == 1
        parent.send_signal(signal.SIGKILL)
        until(lambda: not operator.list_sessions())
        assert not operator.list_sequences()

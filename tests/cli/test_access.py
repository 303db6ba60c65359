"""Access control of a real process: files at its start and at SIGHUP, sockets, and the commands."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from prefixcache import Client, Credentials, ExtraKeys, TlsCredentials
from prefixcache.errors import PermissionDeniedError, UnauthenticatedError, UnavailableError
from tests.support.certificates import Authority
from tests.support.program import MANAGER, PROGRAM, logged_until, serving

USER = f'[[identities]]\nuid = {os.geteuid()}\ntenant = "ops"\nroles = ["client", "admin"]\n'


def write_auth(path: Path, text: str) -> Path:
    path.touch(0o600)
    path.write_text(text)
    return path


def command(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if "PREFIXCACHE" not in key}
    return subprocess.run(
        [*PROGRAM, *arguments],
        env={**inherited, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def new_token(tenant: str) -> tuple[str, str]:
    """A token and its entry, as the command prints them."""
    token, entry = command("token", "new", "--tenant", tenant).stdout.split("\n", 1)
    return token, entry


def test_users_and_tokens_are_admitted_and_files_are_read_again(tmp_path: Path) -> None:
    auth = write_auth(tmp_path / "auth.toml", USER)
    target = f"unix:{tmp_path}/prefixcache.sock"
    token, entry = new_token("team-a")
    shown = Credentials(token)
    with serving(tmp_path, *MANAGER, "--auth", str(auth)) as daemon:
        socket = tmp_path / "prefixcache.sock.peer"
        assert socket.stat().st_mode & 0o777 == 0o660
        done = command("stats", "--target", target, "--json")
        assert done.returncode == 0, done.stderr
        assert "0 SEQUENCES" in command("top", "--once", "--target", target).stdout
        for asked in (["top"], ["top", "--once"], ["stats"]):
            refused = command(*asked, "--target", target, PREFIXCACHE_TOKEN=token)
            assert refused.returncode == 1
        assert "UNAUTHENTICATED" not in refused.stderr
        assert "asks for credentials" in refused.stderr
        assert token not in refused.stderr

        auth.write_text(USER + "[[identities]]\nuid = 1\n")
        daemon.send_signal(signal.SIGHUP)
        lines = logged_until(daemon, "reload refused, nothing is changed")
        assert "identities[1].tenant" in lines[-1]["problem"]
        with Client(target) as client:
            client.stats()

        auth.write_text(entry)
        daemon.send_signal(signal.SIGHUP)
        logged_until(daemon, "reloaded")
        with Client(target) as client, pytest.raises(UnauthenticatedError):
            client.stats()
        with Client(target, credentials=shown) as client:
            client.lookup([1])
            with pytest.raises(PermissionDeniedError):
                client.stats()

        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout=30) == 0
        assert daemon.stderr is not None
        assert token not in daemon.stderr.read()
    assert not socket.exists()


def test_an_operator_explains_a_miss_of_a_tenant_by_its_name(tmp_path: Path) -> None:
    token, entry = new_token("team-a")
    auth = write_auth(tmp_path / "auth.toml", USER + entry)
    target = f"unix:{tmp_path}/prefixcache.sock"
    asked = ("explain", *map(str, range(20)), "--target", target)
    with serving(tmp_path, *MANAGER, "--auth", str(auth)):
        with (
            Client(target, credentials=Credentials(token)) as client,
            client.sequence(range(16), extra_keys=ExtraKeys(cache_salt="hidden")) as sequence,
        ):
            sequence.commit(16)
        assert "never cached since" in command(*asked).stdout
        done = command(*asked, "--tenant", "team-a")
        assert done.returncode == 0, done.stderr
        assert "another cache salt" in done.stdout
        assert "hidden" not in done.stdout
        assert command(*asked, "--tenant", "team-b").returncode == 2
        refused = command(*asked, PREFIXCACHE_TOKEN=token)
        assert (refused.returncode, "admin" in refused.stderr) == (1, True)


def test_a_client_that_was_taken_out_loses_its_session(tmp_path: Path) -> None:
    token, entry = new_token("team-a")
    auth = write_auth(tmp_path / "auth.toml", USER + entry)
    target = f"unix:{tmp_path}/prefixcache.sock"
    with (
        serving(tmp_path, *MANAGER, "--auth", str(auth), "--reconnect-grace", "0") as daemon,
        Client(target, credentials=Credentials(token)) as client,
        Client(target) as admin,
    ):
        sequence = client.sequence(range(20))
        assert len(admin.list_sessions()) == 1
        auth.write_text(USER)
        daemon.send_signal(signal.SIGHUP)
        logged_until(daemon, "freed what nobody holds any more")
        assert admin.list_sessions() == []
        with pytest.raises(UnauthenticatedError):
            sequence.append([1])


def test_certificates_are_renewed_at_sighup(tmp_path: Path) -> None:
    token, entry = new_token("team-a")
    auth = write_auth(tmp_path / "auth.toml", entry)
    before, after = Authority(tmp_path, "before"), Authority(tmp_path, "after")
    pair = before.issue("server", "ip:127.0.0.1")
    flags = ("--auth", str(auth), "--tls-cert", str(pair.cert), "--tls-key", str(pair.key))

    def lookup(authority: Authority, address: str) -> None:
        tls = TlsCredentials(authority.ca.read_bytes())
        with Client(address, credentials=Credentials(token, tls)) as client:
            client.lookup([1], timeout_s=20.0)

    with serving(tmp_path, *MANAGER, "--listen", "0.0.0.0:0", *flags) as daemon:
        (bound,) = daemon.addresses
        address = bound.replace("0.0.0.0", "127.0.0.1")
        lookup(before, address)
        token_file = tmp_path / "token"
        token_file.write_text(token)
        done = command(
            *("lookup", "1", "2", "--target", address),
            *("--token-file", str(token_file), "--tls-ca", str(before.ca)),
        )
        assert done.returncode == 0, done.stderr

        after.issue("server", "ip:127.0.0.1")
        key = pair.key.read_bytes()
        pair.key.write_bytes(b"not a key")
        daemon.send_signal(signal.SIGHUP)
        refused = logged_until(daemon, "reload refused, nothing is changed")[-1]
        assert "--tls-cert" in refused["problem"]
        lookup(before, address)

        pair.key.write_bytes(key)
        daemon.send_signal(signal.SIGHUP)
        logged_until(daemon, "reloaded")
        lookup(after, address)
        with pytest.raises(UnavailableError):
            lookup(before, address)


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [
        ("identities = 1", 0o600, "identities: "),
        (USER, 0o644, "chmod o-rwx"),
        ("[[identities", 0o600, "auth.toml"),
    ],
)
def test_a_bad_file_stops_the_start(text: str, mode: int, problem: str, tmp_path: Path) -> None:
    auth = write_auth(tmp_path / "auth.toml", text)
    auth.chmod(mode)
    listen = f"unix:{tmp_path}/sock"
    done = command("serve", *MANAGER, "--listen", listen, "--auth", str(auth))
    assert done.returncode == 2
    assert "--auth" in done.stderr
    assert problem in done.stderr
    assert not (tmp_path / "sock").exists()


def socket_path_of(num_bytes: int, folder: Path) -> str:
    folder.mkdir()
    path = str(folder / "s").ljust(num_bytes, "s")
    if len(path) > num_bytes:
        pytest.fail("the folder for tests has too long a path")
    return path


def test_a_socket_whose_peer_socket_has_no_room_in_a_path_is_refused(tmp_path: Path) -> None:
    auth = write_auth(tmp_path / "auth.toml", USER)
    listen = f"unix:{socket_path_of(105, tmp_path / 'f')}"
    done = command("serve", *MANAGER, "--listen", listen, "--auth", str(auth))
    assert done.returncode == 2
    assert "too long" in done.stderr


STORED = ("--num-layers", "1", "--num-kv-heads", "1", "--head-dim", "8", "--dtype", "float16")


@pytest.mark.parametrize(("num_bytes", "has_peers"), [(102, True), (103, False)])
def test_without_tickets_the_longest_paths_have_no_peer_socket(
    tmp_path: Path, num_bytes: int, has_peers: bool
) -> None:
    path = socket_path_of(num_bytes, tmp_path / "f")
    flags = ("--storage", "cpu", *STORED, "--num-blocks", "8", "--listen", f"unix:{path}")
    with serving(tmp_path, *flags) as daemon:
        assert Path(f"{path}.peer").exists() == has_peers
        warned = any("no peer socket" in line["event"] for line in daemon.log)
        assert warned != has_peers

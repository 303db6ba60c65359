from __future__ import annotations

import os
from pathlib import Path

import pytest

from prefixcache import address
from prefixcache.address import (
    MAX_SOCKET_PATH_BYTES,
    TcpAddress,
    UnixAddress,
    check_socket_folder,
    default_listen_address,
    default_target,
    parse_address,
)
from prefixcache.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("127.0.0.1:50051", TcpAddress("127.0.0.1", 50051)),
        ("localhost:0", TcpAddress("localhost", 0)),
        ("[::1]:65535", TcpAddress("::1", 65535)),
        ("kv-1.example.org:1", TcpAddress("kv-1.example.org", 1)),
        ("unix:/run/p.sock", UnixAddress("/run/p.sock")),
        ("unix:///run/p.sock", UnixAddress("/run/p.sock")),
        ("unix:p.sock", UnixAddress("p.sock")),
    ],
)
def test_an_address_is_read(text: str, parsed: object) -> None:
    assert parse_address(text) == parsed


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no address"),
        ("localhost", "no address"),
        ("::1:50051", "no address"),
        ("http://host:1", "no address"),
        (":50051", "no host"),
        ("host name:1", "no host"),
        ("[host]:1", "no IPv6 address"),
        ("localhost:", "port"),
        ("localhost:65536", "port"),
        ("localhost:-1", "port"),
        ("localhost:http", "port"),
        ("unix:", "no socket file"),
        ("unix:/run/", "no socket file"),
        ("unix://host/p.sock", "names a host"),
        ("unix:/a\0b", "NUL"),
        ("unix:/" + "x" * MAX_SOCKET_PATH_BYTES, "108 bytes"),
        ("unix:/" + "ü" * 60, "121 bytes"),
    ],
)
def test_what_is_no_address_is_refused_with_the_reason(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_address(text)


def test_the_longest_socket_path_is_allowed() -> None:
    path = "/" + "x" * (MAX_SOCKET_PATH_BYTES - 1)
    assert parse_address(f"unix:{path}") == UnixAddress(path)


@pytest.mark.parametrize("text", ["127.0.0.1:50051", "[::1]:0", "unix:/run/p.sock", "unix:p.sock"])
def test_an_address_prints_as_it_is_written(text: str) -> None:
    assert str(parse_address(text)) == text


def test_a_percent_sign_in_a_path_is_kept_from_grpc_which_decodes_it() -> None:
    assert UnixAddress("/run/a%20b.sock").target == "unix:/run/a%2520b.sock"


@pytest.mark.parametrize(
    ("host", "is_loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("LOCALHOST", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
    ],
)
def test_only_loopback_addresses_and_localhost_are_loopback(host: str, is_loopback: bool) -> None:
    assert TcpAddress(host, 1).is_loopback is is_loopback


def test_a_socket_may_stand_in_a_private_folder(tmp_path: Path) -> None:
    check_socket_folder(UnixAddress(str(tmp_path / "p.sock")))


def test_a_socket_in_a_folder_that_everyone_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)  # the sticky bit of /tmp does not help: the first one takes the name
    with pytest.raises(ValueError, match="every user can write"):
        check_socket_folder(UnixAddress(str(tmp_path / "p.sock")))


def test_a_private_folder_within_one_that_everyone_can_write_to_is_allowed(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    check_socket_folder(UnixAddress(str(private / "p.sock")))


def test_a_link_to_a_folder_is_judged_by_the_folder(tmp_path: Path) -> None:
    folder, link = tmp_path / "open", tmp_path / "link"
    folder.mkdir()
    folder.chmod(0o777)
    link.symlink_to(folder)
    with pytest.raises(ValueError, match="every user can write"):
        check_socket_folder(UnixAddress(str(link / "p.sock")))


def test_a_socket_needs_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="No such file"):
        check_socket_folder(UnixAddress(str(tmp_path / "missing" / "p.sock")))
    with pytest.raises(ValueError, match="not a folder"):
        check_socket_folder(UnixAddress(str(tmp_path / "file" / "p.sock")))


@pytest.fixture
def system_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /run/prefixcache; not made yet."""
    folder = tmp_path / "run"
    monkeypatch.setattr(address, "SYSTEM_FOLDER", str(folder))
    return folder


def test_the_default_socket_is_in_the_users_runtime_folder(system_folder: Path) -> None:
    system_folder.mkdir()
    environ = {"XDG_RUNTIME_DIR": "/run/user/7"}
    assert default_listen_address(environ) == UnixAddress("/run/user/7/prefixcache.sock")


def test_without_a_runtime_folder_the_default_is_the_system_folder_if_it_is_ours(
    system_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgumentError, match="--listen: needed"):
        default_listen_address({})
    system_folder.mkdir(mode=0o755)
    expected = UnixAddress(str(system_folder / "prefixcache.sock"))
    assert default_listen_address({}) == default_listen_address({"XDG_RUNTIME_DIR": ""}) == expected
    system_folder.chmod(0o777)
    with pytest.raises(InvalidArgumentError, match="--listen: needed"):
        default_listen_address({})
    system_folder.chmod(0o755)
    another = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another)
    with pytest.raises(InvalidArgumentError, match="--listen: needed"):
        default_listen_address({})


def test_a_client_tries_the_users_socket_then_the_systems(
    system_folder: Path, tmp_path: Path
) -> None:
    users = tmp_path / "user"
    environ = {"XDG_RUNTIME_DIR": str(users)}
    with pytest.raises(InvalidArgumentError, match="--target: needed"):
        default_target({})
    assert default_target(environ) == UnixAddress(str(users / "prefixcache.sock"))
    system_folder.mkdir()
    systems = system_folder / "prefixcache.sock"
    systems.touch()
    assert default_target({}) == default_target(environ) == UnixAddress(str(systems))
    users.mkdir()
    (users / "prefixcache.sock").touch()
    assert default_target(environ) == UnixAddress(str(users / "prefixcache.sock"))

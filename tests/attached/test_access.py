"""Who may attach, and to what: by the auth file, the session's tenant and the peer's user."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from prefixcache import Client, Credentials, errors
from prefixcache.address import UnixAddress
from prefixcache.attached import attach
from prefixcache.client.peer_connection import PeerConnection, PeerRefusedError
from prefixcache.errors import PrefixCacheError
from prefixcache.rpc._pb import attach_pb2
from prefixcache.rpc.peer_protocol import PeerMessage
from prefixcache.rpc.status import from_status_message
from prefixcache.server.access import AccessControl
from prefixcache.server.auth_file import parse_auth_rules
from prefixcache.server.peer_tickets import PeerTickets
from prefixcache.types import PoolAccess
from tests.attached.served import Served, compute, serve
from tests.support.bearer import hash_of


def identity(tenant: str, **more: Any) -> dict[str, Any]:
    return {"token_sha256": hash_of(f"of-{tenant}"), "tenant": tenant, **more}


@contextmanager
def serve_to(
    *identities: dict[str, Any], attach: PoolAccess = PoolAccess.WRITE
) -> Iterator[Served]:
    access = AccessControl(parse_auth_rules({"identities": list(identities)}), PeerTickets())
    with serve("float32", access=access, attach=attach) as served:
        yield served


def client_of(served: Served, tenant: str) -> Client:
    credentials = Credentials(token=f"of-{tenant}")
    return served.opened.enter_context(Client(served.running.target, credentials=credentials))


def answer_to(served: Served, request: attach_pb2.AttachRequest) -> attach_pb2.AttachResponse:
    """Of a request made by hand."""
    path = served.running.target.removeprefix("unix:")
    connection = PeerConnection(UnixAddress(path))
    served.opened.callback(connection.close)
    answer = connection.ask(PeerMessage.ATTACH, request.SerializeToString())
    for descriptor in answer.descriptors:
        os.close(descriptor)
    return attach_pb2.AttachResponse.FromString(answer.rest)


def refusal_of(served: Served, **fields: Any) -> PrefixCacheError:
    answer = answer_to(served, attach_pb2.AttachRequest(**fields))
    assert answer.refusal
    return from_status_message(answer.refusal)


def session_of(client: Client) -> bytes:
    client.sequence([1]).free()
    return client._connection.lease.session_id


def is_granted(client: Client, *, writable: bool) -> bool:
    try:
        attach(client, writable=writable).close()
    except errors.AttachDeniedError as error:
        assert error.fields["access"] == ("write" if writable else "read")
        return False
    return True


def test_the_only_tenant_may_write_unless_the_file_says_less() -> None:
    with serve_to(identity("a")) as served:
        client = client_of(served, "a")
        assert is_granted(client, writable=True)
    with serve_to(identity("a", attach="read")) as served:
        client = client_of(served, "a")
        assert not is_granted(client, writable=True)
        assert is_granted(client, writable=False)


def test_with_two_tenants_each_needs_a_grant() -> None:
    with serve_to(
        identity("a"),
        identity("b", attach="read"),
        identity("c", attach="write"),
        identity("d", attach="none"),
    ) as served:
        expected = {"a": (False, False), "b": (True, False), "c": (True, True), "d": (False, False)}
        for tenant, (may_read, may_write) in expected.items():
            client = client_of(served, tenant)
            assert is_granted(client, writable=False) is may_read, tenant
            assert is_granted(client, writable=True) is may_write, tenant


def test_no_grant_goes_beyond_what_the_daemon_gives() -> None:
    with serve_to(identity("a", attach="write"), attach=PoolAccess.READ) as served:
        client = client_of(served, "a")
        assert is_granted(client, writable=False)
        assert not is_granted(client, writable=True)


def test_a_tenants_writer_commits_for_its_own_namespace() -> None:
    with serve_to(identity("a", attach="write"), identity("b")) as served:
        ours, theirs = client_of(served, "a"), client_of(served, "b")
        with attach(ours) as view:
            sequence = ours.sequence(range(8))
            compute(view, sequence, served.steps(8))
            assert sequence.commit(8).num_cached_blocks == 2
        assert ours.lookup(range(9)).num_cached_tokens == 8
        assert theirs.lookup(range(9)).num_cached_tokens == 0
        with pytest.raises(errors.StorageOwnedError):
            theirs.sequence(range(8)).commit(8)


def test_another_tenants_session_is_not_found() -> None:
    with serve_to(identity("a", attach="write"), identity("b", attach="write")) as served:
        session_id = session_of(client_of(served, "a"))
        error = refusal_of(served, session_id=session_id, token="of-b")
        assert isinstance(error, errors.SessionNotFoundError)
        assert not answer_to(
            served, attach_pb2.AttachRequest(session_id=session_id, token="of-a")
        ).refusal


def test_an_unknown_token_and_an_unknown_user_are_refused() -> None:
    with serve_to(identity("a", attach="write")) as served:
        session_id = session_of(client_of(served, "a"))
        for token in ("nobody's", ""):
            error = refusal_of(served, session_id=session_id, token=token)
            assert isinstance(error, errors.UnauthenticatedError)


def test_a_user_of_the_host_is_known_by_the_kernels_word() -> None:
    ours = {"uid": os.getuid(), "tenant": "a", "attach": "write"}
    with serve_to(identity("a"), ours) as served:
        session_id = session_of(client_of(served, "a"))
        request = attach_pb2.AttachRequest(session_id=session_id, writable=True)
        assert not answer_to(served, request).refusal


def test_an_admin_who_is_no_client_is_refused() -> None:
    operator = identity("a", attach="write", roles=["admin"])
    with serve_to(operator) as served:
        error = refusal_of(served, session_id=secrets.token_bytes(24), token="of-a")
        assert isinstance(error, errors.PermissionDeniedError)
        assert error.fields["needed_role"] == "client"


# ---- requests that no client makes


@pytest.mark.parametrize("session_id", [b"", b"x" * 16, b"x" * 25])
def test_what_names_no_session_is_invalid(served: Served, session_id: bytes) -> None:
    error = refusal_of(served, session_id=session_id)
    assert isinstance(error, errors.InvalidArgumentError)
    assert error.field == "session_id"


def test_a_session_that_is_not_there_is_not_found(served: Served) -> None:
    error = refusal_of(served, session_id=secrets.token_bytes(24), writable=True)
    assert isinstance(error, errors.SessionNotFoundError)
    attachments = served.running.daemon.attachments
    assert attachments is not None
    assert attachments.count(PoolAccess.WRITE) == 0


def test_refused_requests_leave_no_descriptor(served: Served) -> None:
    connection = PeerConnection(UnixAddress(served.running.target.removeprefix("unix:")))
    served.opened.callback(connection.close)
    request = attach_pb2.AttachRequest(session_id=secrets.token_bytes(24), writable=True)
    connection.ask(PeerMessage.ATTACH, request.SerializeToString())
    before = os.listdir("/proc/self/fd")
    for _ in range(5):
        answer = connection.ask(PeerMessage.ATTACH, request.SerializeToString())
        assert attach_pb2.AttachResponse.FromString(answer.rest).refusal
    assert os.listdir("/proc/self/fd") == before


def test_a_connection_never_has_a_second_attachment(served: Served) -> None:
    """The end of a reader's, which is that of its connection, would be the end of a writer's."""
    session_id = session_of(served.client())
    connection = PeerConnection(UnixAddress(served.running.target.removeprefix("unix:")))
    served.opened.callback(connection.close)
    request = attach_pb2.AttachRequest(session_id=session_id).SerializeToString()
    for descriptor in connection.ask(PeerMessage.ATTACH, request).descriptors:
        os.close(descriptor)
    connection.ask(PeerMessage.DETACH)
    with pytest.raises(PeerRefusedError, match="or had, an attachment"):
        connection.ask(PeerMessage.ATTACH, request)


def test_one_connection_has_one_attachment(served: Served) -> None:
    session_id = session_of(served.client())
    connection = PeerConnection(UnixAddress(served.running.target.removeprefix("unix:")))
    served.opened.callback(connection.close)
    request = attach_pb2.AttachRequest(session_id=session_id).SerializeToString()
    for descriptor in connection.ask(PeerMessage.ATTACH, request).descriptors:
        os.close(descriptor)
    with pytest.raises(PeerRefusedError):
        connection.ask(PeerMessage.ATTACH, request)


def test_what_is_no_request_is_refused(served: Served) -> None:
    served.client().server_info()
    connection = PeerConnection(UnixAddress(served.running.target.removeprefix("unix:")))
    served.opened.callback(connection.close)
    with pytest.raises(PeerRefusedError):
        connection.ask(PeerMessage.ATTACH, b"\xff" * 10)


def test_who_is_not_attached_may_say_that_it_is_done(served: Served) -> None:
    connection = PeerConnection(UnixAddress(served.running.target.removeprefix("unix:")))
    served.opened.callback(connection.close)
    assert connection.ask(PeerMessage.DETACH).rest == b""

"""Access control: from the credentials of a call to its caller.

A call has a bearer token, whose hash the auth file knows; or a ticket in its place, which the peer
socket gave to a user of this host; or else the certificate of its TLS connection. `OpenAccess` and
`AccessControl` are the two forms of one contract:

    caller(context, needed_role)    who makes a call, and that it may
    stream(context, needed_role)    the same for a stream, with what says whether that still holds
    peer_caller(peer, token)        who asks on the peer socket
    tenants()                       names of those that there are, see `places.Tenants`
    tenants_with_admins()           of those that have an identity with the role admin
    cut_revoked()                   cancel the streams for which it does not
    for_tenant(caller, name)        an operator, asking what a tenant would find

Safe to call from many threads; the clock, in seconds since 1970, is injected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import grpc

from prefixcache.errors import InvalidArgumentError, UnauthenticatedError
from prefixcache.server.auth_file import AuthRules, Identity, token_hash
from prefixcache.server.callers import ANYONE, Caller
from prefixcache.server.peer_process import Peer
from prefixcache.server.peer_tickets import PeerTickets

_BEARER = "bearer "
_CERTIFICATE_NAMES = (
    ("x509_subject", ""),
    ("peer_dns", "dns:"),
    ("peer_uri", "uri:"),
)
"""gRPC's names of a certificate's properties, and what names in the auth file begin with."""


@dataclass(frozen=True, slots=True)
class Bearer:
    """SHA-256 of a token or a ticket."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class Certificate:
    """Subject and alternative names, as the auth file writes them."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StreamCaller:
    """check: raises UnauthenticatedError once the caller's identity is no more what it was."""

    caller: Caller
    check: Callable[[], None]


class OpenAccess:
    """Everybody is `ANYONE`."""

    def caller(self, context: grpc.ServicerContext, needed_role: str | None) -> Caller:
        return ANYONE

    def stream(
        self, context: grpc.ServicerContext, needed_role: str | None
    ) -> AbstractContextManager[StreamCaller]:
        return nullcontext(StreamCaller(ANYONE, lambda: None))

    def peer_caller(self, peer: Peer, token: str) -> Caller:
        return ANYONE

    def tenants(self) -> Collection[str]:
        return ()

    def tenants_with_admins(self) -> Collection[str]:
        return ()

    def cut_revoked(self) -> None:
        pass

    def for_tenant(self, caller: Caller, name: str) -> Caller:
        """Raises InvalidArgumentError: there are no tenants."""
        raise InvalidArgumentError("tenant", "must be empty, as the daemon has no access control")


class AccessControl:
    """By the rules of the auth file, which `use` replaces."""

    def __init__(
        self, rules: AuthRules, tickets: PeerTickets, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._rules = rules
        self._tickets = tickets
        self._clock = clock
        self._streams: dict[grpc.ServicerContext, Callable[[], None]] = {}

    def use(self, rules: AuthRules) -> None:
        """These rules are in force from now on, for open streams too."""
        self._rules = rules
        self.cut_revoked()

    def caller(self, context: grpc.ServicerContext, needed_role: str | None) -> Caller:
        """Raises UnauthenticatedError or PermissionDeniedError."""
        caller = self._caller_with(_credential_of(context))
        caller.check_may(needed_role)
        return caller

    @contextmanager
    def stream(
        self, context: grpc.ServicerContext, needed_role: str | None
    ) -> Iterator[StreamCaller]:
        """Raises UnauthenticatedError or PermissionDeniedError."""
        credential = _credential_of(context)
        caller = self._caller_with(credential)
        caller.check_may(needed_role)

        def check() -> None:
            if self._caller_with(credential) != caller:
                raise UnauthenticatedError("what the caller may do was changed")

        self._streams[context] = check
        try:
            yield StreamCaller(caller, check)
        finally:
            del self._streams[context]

    def peer_caller(self, peer: Peer, token: str) -> Caller:
        """By a token or a ticket, or by the peer's user if that is empty.

        Raises UnauthenticatedError.
        """
        return self._caller_with(Bearer(token_hash(token)) if token else peer)

    def tenants(self) -> Collection[str]:
        return self._rules.tenants

    def tenants_with_admins(self) -> Collection[str]:
        return self._rules.tenants_with_admins

    def cut_revoked(self) -> None:
        """Cancel streams whose caller could not open them now. To be called now and then."""
        for context, check in list(self._streams.items()):
            try:
                check()
            except UnauthenticatedError:
                context.cancel()

    def for_tenant(self, caller: Caller, name: str) -> Caller:
        """The caller in that tenant's place. Raises InvalidArgumentError for an unknown one."""
        quota = self._rules.tenants.get(name)
        if quota is None:
            raise InvalidArgumentError("tenant", f"{name!r} is not in the auth file")
        return Caller(quota.name, quota.namespace, caller.roles)

    def _caller_with(self, credential: Bearer | Certificate | Peer) -> Caller:
        identity = self._identity(credential)
        if identity is None:
            raise UnauthenticatedError("it does not know those of the call")
        if identity.expires_at_s is not None and self._clock() >= identity.expires_at_s:
            raise UnauthenticatedError("those of the call have expired")
        return identity.caller

    def _identity(self, credential: Bearer | Certificate | Peer) -> Identity | None:
        rules = self._rules
        if isinstance(credential, Peer):
            return rules.of_user(credential.uid, credential.gids)
        if isinstance(credential, Certificate):
            found = (rules.by_subject.get(name) for name in credential.names)
            return next((identity for identity in found if identity is not None), None)
        # A lookup by digest: its time tells nothing of the token.
        by_token = rules.by_token.get(credential.digest)
        if by_token is not None:
            return by_token
        peer = self._tickets.peer_with(credential.digest)
        return rules.of_user(peer.uid, peer.gids) if peer is not None else None


Access = OpenAccess | AccessControl


def _credential_of(context: grpc.ServicerContext) -> Bearer | Certificate:
    """Raises UnauthenticatedError if a call has none. A bearer goes before a certificate."""
    bearers = [value for key, value in context.invocation_metadata() if key == "authorization"]
    if bearers:
        text = bearers[0]
        if len(bearers) > 1 or not isinstance(text, str) or not text.lower().startswith(_BEARER):
            raise UnauthenticatedError("the metadata must have one 'authorization: Bearer TOKEN'")
        return Bearer(token_hash(text[len(_BEARER) :].strip()))
    properties: Mapping[str, Any] = context.auth_context()
    names = tuple(
        prefix + value.decode(errors="replace")
        for key, prefix in _CERTIFICATE_NAMES
        for value in properties.get(key, ())
    )
    if not names:
        raise UnauthenticatedError("the call has none")
    return Certificate(names)

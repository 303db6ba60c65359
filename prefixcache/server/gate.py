"""What the settings of access control make: who may call, tenants' quotas, and TLS of TCP ports.

Part of the life cycle: it sees the configuration, and has parts of it read again by `prepare`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc

from prefixcache.config import ServeConfig
from prefixcache.config.network import AccessSection
from prefixcache.core.sequences import Sequences
from prefixcache.errors import InvalidArgumentError
from prefixcache.rpc.peer_protocol import PeerMessage
from prefixcache.server.access import AccessControl, OpenAccess
from prefixcache.server.auth_file import AuthRules, read_auth_file
from prefixcache.server.peer_socket import PeerSocket
from prefixcache.server.peer_tickets import PeerTickets
from prefixcache.server.tls import ServerTls, TlsFiles


class Gate:
    """Raises InvalidArgumentError, naming the flag, if a file is not fit to be used.

    Without an auth file anyone may call, and there are no tickets and no tenants; without a
    certificate TCP ports have no TLS. sequences: those of the tenants. peers: where tickets are
    given out.
    """

    def __init__(self, section: AccessSection, sequences: Sequences, peers: PeerSocket) -> None:
        self._sequences = sequences
        self.access: AccessControl | OpenAccess = OpenAccess()
        files = _tls_files(section)
        self._tls = ServerTls(files) if files is not None else None
        if section.auth is not None:
            rules = self._read_rules(section.auth)
            self._set_quotas(rules)
            tickets = PeerTickets()
            peers.answer(PeerMessage.TICKET, tickets.give)
            self.access = AccessControl(rules, tickets)

    @property
    def gives_tickets(self) -> bool:
        return isinstance(self.access, AccessControl)

    @property
    def tcp_credentials(self) -> grpc.ServerCredentials | None:
        return self._tls.credentials() if self._tls is not None else None

    def prepare(self, config: ServeConfig) -> Callable[[], None]:
        """Read the files once more; what is returned puts them in force. For `Reload`."""
        section, files = config.access, _tls_files(config.access)
        for flag, was_on, path in (
            ("--auth", isinstance(self.access, AccessControl), section.auth),
            ("--tls-cert", self._tls is not None, files),
        ):
            if was_on != (path is not None):
                raise InvalidArgumentError(flag, "comes and goes with a restart only")
        changes: list[Callable[[], None]] = []
        if self._tls is not None and files is not None:
            changes.append(self._tls.prepare(files))
        if isinstance(self.access, AccessControl) and section.auth is not None:
            access, rules = self.access, self._read_rules(section.auth)
            # A tenant has its account before it can call.
            changes += [lambda: self._set_quotas(rules), lambda: access.use(rules)]

        def apply() -> None:
            for change in changes:
                change()

        return apply

    def _read_rules(self, path: Path) -> AuthRules:
        rules = read_auth_file(path)
        try:
            with self._sequences.lock:
                self._sequences.tenants.check(rules.tenants.values())
        except InvalidArgumentError as error:
            raise InvalidArgumentError("--auth", f"{path}: {error}") from None
        return rules

    def _set_quotas(self, rules: AuthRules) -> None:
        with self._sequences.lock:
            self._sequences.set_tenants(rules.tenants.values())


def _tls_files(section: AccessSection) -> TlsFiles | None:
    if section.tls_cert is None or section.tls_key is None:
        return None
    return TlsFiles(section.tls_cert, section.tls_key, section.tls_client_ca)

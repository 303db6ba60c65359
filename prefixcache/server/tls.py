"""TLS of the daemon's TCP ports: certificates that can be renewed while it serves.

Owns the files' reading and checks, and which certificate new connections get. A connection keeps
the one that it began with.
"""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import grpc

from prefixcache.errors import InvalidArgumentError
from prefixcache.server.auth_file import read_private_file

_HANDSHAKE_BEGINS_S = 0.1
"""How long it takes at most, from when gRPC knows its certificate; in fact microseconds."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. client_ca: clients must have a certificate that it has signed; None: need none."""

    cert: Path
    key: Path
    client_ca: Path | None = None


class ServerTls:
    """Raises InvalidArgumentError, naming the flag, for files that do not fit."""

    def __init__(self, files: TlsFiles) -> None:
        self._asks_for_certificates = files.client_ca is not None
        self._certificate = _read_certificate(files)

    def prepare(self, files: TlsFiles) -> Callable[[], None]:
        """Read files and check them; what is returned gives new connections what they hold.

        Raises InvalidArgumentError.
        """
        if (files.client_ca is not None) != self._asks_for_certificates:
            raise InvalidArgumentError("--tls-client-ca", "comes and goes with a restart only")
        return partial(self._use, _read_certificate(files))

    def credentials(self) -> grpc.ServerCredentials:
        """For one port."""
        given = self._certificate

        def renewed() -> grpc.ServerCertificateConfiguration | None:
            """gRPC asks this before each handshake.

            None for no change: what it makes of a certificate it frees once it has the next, though
            another handshake may begin with it just then. With one given to each handshake, some
            hundred handshakes, 12 at a time, ended the process (grpcio 1.85.3). While this waits,
            no other handshake begins, and those that had begun hold what they need.
            """
            nonlocal given
            if self._certificate is given:
                return None
            time.sleep(_HANDSHAKE_BEGINS_S)
            given = self._certificate
            return given

        made: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            given,
            renewed,  # type: ignore[arg-type]  # the stubs leave None out
            require_client_authentication=self._asks_for_certificates,
        )
        return made

    def _use(self, certificate: grpc.ServerCertificateConfiguration) -> None:
        self._certificate = certificate


def _read_certificate(files: TlsFiles) -> grpc.ServerCertificateConfiguration:
    cert, key = _read("--tls-cert", files.cert), _read("--tls-key", files.key, is_private=True)
    client_ca = None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with _as_file(cert) as cert_path, _as_file(key) as key_path:
        try:
            context.load_cert_chain(cert_path, key_path, _no_password)
        except (ssl.SSLError, ValueError) as error:
            raise InvalidArgumentError(
                "--tls-cert",
                f"{files.cert} and --tls-key {files.key} are not a certificate and its key "
                f"without a password: {error}",
            ) from None
    if files.client_ca is not None:
        client_ca = _read("--tls-client-ca", files.client_ca)
        try:
            context.load_verify_locations(cadata=client_ca.decode())
        except (ssl.SSLError, ValueError) as error:
            raise InvalidArgumentError(
                "--tls-client-ca", f"{files.client_ca} holds no certificates: {error}"
            ) from None
    return grpc.ssl_server_certificate_configuration([(key, cert)], client_ca)


def _read(flag: str, path: Path, is_private: bool = False) -> bytes:
    try:
        return read_private_file(path) if is_private else path.read_bytes()
    except OSError as error:
        raise InvalidArgumentError(flag, f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise InvalidArgumentError(flag, f"{path}: {error}") from None


@contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """A path to these bytes, which `ssl` wants. The file itself may be replaced meanwhile."""
    fd = os.memfd_create("tls")
    try:
        os.write(fd, data)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _no_password() -> NoReturn:
    raise ValueError("the key has a password")

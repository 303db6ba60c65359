"""Certificate authorities and certificates for tests, written to files."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

_VALID_FOR = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """PEM files of a certificate and its key."""

    cert: Path
    key: Path


class Authority:
    """One CA; `ca` is the file of its certificate."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name.from_rfc4514_string(f"CN={name}")
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(
            self._signed(self._name, self._key.public_key(), []).public_bytes(Encoding.PEM)
        )

    def issue(self, name: str, *names: str, subject: str = "") -> Pair:
        """names: `dns:NAME`, `uri:URI` or `ip:ADDRESS`. subject: as RFC 4514 writes it."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject_name = x509.Name.from_rfc4514_string(subject)
        cert = self._signed(subject_name, key.public_key(), list(names))
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        pair.cert.write_bytes(cert.public_bytes(Encoding.PEM))
        pair.key.touch(0o600)
        pair.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return pair

    def _signed(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, names: list[str]
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        is_ca = subject == self._name
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _VALID_FOR)
            .not_valid_after(now + _VALID_FOR)
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        )
        if names:
            alternatives = x509.SubjectAlternativeName([_general_name(name) for name in names])
            builder = builder.add_extension(alternatives, critical=not subject.rdns)
        return builder.sign(self._key, SHA256())


def _general_name(name: str) -> x509.GeneralName:
    kind, _, value = name.partition(":")
    if kind == "ip":
        return x509.IPAddress(ipaddress.ip_address(value))
    return {"dns": x509.DNSName, "uri": x509.UniformResourceIdentifier}[kind](value)

"""Who may reach the daemon, and how much of it one caller may take."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from prefixcache.address import Address, TcpAddress, parse_address
from prefixcache.config.section import MAX_SECONDS, Section, Size, StringList, setting
from prefixcache.errors import InvalidArgumentError

_MAX_GRPC_MESSAGE_BYTES = 2**31 - 1  # gRPC keeps the limit in a C int
_MAX_WAIT_S = 86400.0


class NetworkSection(Section):
    title: ClassVar[str] = "Network"

    listen: StringList = setting(
        (),
        "Address to serve on: host:port, [ipv6]:port or unix:/path; may be repeated. Left out, it "
        "is the socket prefixcache.sock in $XDG_RUNTIME_DIR, else in /run/prefixcache.",
    )
    insecure: bool = setting(
        False,
        "Allow TCP addresses that are not loopback without both TLS and access control: what is "
        "missing, whoever reaches the port can read along, or use the cache.",
    )
    max_message_bytes: Size = setting(
        256 * 2**20,
        "Largest message, either way. A Prefill of T tokens brings T * (Hq + 2 Hkv) * D elements.",
        unit="bytes",
        ge=2**16,
        le=_MAX_GRPC_MESSAGE_BYTES,
    )
    max_workers: int = setting(
        16,
        "Threads that answer calls, and as many more for Prefill and Decode.",
        unit="threads",
        ge=1,
        le=1024,
    )

    @property
    def addresses(self) -> tuple[Address, ...]:
        """`listen`, parsed."""
        return tuple(parse_address(text) for text in self.listen)

    @property
    def open_addresses(self) -> tuple[TcpAddress, ...]:
        """Those that other machines may reach."""
        return tuple(
            address
            for address in self.addresses
            if isinstance(address, TcpAddress) and not address.is_loopback
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            addresses = self.addresses
        except ValueError as error:
            raise InvalidArgumentError("--listen", str(error)) from None
        for address in addresses:
            if addresses.count(address) > 1 and getattr(address, "port", None) != 0:
                raise InvalidArgumentError("--listen", f"{str(address)!r} is given twice")
        return self


class AccessSection(Section):
    title: ClassVar[str] = "Access control"

    auth: Path | None = setting(
        None,
        "TOML file that says whose the credentials of callers are. Left out, there is no access "
        "control. Each of N tenants in it can always have the N-th part of what all share: "
        "sessions, streams, arenas, and places of calls that wait. Read again on SIGHUP.",
    )
    tls_cert: Path | None = setting(
        None,
        "Certificate of TCP ports, with its chain (PEM); they have TLS then. Read again on "
        "SIGHUP, as are the key and the CA.",
    )
    tls_key: Path | None = setting(None, "Private key of --tls-cert (PEM).")
    tls_client_ca: Path | None = setting(
        None, "Clients of TCP ports must have a certificate that this CA has signed (PEM)."
    )
    attach: Literal["none", "read", "write"] = setting(
        "write",
        "What processes of this host that may use a Unix socket of the daemon may do with the "
        "pool's memory itself: map it to read blocks, or to write K/V too. With several tenants "
        "each identity of the auth file needs it granted besides.",
    )

    @property
    def has_tls(self) -> bool:
        return self.tls_cert is not None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "--tls-cert" if self.tls_cert is None else "--tls-key"
            raise InvalidArgumentError(missing, "is missing: a certificate and its key go together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise InvalidArgumentError("--tls-client-ca", "needs --tls-cert and --tls-key")
        return self


class LimitSection(Section):
    title: ClassVar[str] = "Limits"

    max_tokens_per_call: int = setting(
        2**22,
        "Most tokens of one call: of a prompt, or of all rows of a batch, with the lookahead.",
        unit="tokens",
        ge=1,
        le=2**31 - 1,
    )
    max_queued_calls: int = setting(
        1024,
        "Most calls that wait for a thread, Prefill and Decode apart from the others; one more is "
        "refused at once.",
        unit="calls",
        ge=0,
        le=2**20,
    )
    max_queue_wait: float = setting(
        60.0,
        "Longest wait of a call for a thread; then it is refused.",
        unit="seconds",
        gt=0,
        le=MAX_SECONDS,
    )
    max_connections: int = setting(
        1024,
        "Most connections to one address; one more is closed at once.",
        unit="connections",
        ge=1,
        le=2**20,
    )
    max_per_peer: int | None = setting(
        None,
        "Most connections of one user of this host, or of one host on a TCP port; the newest are "
        "cut. Three quarters of --max-connections if left out.",
        unit="connections",
        ge=1,
        le=2**20,
    )
    max_owners: int = setting(
        4096,
        "Most clients without a session that have sequences.",
        unit="clients",
        ge=1,
        le=2**20,
    )
    max_wait_pending: float = setting(
        60.0,
        "Longest time that an Allocate may wait for blocks that another sequence is computing; 0 "
        "for never.",
        unit="seconds",
        ge=0,
        le=_MAX_WAIT_S,
    )
    max_pending_waits: int = setting(
        256,
        "Most Allocates that wait so; one more is answered without the wait.",
        unit="calls",
        ge=0,
        le=4096,
    )
    max_arena: Size = setting(
        2**30,
        "Largest arena: memory that a client on this host shares with the daemon, for tensors of "
        "Prefill and Decode. 0 for none.",
        unit="bytes",
        ge=0,
    )
    max_arenas: Size = setting(
        4 * 2**30,
        "All arenas together; one more is refused, and its client sends its tensors. 0 for none.",
        unit="bytes",
        ge=0,
    )
    max_arenas_per_user: Size | None = setting(
        None,
        "Arenas of one user of this host together, where there is no --auth. Three quarters of "
        "--max-arenas if left out, or one of the largest.",
        unit="bytes",
        ge=0,
    )

    @property
    def connections_of_a_peer(self) -> int:
        return self.max_per_peer or _part_of_one(self.max_connections)

    @property
    def arena_bytes_of_a_user(self) -> int:
        if self.max_arenas_per_user is not None:
            return self.max_arenas_per_user
        return max(_part_of_one(self.max_arenas), min(self.max_arena, self.max_arenas))


def _part_of_one(limit: int) -> int:
    """Of what all share without tenants: it leaves something to others."""
    return limit - limit // 4


class SessionSection(Section):
    title: ClassVar[str] = "Sessions"

    max_sessions: int = setting(
        256, "Most sessions at the same time; one more is refused.", unit="sessions", ge=1, le=16384
    )
    max_session_ttl: float = setting(
        3600.0, "Longest TTL that a session may ask for.", unit="seconds", ge=1, le=MAX_SECONDS
    )
    max_sequences: int = setting(
        16384,
        "Most sequences of one session, or of one client without.",
        unit="sequences",
        ge=1,
        le=2**31 - 1,
    )
    reconnect_grace: float = setting(
        0.5,
        "A session whose connection broke is ended after so long, unless its client is back.",
        unit="seconds",
        ge=0,
        le=MAX_SECONDS,
    )

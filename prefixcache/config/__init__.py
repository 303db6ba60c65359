"""What `prefixcache serve` can be told: frozen sections, one field a setting.

A field states name, type, bounds, default, unit and help once; `prefixcache.options` derives its
flag, environment name and file key, and makes a config of a flat mapping. Names are unique over
all sections.

Constructors only check values: they read neither the environment, nor files, nor the host;
`prefixcache.cli.load_config` does. Only the command line and the server's life cycle see this
module. Immutable, so any thread may read.

Raises InvalidArgumentError whose `field` is the flag.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefixcache.address import TcpAddress
from prefixcache.config.cache import CacheSection, ModelSection, PoolSection
from prefixcache.config.network import (
    AccessSection,
    LimitSection,
    NetworkSection,
    SessionSection,
)
from prefixcache.config.operation import (
    EventsSection,
    MetricsSection,
    ProcessSection,
    RecordSection,
    TracingSection,
)
from prefixcache.errors import InvalidArgumentError

MIN_SAFE_SEED_LENGTH = 16


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """All sections, checked against each other."""

    network: NetworkSection
    access: AccessSection
    pool: PoolSection
    model: ModelSection
    cache: CacheSection
    limits: LimitSection
    sessions: SessionSection
    metrics: MetricsSection
    events: EventsSection
    record: RecordSection
    tracing: TracingSection
    process: ProcessSection

    def __post_init__(self) -> None:
        self._check_exposure()
        if self.pool.storage == "none" and self.model.kv_dtype != "auto":
            raise InvalidArgumentError("--kv-dtype", "cannot go with --storage none")
        missing = self.model.missing_flags
        if self.pool.storage != "none" and missing:
            raise InvalidArgumentError(
                missing[0],
                f"--storage {self.pool.storage} needs the K/V layout: give {', '.join(missing)}, "
                "or a --model-config, or use --storage none",
            )
        if self.record.record is not None and not self.cache.prefix_caching:
            raise InvalidArgumentError(
                "--record", "cannot go with --no-prefix-caching, which hashes nothing"
            )

        if self.events.buffer_bytes and not self.cache.prefix_caching:
            flag = "--events-zmq" if self.events.event_buffer is None else "--event-buffer"
            raise InvalidArgumentError(
                flag, "cannot go with --no-prefix-caching, with which nothing is cached"
            )

    def _check_exposure(self) -> None:
        for address in self.network.open_addresses if not self.network.insecure else ():
            if self._is_missing:
                raise InvalidArgumentError(
                    "--listen",
                    f"{str(address)!r} can be reached from other machines, and there is no "
                    f"{self._is_missing}. Give that, or use a loopback address or a Unix socket, "
                    "or accept it with --insecure",
                )

    @property
    def _is_missing(self) -> str:
        """What a port that other machines reach should have and has not."""
        parts = []
        if not self.access.has_tls:
            parts.append("TLS (--tls-cert, --tls-key)")
        if self.access.auth is None:
            parts.append("access control (--auth)")
        return " and no ".join(parts)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed and unwise, one sentence each. For the log at start."""
        found = []
        seed = self.cache.hash_seed
        if seed is not None and len(seed.get_secret_value()) < MIN_SAFE_SEED_LENGTH:
            found.append(
                f"--hash-seed has fewer than {MIN_SAFE_SEED_LENGTH} characters and can be guessed"
            )
        if self.cache.verify_hits is False and self.cache.hash_algorithm != "sha256_cbor":
            found.append(
                f"--no-verify-hits with {self.cache.hash_algorithm}: a forged collision gives a "
                "prompt the K/V of another"
            )
        if self._is_missing:
            found += [
                f"{address} can be reached from other machines, with no {self._is_missing}"
                for address in self.network.open_addresses
            ]
        metrics = self.metrics.address
        if isinstance(metrics, TcpAddress) and not metrics.is_loopback:
            found.append(
                f"the metrics at {metrics} can be read from other machines; they hold counts and "
                "the names of the model and of tenants, no prompts"
            )
        found += [
            f"{endpoint} can be reached from other machines, and tells whoever asks what tokens "
            "are cached, of all tenants: ZeroMQ has no access control here"
            for endpoint in self.events.open_endpoints
        ]
        return tuple(found)

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
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from prefixcache.address import Address, TcpAddress, parse_address
from prefixcache.errors import InvalidArgumentError
from prefixcache.sizes import MAX_BLOCKS, format_size, parse_size

ENV_PREFIX = "PREFIXCACHE_"
DEFAULT_CPU_MEMORY_BYTES = 2**30
DEFAULT_GPU_MEMORY_FRACTION = 0.8
DEFAULT_EVENT_BUFFER_BYTES = 64 * 2**20
MIN_SAFE_SEED_LENGTH = 16
LATENT_KV_DTYPE = "must be auto for multi-head latent attention: latents are not quantised"

_MAX_GRPC_MESSAGE_BYTES = 2**31 - 1  # gRPC keeps the limit in a C int
_MAX_BLOCK_SIZE = 1024
_MAX_SECONDS = 1e9  # gRPC's clock takes no date after the year 9999
_MAX_WAIT_S = 86400.0


def _split_list(value: object) -> object:
    """An environment variable holds a list with commas."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


Size = Annotated[int, BeforeValidator(parse_size)]
"""Bytes."""
# NoDecode: pydantic-settings would else expect JSON in the environment.
StringList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_list)]


def _is_web_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _setting(default: object, text: str, *, unit: str = "", **field: Any) -> Any:
    return Field(default, description=text, json_schema_extra={"unit": unit}, **field)


class Section(BaseSettings):
    """Base of the sections; `title` heads their flags in the help."""

    # An alias gets the prefix too. populate_by_name lets Python callers use the attribute.
    model_config = SettingsConfigDict(
        allow_inf_nan=False,
        env_ignore_empty=True,
        env_prefix=ENV_PREFIX,
        env_prefix_target="all",
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        populate_by_name=True,
        protected_namespaces=(),
    )
    title: ClassVar[str]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """A constructor takes its arguments only; who loads asks the environment."""
        return (init_settings,)


class NetworkSection(Section):
    title: ClassVar[str] = "Network"

    listen: StringList = _setting(
        (),
        "Address to serve on: host:port, [ipv6]:port or unix:/path; may be repeated. Left out, it "
        "is the socket prefixcache.sock in $XDG_RUNTIME_DIR, else in /run/prefixcache.",
    )
    insecure: bool = _setting(
        False,
        "Allow TCP addresses that are not loopback without both TLS and access control: what is "
        "missing, whoever reaches the port can read along, or use the cache.",
    )
    max_message_bytes: Size = _setting(
        256 * 2**20,
        "Largest message, either way. A Prefill of T tokens brings T * (Hq + 2 Hkv) * D elements.",
        unit="bytes",
        ge=2**16,
        le=_MAX_GRPC_MESSAGE_BYTES,
    )
    max_workers: int = _setting(
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

    auth: Path | None = _setting(
        None,
        "TOML file that says whose the credentials of callers are. Left out, there is no access "
        "control. Read again on SIGHUP.",
    )
    tls_cert: Path | None = _setting(
        None,
        "Certificate of TCP ports, with its chain (PEM); they have TLS then. Read again on "
        "SIGHUP, as are the key and the CA.",
    )
    tls_key: Path | None = _setting(None, "Private key of --tls-cert (PEM).")
    tls_client_ca: Path | None = _setting(
        None, "Clients of TCP ports must have a certificate that this CA has signed (PEM)."
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


class PoolSection(Section):
    title: ClassVar[str] = "Block pool"

    storage: Literal["auto", "cpu", "cuda", "none"] = _setting(
        "auto",
        "Where K/V live; auto is cuda if there is a GPU, else cpu. With none the daemon only "
        "manages blocks, and clients keep the K/V.",
    )
    num_blocks: int | None = _setting(
        None, "Size of the pool, in blocks.", unit="blocks", ge=1, le=MAX_BLOCKS
    )
    memory: Size | None = _setting(
        None,
        "Size of the pool, in bytes. If no size is given, it is "
        f"{format_size(DEFAULT_CPU_MEMORY_BYTES)} on a CPU.",
        unit="bytes",
        ge=1,
    )
    gpu_memory_fraction: float | None = _setting(
        None,
        "Size of the pool, as a part of the GPU's free memory. If no size is given, it is "
        f"{DEFAULT_GPU_MEMORY_FRACTION} on a GPU.",
        gt=0,
        le=1,
    )
    block_size: int = _setting(16, "Tokens of a block.", unit="tokens", ge=1, le=_MAX_BLOCK_SIZE)

    def memory_bytes(self, free_gpu_bytes: int | None) -> int:
        """Bytes for K/V if `num_blocks` is None. `free_gpu_bytes` is None on a CPU."""
        if self.memory is not None:
            return self.memory
        if free_gpu_bytes is not None:
            return int(free_gpu_bytes * (self.gpu_memory_fraction or DEFAULT_GPU_MEMORY_FRACTION))
        if self.gpu_memory_fraction is not None:
            raise InvalidArgumentError("--gpu-memory-fraction", "there is no GPU here")
        return DEFAULT_CPU_MEMORY_BYTES

    @model_validator(mode="after")
    def _check(self) -> Self:
        sizes = {
            "--num-blocks": self.num_blocks,
            "--memory": self.memory,
            "--gpu-memory-fraction": self.gpu_memory_fraction,
        }
        given = [flag for flag, size in sizes.items() if size is not None]
        if len(given) > 1:
            raise InvalidArgumentError(given[1], f"cannot go with {given[0]}; give one of them")
        if self.storage == "none" and given != ["--num-blocks"]:
            raise InvalidArgumentError(
                "--num-blocks",
                "needed with --storage none, as the daemon does not know the size of a block",
            )
        if self.storage == "cpu" and self.gpu_memory_fraction is not None:
            raise InvalidArgumentError("--gpu-memory-fraction", "cannot go with --storage cpu")
        return self


class ModelSection(Section):
    title: ClassVar[str] = "Model"

    model_config_path: Path | None = _setting(
        None,
        "Hugging Face config.json to take the K/V layout from.",
        alias="model_config",
    )
    model_name: str = _setting("", "Name of the model; part of the layout fingerprint.")
    model_revision: str = _setting(
        "", "Revision of the weights; part of the layout fingerprint. New weights, new revision."
    )
    num_layers: int | None = _setting(None, "Layers of the model.", unit="layers", ge=1, le=65535)
    num_kv_heads: int | None = _setting(None, "KV heads a layer.", unit="heads", ge=1, le=65535)
    head_dim: int | None = _setting(None, "Elements of a head.", unit="elements", ge=1, le=65535)
    latent_dim: int | None = _setting(
        None,
        "Elements of the compressed K/V of multi-head latent attention (kv_lora_rank); with "
        "--rope-dim in place of --num-kv-heads and --head-dim.",
        unit="elements",
        ge=1,
        le=65535,
    )
    rope_dim: int | None = _setting(
        None,
        "Elements of K that carry the position in multi-head latent attention (qk_rope_head_dim).",
        unit="elements",
        ge=1,
        le=65535,
    )
    dtype: Literal["float32", "float16", "bfloat16"] | None = _setting(
        None, "Type of q, k, v and the output; taken from --model-config if left out."
    )
    kv_dtype: Literal["auto", "float8_e4m3", "int8"] = _setting(
        "auto",
        "Type of the stored K/V elements; auto is the one of --dtype, the others are quantised.",
    )
    kv_scales: Literal["token_head", "tensor"] = _setting(
        "token_head",
        "What a scale of quantised K/V is for: each token's head, taken from its largest element, "
        "or all K (all V) of a layer, given by --kv-scale-file.",
    )
    kv_scale_file: Path | None = _setting(
        None,
        'JSON file {"k": [...], "v": [...]} with one scale a layer, for --kv-scales tensor. Left '
        "out, they are 1.0 with float8_e4m3; int8 needs it.",
    )

    @property
    def is_latent(self) -> bool:
        """Whether the flags ask for a latent layout; a model config may too."""
        return self.latent_dim is not None or self.rope_dim is not None

    @property
    def missing_flags(self) -> list[str]:
        """Flags that a K/V layout still needs."""
        if self.model_config_path is not None:
            return []
        needed = {"--num-layers": self.num_layers, **self._shape_flags, "--dtype": self.dtype}
        return [flag for flag, value in needed.items() if value is None]

    @property
    def _shape_flags(self) -> dict[str, int | None]:
        if self.is_latent:
            return self._latent_flags
        return self._head_flags

    @property
    def _head_flags(self) -> dict[str, int | None]:
        return {"--num-kv-heads": self.num_kv_heads, "--head-dim": self.head_dim}

    @property
    def _latent_flags(self) -> dict[str, int | None]:
        return {"--latent-dim": self.latent_dim, "--rope-dim": self.rope_dim}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.model_config_path is not None:
            said = {"--num-layers": self.num_layers, **self._head_flags, **self._latent_flags}
            for flag, value in said.items():
                if value is not None:
                    raise InvalidArgumentError(flag, "cannot go with --model-config, which says it")
        if self.is_latent:
            for flag, value in self._head_flags.items():
                if value is not None:
                    raise InvalidArgumentError(
                        flag, "cannot go with --latent-dim and --rope-dim: latents have no heads"
                    )
            if self.kv_dtype != "auto":
                raise InvalidArgumentError("--kv-dtype", LATENT_KV_DTYPE)
        self._check_scales()
        return self

    def _check_scales(self) -> None:
        if self.kv_scales == "tensor" and self.kv_dtype == "auto":
            raise InvalidArgumentError("--kv-scales", "is for quantised K/V: give a --kv-dtype")
        if self.kv_scale_file is not None and self.kv_scales != "tensor":
            raise InvalidArgumentError("--kv-scale-file", "goes with --kv-scales tensor only")
        if self.kv_scale_file is None and (self.kv_dtype, self.kv_scales) == ("int8", "tensor"):
            raise InvalidArgumentError(
                "--kv-scale-file",
                "needed with --kv-dtype int8 and --kv-scales tensor: int8 holds whole numbers, so "
                "no scale fits every model",
            )


class CacheSection(Section):
    title: ClassVar[str] = "Prefix cache"

    prefix_caching: bool = _setting(
        True, "Share blocks of equal prefixes. Turned off, nothing is ever hit, to compare with."
    )
    hash_algorithm: Literal["sha256_cbor", "xxhash_cbor", "xxh3"] = _setting(
        "sha256_cbor",
        "Digest of a block. sha256_cbor and xxhash_cbor give the bytes of vLLM's; the xxh ones "
        "are faster, and can be made to collide.",
    )
    hash_seed: SecretStr | None = _setting(
        None,
        "Text that the chain of hashes starts from: daemons with the same seed have the same "
        "hashes. Random at each start if left out. Of 16 characters or more, and better in the "
        "environment than on a command line, which other users can see.",
    )
    verify_hits: bool | None = _setting(
        None,
        "Compare token ids on each hit, so that a collision is a miss. Left out, it is on for "
        "xxhash_cbor and xxh3.",
    )
    owner_ttl: float = _setting(
        600.0,
        "Free sequences of clients without a session that made no call for so long.",
        unit="seconds",
        gt=0,
    )
    max_fork_children: int = _setting(
        256, "Most children of one Fork.", unit="sequences", ge=1, le=65535
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.hash_seed is not None and not self.hash_seed.get_secret_value():
            raise InvalidArgumentError("--hash-seed", "is empty; leave it out for a random start")
        return self


class LimitSection(Section):
    title: ClassVar[str] = "Limits"

    max_tokens_per_call: int = _setting(
        2**22,
        "Most tokens of one call: of a prompt, or of all rows of a batch, with the lookahead.",
        unit="tokens",
        ge=1,
        le=2**31 - 1,
    )
    max_queued_calls: int = _setting(
        1024,
        "Most calls that wait for a thread, Prefill and Decode apart from the others; one more is "
        "refused at once.",
        unit="calls",
        ge=0,
        le=2**20,
    )
    max_queue_wait: float = _setting(
        60.0,
        "Longest wait of a call for a thread; then it is refused.",
        unit="seconds",
        gt=0,
        le=_MAX_SECONDS,
    )
    max_connections: int = _setting(
        1024,
        "Most connections to one address; one more is closed at once.",
        unit="connections",
        ge=1,
        le=2**20,
    )
    max_owners: int = _setting(
        4096,
        "Most clients without a session that have sequences.",
        unit="clients",
        ge=1,
        le=2**20,
    )
    max_wait_pending: float = _setting(
        60.0,
        "Longest time that an Allocate may wait for blocks that another sequence is computing; 0 "
        "for never.",
        unit="seconds",
        ge=0,
        le=_MAX_WAIT_S,
    )
    max_pending_waits: int = _setting(
        256,
        "Most Allocates that wait so; one more is answered without the wait.",
        unit="calls",
        ge=0,
        le=4096,
    )


class SessionSection(Section):
    title: ClassVar[str] = "Sessions"

    max_sessions: int = _setting(
        256, "Most sessions at the same time; one more is refused.", unit="sessions", ge=1, le=16384
    )
    max_session_ttl: float = _setting(
        3600.0, "Longest TTL that a session may ask for.", unit="seconds", ge=1, le=_MAX_SECONDS
    )
    max_sequences: int = _setting(
        16384,
        "Most sequences of one session, or of one client without.",
        unit="sequences",
        ge=1,
        le=2**31 - 1,
    )
    reconnect_grace: float = _setting(
        0.5,
        "A session whose connection broke is ended after so long, unless its client is back.",
        unit="seconds",
        ge=0,
        le=_MAX_SECONDS,
    )


class MetricsSection(Section):
    title: ClassVar[str] = "Metrics"

    metrics_listen: str | None = _setting(
        None,
        "Address that answers HTTP with Prometheus metrics (/metrics), a status page (/), /healthz "
        "and /readyz: host:port, [ipv6]:port or unix:/path. Left out, there is none.",
    )

    @property
    def address(self) -> Address | None:
        """`metrics_listen`, parsed."""
        return None if self.metrics_listen is None else parse_address(self.metrics_listen)

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            _ = self.address
        except ValueError as error:
            raise InvalidArgumentError("--metrics-listen", str(error)) from None
        return self


class TracingSection(Section):
    title: ClassVar[str] = "Tracing"

    otlp_endpoint: str | None = _setting(
        None,
        "URL of an OpenTelemetry collector, such as http://127.0.0.1:4317, that gets a span for "
        "each call over OTLP. The environment's OTEL_* say the rest. Left out, there are none.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.otlp_endpoint is not None and not _is_web_address(self.otlp_endpoint):
            raise InvalidArgumentError(
                "--otlp-endpoint", f"is {self.otlp_endpoint!r}, must be http://... or https://..."
            )
        return self


class EventsSection(Section):
    title: ClassVar[str] = "Events"

    event_buffer: Size | None = _setting(
        None,
        "Keep the last events of the cache, so many bytes of them, for `prefixcache events` and "
        f"other watchers. Left out, there are none, or {format_size(DEFAULT_EVENT_BUFFER_BYTES)} "
        "with --events-zmq.",
        unit="bytes",
        ge=2**20,
    )
    events_zmq: str | None = _setting(
        None,
        "Address that publishes events over ZeroMQ as vLLM does: tcp://host:port, where * is any "
        "host.",
    )
    events_zmq_replay: str | None = _setting(
        None, "Address where a subscriber of --events-zmq asks for events that it has missed."
    )
    events_topic: str = _setting("", "Topic of the messages of --events-zmq.", max_length=256)

    @property
    def buffer_bytes(self) -> int:
        """0 for no events."""
        default = 0 if self.events_zmq is None else DEFAULT_EVENT_BUFFER_BYTES
        return default if self.event_buffer is None else self.event_buffer

    @property
    def open_endpoints(self) -> tuple[str, ...]:
        """Those that other machines may reach."""
        given = (self.events_zmq, self.events_zmq_replay)
        return tuple(text for text in given if text is not None and not _is_loopback(text))

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("events_zmq", "events_zmq_replay"):
            endpoint = getattr(self, name)
            if endpoint is not None:
                try:
                    _is_loopback(endpoint)
                except ValueError as error:
                    flag = "--" + name.replace("_", "-")
                    raise InvalidArgumentError(flag, str(error)) from None
        if self.events_zmq is None:
            if self.events_zmq_replay is not None:
                raise InvalidArgumentError("--events-zmq-replay", "needs --events-zmq")
            if self.events_topic:
                raise InvalidArgumentError("--events-topic", "needs --events-zmq")
        return self


def _is_loopback(endpoint: str) -> bool:
    """Of ZeroMQ. Raises ValueError for one that is not `tcp://host:port`."""
    scheme, separator, text = endpoint.partition("://")
    if (scheme, separator) != ("tcp", "://"):
        raise ValueError(f"{endpoint!r} is no address; write tcp://host:port")
    if text.startswith("*:"):
        parse_address(f"0.0.0.0{text[1:]}")
        return False
    address = parse_address(text)
    if not isinstance(address, TcpAddress):
        raise ValueError(f"{endpoint!r} is no address; write tcp://host:port")
    return address.is_loopback


class RecordSection(Section):
    title: ClassVar[str] = "Record of requests"

    record: Path | None = _setting(
        None,
        "File for a record of the prompts that come, as hashes of their blocks, which `prefixcache "
        "analyze` and `replay` read. Only its owner may read it. An earlier one becomes FILE.1.",
    )
    record_limit: Size = _setting(
        2**30,
        "Largest size of the record. At half of it, the file becomes FILE.1 and a new one begins.",
        unit="bytes",
        ge=2**16,
    )


class ProcessSection(Section):
    title: ClassVar[str] = "Process"

    threads: int | None = _setting(
        None,
        "Threads of one attention call; torch's own choice if left out.",
        unit="threads",
        ge=1,
        le=1024,
    )
    drain_timeout: float = _setting(
        30.0, "Wait so long for running calls when stopped.", unit="seconds", ge=0, le=_MAX_SECONDS
    )
    log_format: Literal["auto", "console", "json"] = _setting(
        "auto", "Form of the log on stderr; auto is console on a terminal, else json."
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "info", "Least severity that is logged."
    )


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

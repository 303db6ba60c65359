from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
from pydantic import ValidationError

from prefixcache.config import ServeConfig
from prefixcache.config.cache import PoolSection
from prefixcache.core.hashing import HASH_ALGORITHMS
from prefixcache.errors import InvalidArgumentError
from prefixcache.options import OPTIONS, SECTIONS, make_config
from prefixcache.storage.layout import DTYPE_BYTES, QUANTIZED_DTYPES, SCALE_GRANULARITIES

MINIMAL = {"storage": "none", "num_blocks": 100}
LAYOUT = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "dtype": "float32"}
LATENT_LAYOUT = {"num_layers": 2, "latent_dim": 8, "rope_dim": 4, "dtype": "float32"}


def config_with(**values: object) -> ServeConfig:
    return make_config({**MINIMAL, **values})


def refusal(values: dict[str, Any]) -> InvalidArgumentError:
    with pytest.raises(InvalidArgumentError) as refused:
        make_config(values)
    return refused.value


@pytest.mark.parametrize("key", OPTIONS)
def test_flag_environment_name_and_key_of_a_setting_are_one_name(key: str) -> None:
    option = OPTIONS[key]
    assert option.key == key
    assert option.flag == "--" + key.replace("_", "-")
    assert option.env == "PREFIXCACHE_" + key.upper()
    assert option.help.endswith(".")
    assert option.attribute in (key, f"{key}_path")


def test_every_field_of_every_section_is_a_setting_of_its_own_name() -> None:
    num_fields = sum(len(section.model_fields) for section in SECTIONS.values())
    assert len(OPTIONS) == num_fields
    assert [field.name for field in dataclasses.fields(ServeConfig)] == list(SECTIONS)


def test_no_setting_has_a_name_that_kubernetes_or_a_client_uses() -> None:
    taken = {"port", "service_host", "service_port", "config", "target"}
    assert not taken & OPTIONS.keys()
    assert not [key for key in OPTIONS if key.startswith(("port_", "service_port_"))]


def test_choices_are_the_ones_of_the_code_behind_them() -> None:
    assert OPTIONS["hash_algorithm"].choices == tuple(HASH_ALGORITHMS)
    assert set(OPTIONS["dtype"].choices) == set(DTYPE_BYTES)
    assert OPTIONS["kv_dtype"].choices == ("auto", *QUANTIZED_DTYPES)
    assert OPTIONS["kv_scales"].choices == SCALE_GRANULARITIES


def test_sections_cannot_be_changed_and_ignore_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PREFIXCACHE_BLOCK_SIZE", "64")
    pool = PoolSection(num_blocks=1)
    assert pool.block_size == 16
    with pytest.raises(ValidationError, match="frozen"):
        pool.num_blocks = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config_with().pool = pool  # type: ignore[misc]


def test_text_is_read_as_the_setting_wants_it() -> None:
    config = config_with(
        num_blocks="7",
        max_message_bytes="1MiB",
        owner_ttl="0.5",
        prefix_caching="false",
        verify_hits="true",
        listen="127.0.0.1:1, unix:/run/p.sock",
    )
    assert config.pool.num_blocks == 7
    assert config.network.max_message_bytes == 2**20
    assert config.cache.owner_ttl == 0.5
    assert config.cache.prefix_caching is False
    assert config.cache.verify_hits is True
    assert config.network.listen == ("127.0.0.1:1", "unix:/run/p.sock")
    assert [str(address) for address in config.network.addresses] == list(config.network.listen)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_message_bytes", "1KiB"),
        ("max_message_bytes", "2GiB"),
        ("max_workers", 0),
        ("storage", "disk"),
        ("num_blocks", 0),
        ("num_blocks", "many"),
        ("num_blocks", 2**31),
        ("num_blocks", True),
        ("block_size", 0),
        ("block_size", 1025),
        ("block_size", None),
        ("memory", "4G"),
        ("memory", 0),
        ("gpu_memory_fraction", 0),
        ("gpu_memory_fraction", 1.5),
        ("num_layers", 0),
        ("num_kv_heads", -1),
        ("head_dim", 1.5),
        ("dtype", "int8"),
        ("latent_dim", 0),
        ("rope_dim", 65536),
        ("kv_dtype", "float8_e5m2"),
        ("kv_dtype", "float16"),
        ("kv_dtype", None),
        ("kv_scales", "block"),
        ("kv_scale_file", 7),
        ("hash_algorithm", "md5"),
        ("hash_seed", ""),
        ("verify_hits", "maybe"),
        ("owner_ttl", 0),
        ("owner_ttl", "inf"),
        ("owner_ttl", "nan"),
        ("max_fork_children", 0),
        ("threads", 0),
        ("drain_timeout", -1),
        ("drain_timeout", 1e10),  # gRPC's clock ends before
        ("model_name", "\udcff"),
        ("hash_seed", "a seed of bytes \udcff"),
        ("log_format", "xml"),
        ("log_level", "loud"),
        ("listen", ["nowhere"]),
        ("listen", ["127.0.0.1:1", "unix:/\udcff"]),
        ("listen", 7),
    ],
)
def test_a_bad_value_is_refused_under_its_flag(key: str, value: object) -> None:
    error = refusal({**MINIMAL, key: value})
    assert error.field == OPTIONS[key].flag
    assert str(error).startswith(f"{OPTIONS[key].flag}: ")


@pytest.mark.parametrize(
    ("key", "value"), [("block_size", 1), ("block_size", 1024), ("drain_timeout", 0)]
)
def test_a_value_at_its_bound_is_allowed(key: str, value: object) -> None:
    assert OPTIONS[key].value_in(config_with(**{key: value})) == value


def test_an_unknown_key_is_named_with_the_one_that_was_meant() -> None:
    error = refusal({"num_block": 1})
    assert error.field == "num_block"
    assert "did you mean 'num_blocks'" in str(error)


@pytest.mark.parametrize(
    ("sizes", "flag"),
    [
        ({"num_blocks": 1, "memory": "1MiB"}, "--memory"),
        ({"memory": "1MiB", "gpu_memory_fraction": 0.5}, "--gpu-memory-fraction"),
        ({"storage": "cpu", "gpu_memory_fraction": 0.5}, "--gpu-memory-fraction"),
        ({"storage": "none"}, "--num-blocks"),
        ({"storage": "none", "memory": "1MiB"}, "--num-blocks"),
    ],
)
def test_sizes_that_exclude_each_other_are_refused(sizes: dict[str, object], flag: str) -> None:
    assert refusal({**LAYOUT, **sizes}).field == flag


def test_the_memory_of_a_pool_follows_from_what_was_given() -> None:
    def memory(free_gpu_bytes: int | None, **sizes: object) -> int:
        return make_config({**LAYOUT, **sizes}).pool.memory_bytes(free_gpu_bytes)

    assert memory(None) == 2**30
    assert memory(1000) == 800
    assert memory(1000, gpu_memory_fraction=0.5) == 500
    assert memory(1000, memory="3KiB") == memory(None, memory="3KiB") == 3072
    with pytest.raises(InvalidArgumentError, match="--gpu-memory-fraction: there is no GPU"):
        memory(None, gpu_memory_fraction=0.5)


@pytest.mark.parametrize("storage", ["auto", "cpu", "cuda"])
@pytest.mark.parametrize(
    ("layout", "missing"),
    [(layout, missing) for layout in (LAYOUT, LATENT_LAYOUT) for missing in layout],
)
def test_storage_needs_a_whole_layout_and_the_error_names_what_is_missing(
    storage: str, layout: dict[str, object], missing: str
) -> None:
    given = {key: value for key, value in layout.items() if key != missing}
    assert make_config({**layout, "storage": storage}).model.missing_flags == []
    error = refusal({**given, "storage": storage})
    assert error.field == OPTIONS[missing].flag
    assert f"give {OPTIONS[missing].flag}, or a --model-config" in str(error)


def test_a_model_config_replaces_the_layout_flags_but_not_the_dtype() -> None:
    config = make_config({"model_config": "/m/config.json", "dtype": "float16"})
    assert str(config.model.model_config_path) == "/m/config.json"
    assert config.model.missing_flags == []
    for key in ("num_layers", "num_kv_heads", "head_dim", "latent_dim", "rope_dim"):
        error = refusal({"model_config": "/m/config.json", key: 8})
        assert error.field == OPTIONS[key].flag


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({**LATENT_LAYOUT, "num_kv_heads": 1}, "--num-kv-heads"),
        ({**LATENT_LAYOUT, "head_dim": 12}, "--head-dim"),
        ({**LAYOUT, "rope_dim": 4}, "--num-kv-heads"),
        ({**LATENT_LAYOUT, "kv_dtype": "int8"}, "--kv-dtype"),
        ({**MINIMAL, "kv_dtype": "int8"}, "--kv-dtype"),
        ({**LAYOUT, "kv_scales": "tensor"}, "--kv-scales"),
        ({**LAYOUT, "kv_dtype": "int8", "kv_scales": "tensor"}, "--kv-scale-file"),
        ({**LAYOUT, "kv_scale_file": "s.json"}, "--kv-scale-file"),
        ({**LAYOUT, "kv_dtype": "int8", "kv_scale_file": "s.json"}, "--kv-scale-file"),
    ],
)
def test_kinds_of_kv_that_exclude_each_other_are_refused(
    values: dict[str, object], flag: str
) -> None:
    assert refusal(values).field == flag


@pytest.mark.parametrize(
    "values",
    [
        {"kv_dtype": "int8"},
        {"kv_dtype": "float8_e4m3", "kv_scales": "tensor"},
        {"kv_dtype": "int8", "kv_scales": "tensor", "kv_scale_file": "s.json"},
    ],
)
def test_kv_may_be_quantised(values: dict[str, object]) -> None:
    make_config({**LAYOUT, **values})
    make_config({"model_config": "/m/config.json", **values})


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.0.0.1:0", "gpu-1:50051"])
def test_addresses_of_other_machines_need_insecure(address: str) -> None:
    error = refusal({**MINIMAL, "listen": [address]})
    assert error.field == "--listen"
    assert "no TLS (--tls-cert, --tls-key) and no access control (--auth)" in str(error)
    config = config_with(listen=[address], insecure=True)
    assert any(address in warning for warning in config.warnings)


TLS = {"tls_cert": "cert.pem", "tls_key": "key.pem"}
AUTH = {"auth": "auth.toml"}
MTLS = {**TLS, "tls_client_ca": "ca.pem"}


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        (TLS, "no access control (--auth)"),
        (MTLS, "no access control (--auth)"),
        (AUTH, "no TLS (--tls-cert, --tls-key)"),
    ],
)
def test_tls_or_access_control_alone_is_not_enough_for_other_machines(
    given: dict[str, str], missing: str
) -> None:
    error = refusal({**MINIMAL, **given, "listen": ["0.0.0.0:1"]})
    assert error.field == "--listen"
    assert f"there is {missing}. " in str(error)
    config = config_with(**given, listen=["0.0.0.0:1"], insecure=True)
    assert config.warnings == (f"0.0.0.0:1 can be reached from other machines, with {missing}",)
    config_with(**given, listen=["127.0.0.1:1", "unix:a"])


@pytest.mark.parametrize("tls", [TLS, MTLS])
def test_with_tls_and_access_control_other_machines_may_call(tls: dict[str, str]) -> None:
    assert not config_with(**tls, **AUTH, listen=["0.0.0.0:1", "[::]:1"]).warnings


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tls_cert": "c"}, "--tls-key"),
        ({"tls_key": "k"}, "--tls-cert"),
        ({"tls_client_ca": "a"}, "--tls-client-ca"),
    ],
)
def test_the_files_of_tls_go_together(given: dict[str, str], field: str) -> None:
    assert refusal({**MINIMAL, **given}).field == field


def test_one_address_twice_is_refused_but_for_free_ports() -> None:
    assert "twice" in str(refusal({**MINIMAL, "listen": ["unix:a", "unix:a"]}))
    config_with(listen=["127.0.0.1:0", "127.0.0.1:0"])


@pytest.mark.parametrize("address", ["0.0.0.0:9464", "[::]:0", "gpu-1:9464"])
def test_metrics_for_other_machines_draw_a_warning(address: str) -> None:
    (warning,) = config_with(metrics_listen=address).warnings
    assert address in warning and "no prompts" in warning


@pytest.mark.parametrize("address", ["127.0.0.1:9464", "localhost:0", "[::1]:1", "unix:m.sock"])
def test_metrics_for_this_machine_draw_none(address: str) -> None:
    assert not config_with(metrics_listen=address).warnings


@pytest.mark.parametrize("address", [":9464", "9464", "127.0.0.1", "127.0.0.1:x", "unix:"])
def test_a_bad_address_for_metrics_is_refused_by_its_flag(address: str) -> None:
    assert refusal({**MINIMAL, "metrics_listen": address}).field == "--metrics-listen"


@pytest.mark.parametrize("url", ["127.0.0.1:4317", "ftp://host", "http://", "http://host:port", ""])
def test_a_collector_is_given_as_a_url(url: str) -> None:
    assert refusal({**MINIMAL, "otlp_endpoint": url}).field == "--otlp-endpoint"


@pytest.mark.parametrize(("seed", "num_warnings"), [("x" * 15, 1), ("x" * 16, 0)])
def test_a_short_seed_draws_a_warning(seed: str, num_warnings: int) -> None:
    assert len(config_with(hash_seed=seed).warnings) == num_warnings


def test_unverified_hits_with_a_digest_that_can_collide_draw_a_warning() -> None:
    assert not config_with(hash_algorithm="xxh3").warnings
    assert not config_with(hash_algorithm="sha256_cbor", verify_hits=False).warnings
    assert "xxh3" in config_with(hash_algorithm="xxh3", verify_hits=False).warnings[0]


def test_a_seed_is_in_no_text_of_the_configuration_and_in_no_error() -> None:
    seed = "an honest secret of the house"
    assert seed not in repr(config_with(hash_seed=seed))
    assert seed not in "".join(config_with(hash_seed=seed).warnings)
    assert "honest" not in str(refusal({**MINIMAL, "hash_seed": ["honest"]}))


def test_making_a_configuration_does_not_look_at_the_host() -> None:
    config = config_with(listen=[f"unix:{os.sep}no{os.sep}such{os.sep}p.sock"])
    assert config.network.addresses


# ---- events


def test_there_is_no_buffer_of_events_unless_one_is_wanted() -> None:
    assert config_with().events.buffer_bytes == 0
    assert config_with(event_buffer="2MiB").events.buffer_bytes == 2 * 2**20
    assert config_with(events_zmq="tcp://127.0.0.1:5557").events.buffer_bytes == 64 * 2**20
    both = config_with(events_zmq="tcp://127.0.0.1:5557", event_buffer="1MiB")
    assert both.events.buffer_bytes == 2**20


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"event_buffer": 2**20 - 1}, "--event-buffer"),
        ({"events_zmq": "127.0.0.1:5557"}, "--events-zmq"),
        ({"events_zmq": "ipc:///tmp/x"}, "--events-zmq"),
        ({"events_zmq": "tcp://unix:/x"}, "--events-zmq"),
        ({"events_zmq": "tcp://*:x"}, "--events-zmq"),
        ({"events_zmq": "tcp://*:1", "events_zmq_replay": "tcp://"}, "--events-zmq-replay"),
        ({"events_zmq_replay": "tcp://127.0.0.1:5558"}, "--events-zmq-replay"),
        ({"events_topic": "kv"}, "--events-topic"),
        ({"event_buffer": "1MiB", "prefix_caching": False}, "--event-buffer"),
        ({"events_zmq": "tcp://[::1]:1", "prefix_caching": False}, "--events-zmq"),
    ],
)
def test_bad_settings_of_events_are_refused_by_their_flag(
    settings: dict[str, object], flag: str
) -> None:
    assert refusal({**MINIMAL, **settings}).field == flag


def test_addresses_of_events_that_other_machines_reach_draw_a_warning() -> None:
    near = config_with(events_zmq="tcp://localhost:1", events_zmq_replay="tcp://[::1]:2")
    assert not near.warnings
    far = config_with(events_zmq="tcp://*:5557", events_zmq_replay="tcp://10.0.0.1:5558")
    assert [warning.split()[0] for warning in far.warnings] == [
        "tcp://*:5557",
        "tcp://10.0.0.1:5558",
    ]

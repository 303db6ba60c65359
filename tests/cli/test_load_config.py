from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from prefixcache.cli.load_config import LoadedConfig, load_config
from prefixcache.cli.print_config import render_config
from prefixcache.errors import InvalidArgumentError
from prefixcache.options import OPTIONS

MINIMAL: dict[str, object] = {"storage": "none", "num_blocks": "100"}

NOT_DEFAULT: dict[str, object] = {
    "listen": ["127.0.0.1:0", "[::1]:7"],
    "insecure": True,
    "auth": __file__,
    "tls_cert": __file__,
    "tls_key": __file__,
    "tls_client_ca": __file__,
    "attach": "read",
    "max_message_bytes": "1000000",
    "max_workers": 3,
    "storage": "cpu",
    "num_blocks": 5,
    "block_size": 4,
    "model_name": 'a "quoted" \\ name\twith\x7f control and é 😀',
    "model_revision": "r1",
    "num_layers": 2,
    "num_kv_heads": 3,
    "head_dim": 8,
    "dtype": "float16",
    "kv_dtype": "float8_e4m3",
    "kv_scales": "tensor",
    "prefix_caching": False,
    "hash_algorithm": "xxh3",
    "verify_hits": False,
    "owner_ttl": 0.25,
    "max_fork_children": 9,
    "max_tokens_per_call": 1000,
    "max_queued_calls": 4,
    "max_queue_wait": 2.5,
    "max_connections": 12,
    "max_per_peer": 9,
    "max_owners": 11,
    "max_arena": "3000000",
    "max_arenas": "5000000",
    "max_arenas_per_user": "4000000",
    "max_wait_pending": 2.5,
    "max_pending_waits": 5,
    "max_sessions": 8,
    "max_session_ttl": 7.5,
    "max_sequences": 6,
    "reconnect_grace": 0.25,
    "metrics_listen": "127.0.0.1:9464",
    "otlp_endpoint": "http://127.0.0.1:4317",
    "record_limit": "2000000",
    "threads": 2,
    "drain_timeout": 1.5,
    "log_format": "json",
    "log_level": "debug",
}
"""A value for each setting but the secret and those that exclude one of these."""
EXCLUDED = {
    "memory",
    "gpu_memory_fraction",
    "model_config",
    "latent_dim",
    "rope_dim",
    "kv_scale_file",
    "hash_seed",
    "record",
    "event_buffer",
    "events_zmq",
    "events_zmq_replay",
    "events_topic",
}
HEADS = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "dtype": "float32"}


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No settings in the environment, and a place for the default socket."""
    for option in OPTIONS.values():
        monkeypatch.delenv(option.env, raising=False)
    monkeypatch.delenv("PREFIXCACHE_CONFIG", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def file_with(folder: Path, text: str) -> str:
    path = folder / "prefixcache.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def as_toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def as_environment(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def values_of(loaded: LoadedConfig) -> dict[str, object]:
    return {key: option.value_in(loaded.config) for key, option in OPTIONS.items()}


def test_flag_wins_over_environment_over_file_over_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_with(tmp_path, "block_size = 2\nmax_workers = 2\nthreads = 2\n")
    monkeypatch.setenv("PREFIXCACHE_BLOCK_SIZE", "3")
    monkeypatch.setenv("PREFIXCACHE_MAX_WORKERS", "3")
    loaded = load_config({**MINIMAL, "block_size": "4"}, path)
    assert loaded.config.pool.block_size == 4
    assert loaded.config.network.max_workers == 3
    assert loaded.config.process.threads == 2
    assert loaded.config.cache.max_fork_children == 256
    assert loaded.origins == {
        "storage": "flag --storage",
        "num_blocks": "flag --num-blocks",
        "block_size": "flag --block-size",
        "max_workers": "environment PREFIXCACHE_MAX_WORKERS",
        "threads": f"file {path}",
    }


def test_every_setting_means_the_same_in_flag_environment_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert NOT_DEFAULT.keys() | EXCLUDED == OPTIONS.keys()
    from_flags = values_of(load_config(NOT_DEFAULT, None))
    lines = [f"{key} = {as_toml(value)}" for key, value in NOT_DEFAULT.items()]
    assert values_of(load_config({}, file_with(tmp_path, "\n".join(lines)))) == from_flags
    for key, value in NOT_DEFAULT.items():
        monkeypatch.setenv(OPTIONS[key].env, as_environment(value))
    assert values_of(load_config({}, None)) == from_flags
    assert [key for key in NOT_DEFAULT if from_flags[key] == OPTIONS[key].field.default] == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("memory", "3MiB"),
        ("gpu_memory_fraction", "0.5"),
        ("hash_seed", "s" * 16),
        ("kv_scale_file", __file__),
        ("record", "record.jsonl"),
    ],
)
def test_settings_that_exclude_others_come_from_everywhere_too(
    key: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: dict[str, object] = dict(HEADS)
    if key == "kv_scale_file":
        others |= {"kv_dtype": "int8", "kv_scales": "tensor"}
    from_flag = values_of(load_config({**others, key: value}, None))
    path = file_with(tmp_path, f"{key} = {as_toml(value)}")
    assert values_of(load_config(others, path)) == from_flag
    monkeypatch.setenv(OPTIONS[key].env, value)
    assert values_of(load_config(others, None)) == from_flag


def test_the_shape_of_latents_comes_from_everywhere_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {"num_layers": 1, "dtype": "float32"}
    from_flags = values_of(load_config({**others, "latent_dim": "512", "rope_dim": "64"}, None))
    assert (from_flags["latent_dim"], from_flags["rope_dim"]) == (512, 64)
    path = file_with(tmp_path, "latent_dim = 512\nrope_dim = 64")
    assert values_of(load_config(others, path)) == from_flags
    monkeypatch.setenv("PREFIXCACHE_LATENT_DIM", "512")
    monkeypatch.setenv("PREFIXCACHE_ROPE_DIM", "64")
    assert values_of(load_config(others, None)) == from_flags


@pytest.mark.parametrize(
    ("key", "others"),
    [
        ("model_config", {}),
        ("auth", HEADS),
        ("tls_cert", {**HEADS, "tls_key": __file__}),
        ("tls_key", {**HEADS, "tls_cert": __file__}),
        ("tls_client_ca", {**HEADS, "tls_cert": __file__, "tls_key": __file__}),
        ("kv_scale_file", {**HEADS, "kv_dtype": "int8", "kv_scales": "tensor"}),
    ],
)
def test_a_file_that_is_named_must_be_there(
    key: str, others: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, option = tmp_path / "named.json", OPTIONS[key]
    monkeypatch.setenv(option.env, str(path))
    with pytest.raises(InvalidArgumentError, match=rf"{option.flag}: .*not a file") as refused:
        load_config(others, None)
    assert refused.value.field == option.flag
    path.write_text("{}")
    assert option.value_in(load_config(others, None).config) == path


def test_the_file_can_be_named_by_the_environment_and_the_flag_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFIXCACHE_CONFIG", file_with(tmp_path, "block_size = 2"))
    assert load_config(MINIMAL, None).config.pool.block_size == 2
    other = tmp_path / "other.toml"
    other.write_text("block_size = 3")
    assert load_config(MINIMAL, str(other)).config.pool.block_size == 3


def test_an_unknown_key_in_the_file_is_named_with_the_one_that_was_meant(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        load_config(MINIMAL, file_with(tmp_path, "num_block = 5"))
    assert "'num_block' is no setting; did you mean 'num_blocks'?" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[pool]\nnum_blocks = 5", "is a table"),
        ("num_blocks = =", "at line 1"),
        ("model_config_path = 'x'", "'model_config_path' is no setting"),
        ("xyzzy = 1", "'xyzzy' is no setting$"),
    ],
)
def test_a_file_that_is_not_a_flat_list_of_settings_is_refused(
    text: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgumentError, match=f"--config: .*{problem}"):
        load_config(MINIMAL, file_with(tmp_path, text))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"--config: .*No such file"):
        load_config(MINIMAL, str(tmp_path / "none.toml"))
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgumentError, match=r"--config: .*utf-8"):
        load_config(MINIMAL, str(tmp_path / "bytes.toml"))


def test_other_variables_with_our_prefix_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = values_of(load_config(MINIMAL, None))
    monkeypatch.setenv("PREFIXCACHE_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("PREFIXCACHE_PORT", "tcp://10.0.0.1:50051")
    monkeypatch.setenv("PREFIXCACHE_PORT_50051_TCP_ADDR", "10.0.0.1")
    assert values_of(load_config(MINIMAL, None)) == before


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFIXCACHE_BLOCK_SIZE", "")
    monkeypatch.setenv("PREFIXCACHE_CONFIG", "")
    assert load_config(MINIMAL, None).config.pool.block_size == 16


def test_an_error_says_where_the_value_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_with(tmp_path, "block_size = 0")
    with pytest.raises(InvalidArgumentError, match=rf"^--block-size: .*\(from file {path}\)$"):
        load_config(MINIMAL, path)
    monkeypatch.setenv("PREFIXCACHE_BLOCK_SIZE", "-1")
    with pytest.raises(InvalidArgumentError, match=r"\(from environment PREFIXCACHE_BLOCK_SIZE\)$"):
        load_config(MINIMAL, path)
    with pytest.raises(InvalidArgumentError, match=r"^--block-size: [^(]*$"):
        load_config({**MINIMAL, "block_size": "0"}, path)


def test_the_default_socket_is_filled_in(runtime_folder: Path) -> None:
    loaded = load_config(MINIMAL, None)
    assert loaded.config.network.listen == (f"unix:{runtime_folder}/prefixcache.sock",)
    assert "listen" not in loaded.origins


def test_a_default_socket_with_too_long_a_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("x" * 100)))
    with pytest.raises(InvalidArgumentError, match=r"--listen: .*may have 107"):
        load_config(MINIMAL, None)


def test_a_socket_in_a_folder_that_everyone_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(InvalidArgumentError, match=r"--listen: .*every user can write"):
        load_config({**MINIMAL, "listen": [f"unix:{tmp_path}/p.sock"]}, None)


def test_the_printed_configuration_gives_the_same_configuration(tmp_path: Path) -> None:
    for flags in (MINIMAL, NOT_DEFAULT):
        loaded = load_config(flags, None)
        again = load_config({}, file_with(tmp_path, render_config(loaded)))
        assert again.config == loaded.config


def test_the_printed_configuration_says_where_each_value_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFIXCACHE_OWNER_TTL", "5")
    path = file_with(tmp_path, "block_size = 32")
    lines = render_config(load_config(MINIMAL, path)).splitlines()
    assert 'storage = "none"  # flag --storage' in lines
    assert "owner_ttl = 5.0  # environment PREFIXCACHE_OWNER_TTL" in lines
    assert f"block_size = 32  # file {path}" in lines
    assert 'max_message_bytes = "256MiB"  # default' in lines
    assert "# memory is unset  # default" in lines


def test_the_printed_configuration_never_holds_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "# hash_seed is unset  # default" in render_config(load_config(MINIMAL, None))
    monkeypatch.setenv("PREFIXCACHE_HASH_SEED", "a seed that nobody may see")
    text = render_config(load_config(MINIMAL, None))
    assert "# hash_seed is set  # environment PREFIXCACHE_HASH_SEED" in text
    assert "nobody" not in text


def test_a_line_break_in_a_files_name_stays_in_the_comment(tmp_path: Path) -> None:
    path = tmp_path / "a\nnum_blocks = 7"
    path.write_text("block_size = 2")
    text = render_config(load_config(MINIMAL, str(path)))
    assert tomllib.loads(text)["num_blocks"] == 100

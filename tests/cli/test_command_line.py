"""The command line as a program: help, start-up, exit codes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from prefixcache import __version__
from prefixcache.cli import COMMANDS, main
from prefixcache.errors import InternalError, InvalidArgumentError, PrefixCacheError
from prefixcache.options import OPTIONS

HEAVY = ("asyncio", "grpc", "numpy", "pydantic", "torch")
MAX_STARTUP = 6
"""In times of what an interpreter takes that only imports typer: a busy core slows both."""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if "PREFIXCACHE" not in key}
    return subprocess.run(
        [sys.executable, "-m", "prefixcache.cli", *arguments],
        env={**environ, "COLUMNS": "80", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def imported_by(*arguments: str) -> set[str]:
    environ = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "prefixcache.cli", *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


def cpu_seconds(*arguments: str) -> float:
    """Processor time of a Python program."""
    before = os.times()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, timeout=60)
    after = os.times()
    used = after.children_user + after.children_system
    return used - before.children_user - before.children_system


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_and_version_import_nothing_heavy(arguments: list[str]) -> None:
    assert not imported_by(*arguments) & set(HEAVY)


def test_the_help_of_serve_loads_neither_the_daemon_nor_a_client() -> None:
    assert not imported_by("serve", "--help") & {"grpc", "numpy", "torch"}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_and_version_are_fast(arguments: list[str]) -> None:
    own, typer = [], []
    for _ in range(3):
        own.append(cpu_seconds("-m", "prefixcache.cli", *arguments))
        typer.append(cpu_seconds("-c", "import typer"))
    assert min(own) < MAX_STARTUP * min(typer)


def test_version_is_the_packages() -> None:
    assert run("--version").stdout == f"prefixcache {__version__}\n"


def test_help_lists_every_command() -> None:
    text = run("--help").stdout
    for name, line in COMMANDS.items():
        assert name in text
        assert line.split(".")[0][:40] in text


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_has_the_first_line_of_each_ones_help(name: str) -> None:
    function = getattr(importlib.import_module(f"prefixcache.cli.{name}"), name)
    assert (function.__doc__ or "").splitlines()[0] == COMMANDS[name]


def test_help_of_serve_shows_each_setting_with_its_names_in_80_columns() -> None:
    done = run("serve", "--help")
    assert done.returncode == 0
    assert "…" not in done.stdout
    for option in OPTIONS.values():
        assert f"{option.flag} " in done.stdout
        assert option.env in done.stdout
        assert option.title in done.stdout
    text = " ".join(done.stdout.replace("│", " ").split())
    for shown in ("--no-prefix-caching", "default 256MiB", "default 16)", "SECONDS", "TOKENS"):
        assert shown in text
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_output_without_a_terminal_has_no_colours() -> None:
    assert "\x1b" not in run("serve", "--help").stdout
    assert "\x1b" not in run("serve", "--no-such-flag").stderr


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["no-such-command"], "No such command"),
        (["serve", "--num-block", "5"], "--num-blocks"),
        (["serve", "--num-blocks", "0"], "--num-blocks: should be greater than or equal to 1"),
        (["serve", "--storage", "cpu"], "--num-layers, --num-kv-heads, --head-dim, --dtype"),
        (
            ["serve", "--storage", "none", "--num-blocks", "1", "--listen", "0.0.0.0:0"],
            "--insecure",
        ),
        (["info", "--target", "nowhere"], "--target: 'nowhere' is no address"),
        (["stats", "2"], "needs --watch"),
        (["lookup"], "token ids"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_is_wrong(
    arguments: list[str],
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert shown in captured.err
    assert captured.out == ""


def test_a_daemon_that_cannot_be_reached_exits_with_1_and_one_line(tmp_path: Path) -> None:
    done = run("info", "--target", f"unix:{tmp_path}/p.sock", "--json")
    assert done.returncode == 1
    assert f"no daemon can be reached at unix:{tmp_path}/p.sock" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_print_config_prints_toml_and_starts_nothing(tmp_path: Path) -> None:
    arguments = ("serve", "--storage", "none", "--num-blocks", "7", "--print-config")
    done = run(*arguments, XDG_RUNTIME_DIR=str(tmp_path), PREFIXCACHE_BLOCK_SIZE="4")
    assert done.returncode == 0
    printed = tomllib.loads(done.stdout)
    assert printed["num_blocks"] == 7
    assert printed["block_size"] == 4
    assert not (tmp_path / "prefixcache.sock").exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [(InvalidArgumentError("--x", "is bad"), 2), (InternalError("is broken"), 1), (None, 0)],
)
def test_errors_of_a_command_become_one_line_and_an_exit_code(
    error: PrefixCacheError | None,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def info() -> None:
        if error is not None:
            raise error

    monkeypatch.setattr("prefixcache.cli.info.info", info)
    with pytest.raises(SystemExit) as ended:
        main(["info"])
    assert (ended.value.code or 0) == code
    assert capsys.readouterr().err == (f"prefixcache: {error.message}\n" if error else "")


def test_a_part_of_the_daemon_that_refuses_a_value_is_reported_under_its_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(*given: object) -> int:
        raise InvalidArgumentError("num_blocks", "needs 5 bytes, 4 are available")

    monkeypatch.setattr("prefixcache.server.lifecycle.run", run)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--storage", "none", "--num-blocks", "1"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("prefixcache: --num-blocks: needs 5 bytes")


TENSOR_SCALES = ["--kv-dtype", "int8", "--kv-scales", "tensor", "--kv-scale-file"]
LATENT_CONFIG = {
    "num_hidden_layers": 2,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "torch_dtype": "bfloat16",
}
LAYOUT = ["--num-layers", "4096", "--num-kv-heads", "1", "--head-dim", "1024", "--dtype", "float32"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([*LAYOUT, "--memory", "64TiB"], "--memory: needs 70,368,744,177,664 bytes of cpu"),
        (["--model-config", "{empty}"], "--model-config: num_hidden_layers: "),
        ([*LAYOUT, "--storage", "cuda"], "--storage: cuda is asked for, and torch sees no GPU"),
        (["--model-config", "{latent}", "--kv-dtype", "int8"], "--kv-dtype: must be auto for mult"),
        ([*LAYOUT, *TENSOR_SCALES, "{empty}"], "--kv-scale-file: {empty}: not a JSON object of"),
    ],
    ids=["memory", "model-config", "no-gpu", "quantised latents", "scale file"],
)
def test_a_start_that_cannot_be_is_refused_under_the_flag_that_was_given(
    arguments: list[str], problem: str, tmp_path: Path
) -> None:
    empty, latent = tmp_path / "config.json", tmp_path / "latent.json"
    empty.write_text("{}")
    latent.write_text(json.dumps(LATENT_CONFIG))
    done = run(
        "serve",
        *("--listen", f"unix:{tmp_path / 'p.sock'}", "--storage", "cpu"),
        *(argument.format(empty=empty, latent=latent) for argument in arguments),
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"prefixcache: {problem.format(empty=empty)}")
    assert done.stderr.count("\n") == 1


def test_help_shows_no_value_for_a_switch() -> None:
    done = run("stats", "--help")
    (watch,) = [line for line in done.stdout.splitlines() if "--watch " in line]
    assert "<bool>" not in watch

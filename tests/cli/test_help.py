"""Help and shell completion know every command and every option."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from prefixcache.cli import COMMANDS, app, load_command
from prefixcache.options import OPTIONS

SHELLS = ("bash", "zsh", "fish")


def commands() -> Iterator[tuple[str, Any]]:
    """Every command by its words, those of commands that have their own included."""
    yield "", get_command(app)
    waiting = [(name, load_command(name)) for name in COMMANDS]
    while waiting:
        name, command = waiting.pop()
        yield name, command
        waiting += [(f"{name} {k}", v) for k, v in getattr(command, "commands", {}).items()]


ALL = dict(commands())


@pytest.mark.parametrize("name", ALL)
def test_every_command_and_option_says_what_it_is_for(name: str) -> None:
    command = ALL[name]
    assert command.help
    for parameter in command.params:
        assert parameter.help, parameter.name


def complete(shell: str, words: str) -> str:
    """What the program answers to the script of a shell; the last word is the one to complete."""
    environ = {key: value for key, value in os.environ.items() if "PREFIXCACHE" not in key}
    environ["_PREFIXCACHE_COMPLETE"] = f"complete_{shell}"
    if shell == "bash":
        environ |= {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    else:
        environ |= {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = subprocess.run(
        [sys.executable, "-m", "prefixcache.cli"],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("shell", SHELLS)
def test_commands_options_and_values_are_completed(shell: str) -> None:
    names = complete(shell, "prefixcache ")
    assert all(name in names for name in COMMANDS)
    flags = complete(shell, "prefixcache serve --")
    assert all(option.flag in flags for option in OPTIONS.values())
    assert "xxhash_cbor" in complete(shell, "prefixcache serve --hash-algorithm xx")
    assert "new" in complete(shell, "prefixcache token n")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_completion_script_is_one_that_its_shell_takes(shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prefixcache.cli", "--show-completion", shell],
        # Else typer asks which shell has started it, and takes no name.
        env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "_PREFIXCACHE_COMPLETE" in done.stdout
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n"], input=done.stdout, text=True, timeout=60, check=True)

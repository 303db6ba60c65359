"""The program's command line, called in the process of the test."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from prefixcache.cli import main


@dataclass(frozen=True)
class Outcome:
    exit_code: int
    stdout: str
    stderr: str


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> Outcome:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    output = capsys.readouterr()
    code = ended.value.code or 0
    assert isinstance(code, int)
    return Outcome(code, output.out, output.err)


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What it says, of a call that ends with that exit code: on stderr if it fails."""
    outcome = call(capsys, *arguments)
    assert outcome.exit_code == code, outcome
    return outcome.stderr if code else outcome.stdout

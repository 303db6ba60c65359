"""The options by which `lookup` and `explain` are given a prompt."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from prefixcache.types import ExtraKeys, Lora

_MAX_TOKEN_ID = 2**32 - 1
_STDIN = "-"

Tokens = Annotated[
    list[str] | None,
    typer.Argument(metavar="TOKEN", help="Token ids of the prompt, or - for stdin."),
]
TokensFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Token ids as a JSON list or with white space between; - is stdin."
    ),
]
LoraName = Annotated[str | None, typer.Option(metavar="NAME", help="LoRA adapter.")]
LoraPath = Annotated[
    str, typer.Option(metavar="PATH", show_default=False, help="Path of the adapter.")
]
Salt = Annotated[str, typer.Option(metavar="TEXT", show_default=False, help="Cache salt.")]


class FullHitName(StrEnum):
    LAST_TOKEN = "last_token"
    LAST_BLOCK = "last_block"


FullHitOption = Annotated[
    FullHitName, typer.Option(help="What to compute again if all tokens are cached.")
]


def read_extra_keys(lora: str | None, lora_path: str, salt: str) -> ExtraKeys:
    if lora_path and not lora:
        raise typer.BadParameter("needs --lora", param_hint="--lora-path")
    return ExtraKeys(lora=Lora(lora, lora_path) if lora else None, cache_salt=salt)


def read_tokens(arguments: list[str], tokens_file: str | None) -> list[int]:
    if bool(arguments) == (tokens_file is not None):
        raise typer.BadParameter("give token ids, --tokens-file, or - for stdin")
    if tokens_file is None:
        from_stdin = arguments == [_STDIN]
        return parse_tokens(sys.stdin.read() if from_stdin else " ".join(arguments))
    try:
        text = sys.stdin.read() if tokens_file == _STDIN else Path(tokens_file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(str(error), param_hint="--tokens-file") from None
    return parse_tokens(text)


def parse_tokens(text: str) -> list[int]:
    """Token ids of a JSON list, or with white space or commas between them."""
    if text.lstrip().startswith("["):
        try:
            items: list[object] = json.loads(text)
        except ValueError as error:
            raise typer.BadParameter(f"the token ids are no JSON list: {error}") from None
    else:
        items = [_number(word) for word in text.replace(",", " ").split()]
    if not items:
        raise typer.BadParameter("there are no token ids")
    return [_token_id(item) for item in items]


def _token_id(item: object) -> int:
    if type(item) is not int or not 0 <= item <= _MAX_TOKEN_ID:
        raise typer.BadParameter(f"{item!r} is no token id (0 to {_MAX_TOKEN_ID})")
    return item


def _number(word: str) -> int | str:
    return int(word) if word.isascii() and word.isdigit() else word

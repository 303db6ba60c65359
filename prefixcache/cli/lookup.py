"""`prefixcache lookup`: what Allocate would find for a prompt now."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from prefixcache.cli.credentials import MakeCredentials, takes_credentials
from prefixcache.cli.daemon import DEFAULT_TIMEOUT_S, AsJson, Target, Timeout, connect
from prefixcache.cli.output import print_json, print_rows, to_json
from prefixcache.types import ExtraKeys, FullHit, Lora

if TYPE_CHECKING:
    from prefixcache.types import LookupResult

_MAX_TOKEN_ID = 2**32 - 1
_STDIN = "-"


class _FullHitName(StrEnum):
    LAST_TOKEN = "last_token"
    LAST_BLOCK = "last_block"


@takes_credentials
def lookup(
    credentials: MakeCredentials,
    tokens: Annotated[
        list[str] | None,
        typer.Argument(metavar="TOKEN", help="Token ids of the prompt, or - for stdin."),
    ] = None,
    tokens_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Token ids as a JSON list or with white space between; - is stdin."
        ),
    ] = None,
    lora: Annotated[str | None, typer.Option(metavar="NAME", help="LoRA adapter.")] = None,
    lora_path: Annotated[
        str, typer.Option(metavar="PATH", show_default=False, help="Path of the adapter.")
    ] = "",
    salt: Annotated[str, typer.Option(metavar="TEXT", show_default=False, help="Cache salt.")] = "",
    lookahead: Annotated[
        int, typer.Option(metavar="TOKENS", min=0, help="Slots to reserve for draft tokens.")
    ] = 0,
    full_hit: Annotated[
        _FullHitName, typer.Option(help="What to compute again if all tokens are cached.")
    ] = _FullHitName.LAST_TOKEN,
    hashes: Annotated[
        bool, typer.Option("--hashes", help="Show the hashes of all full blocks too.")
    ] = False,
    target: Target = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Ask how much of a prompt is cached; changes nothing.

    Only full blocks are cached, and at least one token is always left to compute.
    """
    if lora_path and not lora:
        raise typer.BadParameter("needs --lora", param_hint="--lora-path")
    token_ids = _read_tokens(tokens or [], tokens_file)
    with connect(target, timeout, credentials) as client:
        result = client.lookup(
            token_ids,
            extra_keys=ExtraKeys(lora=Lora(lora, lora_path) if lora else None, cache_salt=salt),
            num_lookahead_tokens=lookahead,
            full_hit=FullHit[full_hit.name],
            want_hashes=hashes,
        )
    if as_json:
        _print_object(len(token_ids), result, hashes)
    else:
        _print_rows(len(token_ids), result)


def _read_tokens(arguments: list[str], tokens_file: str | None) -> list[int]:
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


def _print_object(num_tokens: int, result: LookupResult, hashes: bool) -> None:
    fields = to_json(result)
    assert isinstance(fields, dict)
    if not hashes:
        del fields["block_hashes"]
    print_json({"num_tokens": num_tokens, **fields})


def _print_rows(num_tokens: int, result: LookupResult) -> None:
    cached, needed, free = (
        result.num_cached_tokens,
        result.num_blocks_needed,
        result.num_blocks_free,
    )
    rows = [
        ("cached tokens", f"{cached:,} of {num_tokens:,} ({cached / num_tokens:.1%})"),
        ("cached blocks", f"{result.num_cached_blocks:,}"),
        ("pending tokens", f"{result.num_pending_tokens:,}"),
        ("blocks needed", f"{needed:,} of {free:,} free"),
        ("fits now", "yes" if needed <= free else "no"),
    ]
    rows += [
        (f"block {index} hash", digest.hex()) for index, digest in enumerate(result.block_hashes)
    ]
    print_rows(rows)

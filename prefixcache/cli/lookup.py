"""`prefixcache lookup`: what Allocate would find for a prompt now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from prefixcache.cli.credentials import MakeCredentials, takes_credentials
from prefixcache.cli.daemon import DEFAULT_TIMEOUT_S, AsJson, Target, Timeout, connect
from prefixcache.cli.output import print_json, print_rows, to_json
from prefixcache.cli.prompt_options import (
    FullHitName,
    FullHitOption,
    LoraName,
    LoraPath,
    Salt,
    Tokens,
    TokensFile,
    read_extra_keys,
    read_tokens,
)
from prefixcache.types import FullHit

if TYPE_CHECKING:
    from prefixcache.types import LookupResult


@takes_credentials
def lookup(
    credentials: MakeCredentials,
    tokens: Tokens = None,
    tokens_file: TokensFile = None,
    lora: LoraName = None,
    lora_path: LoraPath = "",
    salt: Salt = "",
    lookahead: Annotated[
        int, typer.Option(metavar="TOKENS", min=0, help="Slots to reserve for draft tokens.")
    ] = 0,
    full_hit: FullHitOption = FullHitName.LAST_TOKEN,
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
    extra_keys = read_extra_keys(lora, lora_path, salt)
    token_ids = read_tokens(tokens or [], tokens_file)
    with connect(target, timeout, credentials) as client:
        result = client.lookup(
            token_ids,
            extra_keys=extra_keys,
            num_lookahead_tokens=lookahead,
            full_hit=FullHit[full_hit.name],
            want_hashes=hashes,
        )
    if as_json:
        _print_object(len(token_ids), result, hashes)
    else:
        _print_rows(len(token_ids), result)


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

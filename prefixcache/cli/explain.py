"""`prefixcache explain`: why no more of a prompt is cached."""

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
from prefixcache.types import FullHit, KeyKind, MissReason

if TYPE_CHECKING:
    from prefixcache.types import Explanation

_TEXTS = {
    MissReason.LEFT_TO_COMPUTE: "all of it is cached; the end is always computed again",
    MissReason.NOT_FULL: "the tokens left fill no block, and only full blocks are cached",
    MissReason.CACHING_OFF: "the daemon caches nothing (--no-prefix-caching)",
    MissReason.NOT_READ: "the prompt does not read the cache",
    MissReason.PENDING: "a live sequence is computing it now",
    MissReason.NOT_COMMITTED: "a live sequence has it, but has not committed it yet",
    MissReason.NOT_WRITTEN: "a live sequence has it, and never caches it",
    MissReason.EVICTED: "evicted {age_s:,.1f} s ago, to make room",
    MissReason.RESET: "dropped {age_s:,.1f} s ago, by a reset of the cache",
    MissReason.COLLISION: "its hash is taken by other content",
    MissReason.RESERVED: "cached, but the room that it takes is guaranteed to other tenants",
    MissReason.DIVERGED: "never cached; the nearest cached chain goes on with {difference}",
    MissReason.NEVER_CACHED: "never cached since the start, or since the last reset",
    MissReason.UNKNOWN: "never cached, or evicted too long ago to be remembered",
}
_KIND_NAMES = {
    KeyKind.LORA: "LoRA",
    KeyKind.MULTIMODAL_ITEM: "item",
    KeyKind.CACHE_SALT: "cache salt",
    KeyKind.PROMPT_EMBEDS: "embeddings",
}
_MAY_HAVE_DIVERGED = (MissReason.NEVER_CACHED, MissReason.UNKNOWN)


@takes_credentials
def explain(
    credentials: MakeCredentials,
    tokens: Tokens = None,
    tokens_file: TokensFile = None,
    lora: LoraName = None,
    lora_path: LoraPath = "",
    salt: Salt = "",
    full_hit: FullHitOption = FullHitName.LAST_TOKEN,
    tenant: Annotated[
        str,
        typer.Option(
            metavar="NAME", show_default=False, help="Whose prompt it is; yours if left out."
        ),
    ] = "",
    target: Target = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Say why no more of a prompt is cached; changes nothing.

    That is the first block that is missing, and what became of it. With access control it takes the
    role admin.
    """
    extra_keys = read_extra_keys(lora, lora_path, salt)
    token_ids = read_tokens(tokens or [], tokens_file)
    with connect(target, timeout, credentials) as client:
        block_size = client.server_info().block_size
        result = client.explain(
            token_ids, extra_keys=extra_keys, full_hit=FullHit[full_hit.name], tenant=tenant
        )
    if as_json:
        fields = to_json(result)
        assert isinstance(fields, dict)
        print_json({"num_tokens": len(token_ids), **fields})
    else:
        _print_rows(len(token_ids), block_size, result)


def _print_rows(num_tokens: int, block_size: int, result: Explanation) -> None:
    cached, block = result.num_cached_tokens, result.num_cached_blocks
    rows = [
        ("cached tokens", f"{cached:,} of {num_tokens:,} ({cached / num_tokens:.1%})"),
        ("cached blocks", f"{block:,}"),
    ]
    first, end = block * block_size, min((block + 1) * block_size, num_tokens)
    if first < end:
        rows.append(("missed", f"block {block:,}, tokens {first:,} to {end - 1:,}"))
    if result.num_pending_tokens:
        rows.append(("pending tokens", f"{result.num_pending_tokens:,}"))
    text = _TEXTS[result.reason].format(age_s=result.age_s, difference=_difference(result))
    rows.append(("reason", text))
    for key in result.key_differences:
        name = _KIND_NAMES[key.kind]
        in_cache, in_prompt = key.in_cache or "none", key.in_prompt or "none"
        rows.append((name, f"{in_cache} in the cache, {in_prompt} here"))
    if result.reason in _MAY_HAVE_DIVERGED and not result.keeps_content:
        rows.append(
            ("note", "whether the cache has a chain that diverges here, --verify-hits tells")
        )
    print_rows(rows)


def _difference(result: Explanation) -> str:
    parts = []
    if result.first_different_token is not None:
        parts.append(f"another token {result.first_different_token:,}")
    if result.key_differences:
        names = dict.fromkeys(_KIND_NAMES[key.kind] for key in result.key_differences)
        parts.append(f"another {' and '.join(names)}")
    return " and ".join(parts)

"""The README says what the program does: its recipe computes, its table lists every setting."""

import re
from pathlib import Path

import numpy as np
import pytest

from prefixcache import errors
from prefixcache.cli import COMMANDS
from prefixcache.core.hashing import HASH_ALGORITHMS, HASH_RECIPE_VERSION, Hasher
from prefixcache.options import OPTIONS
from prefixcache.rpc import wire
from prefixcache.types import NO_EXTRA_KEYS, ExtraKeys, Lora

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def code_with(text: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return next(block for block in blocks if text in block)


def test_the_recipe_in_the_readme_gives_the_daemons_hashes() -> None:
    outside: dict[str, object] = {}
    exec(code_with("def block_hashes"), outside)
    block_hashes = outside["block_hashes"]
    assert callable(block_hashes)
    hasher = Hasher(HASH_ALGORITHMS["sha256_cbor"], "a seed of many characters", 4)
    tokens = [0, 23, 24, 255, 256, 65535, 65536, 4294967295, 5]
    ids = np.array(tokens, dtype=np.uint32)

    assert f"`HASH_RECIPE_VERSION` {HASH_RECIPE_VERSION}" in README
    plain = list(block_hashes("a seed of many characters", tokens, 4))
    assert plain == list(hasher.chain(None, ids, NO_EXTRA_KEYS).hashes)
    keyed = list(
        block_hashes(
            "a seed of many characters",
            tokens,
            4,
            lambda block: [["lora", "l", "p"]] + ([["cache_salt", "s"]] if block == 0 else []),
        )
    )
    extra_keys = ExtraKeys(lora=Lora("l", "p"), cache_salt="s")
    assert keyed == list(hasher.chain(None, ids, extra_keys).hashes)


@pytest.mark.parametrize("option", OPTIONS.values(), ids=lambda option: option.key)
def test_the_configuration_table_has_every_setting(option) -> None:
    row = next(line for line in README.splitlines() if line.startswith(f"| `{option.flag}`"))
    for choice in option.choices:
        assert f"`{choice}`" in row


def test_every_rpc_command_and_error_reason_is_listed() -> None:
    for method in wire.methods():
        assert re.search(rf"\b{method.name}\b", README)
    for command in COMMANDS:
        assert command in README
    leaves = [
        error
        for name in errors.__all__
        if not (error := getattr(errors, name)).__subclasses__()
        # Those that a client makes itself never come from a daemon.
        and error not in (errors.DeadlineExceededError, errors.CancelledCallError)
    ]
    for error in leaves:
        assert error.reason in README


def test_files_that_the_readme_links_to_exist() -> None:
    root = Path(__file__).parents[1]
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (root / link).exists(), link

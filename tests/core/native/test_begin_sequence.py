"""The compiled beginning of a sequence does what the one in Python does, to the last field."""

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from prefixcache.core import admission
from prefixcache.core.admission import Begun, Terms, begin_sequence
from prefixcache.core.native.admission import begin_sequence as native_begin_sequence
from prefixcache.core.python.sequence_record import SequenceRecord
from prefixcache.core.sequence import CommitRow, Prompt, Sequence
from prefixcache.errors import ExceedsPoolError, NoRoomError
from prefixcache.types import NO_EXTRA_KEYS, CacheUse, ExtraKeys, FullHit
from tests.core.manager import ONE, Manager
from tests.support.invariants import snapshot

NUM_BLOCKS, SIZE = 24, 4


def terms_of(rng: random.Random, num_layers: int) -> Terms:
    use = rng.choice(list(CacheUse))
    return Terms(
        owner=ONE,
        request_id=rng.choice(["", f"request {rng.random()}"]),
        num_lookahead_tokens=rng.choice([0, 0, 1, 5]),
        cache_use=use,
        full_hit=rng.choice(list(FullHit)),
        account=0,
        registers=use.writes,
        num_layers=num_layers,
        now_s=rng.random(),
    )


def begin(manager: Manager, prompt: Prompt, terms: Terms) -> Begun | str:
    """The sequence lives from then on, or what refused it."""
    try:
        begun = begin_sequence(manager.pool, manager.sequences.pending, prompt, terms)
    except (ExceedsPoolError, NoRoomError) as error:
        return str(error)
    manager.sequences.live.add(begun.sequence)
    if terms.registers and prompt.chain is not None:
        manager.sequences.pending.begin(begun.sequence, prompt.chain.hashes.data)
    return begun


def image(sequence: Sequence) -> dict[str, Any]:
    found = {field.name: getattr(sequence, field.name) for field in fields(SequenceRecord)}
    del found["sequence_id"]  # random
    return found


def without_ids(manager: Manager) -> dict[str, Any]:
    found = snapshot(manager.sequences)
    return {**found, "sequences": [one[1:] for one in found["sequences"]]}


def random_prompt(rng: random.Random) -> tuple[np.ndarray, ExtraKeys]:
    """Of a few beginnings, so that there are hits; some end within a block, or fill the pool."""
    num_tokens = rng.choice([1, 3, 4, 5, 8, 11, 12, 16, 30, NUM_BLOCKS * SIZE, 200])
    tokens = np.arange(num_tokens, dtype=np.uint32) + rng.choice([0, 1000, 2**32 - 201])
    tokens[rng.randrange(num_tokens) :] += rng.choice([0, 0, 1])
    return tokens, rng.choice([NO_EXTRA_KEYS, NO_EXTRA_KEYS, ExtraKeys(cache_salt="salt")])


@pytest.mark.parametrize("verify_hits", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_both_forms_begin_the_same_sequences(
    seed: int, num_layers: int, verify_hits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    managers = [
        Manager(NUM_BLOCKS, SIZE, num_layers=num_layers, verify_hits=verify_hits) for _ in range(2)
    ]
    outcomes = []
    for _ in range(300):
        (tokens, extra_keys), terms = random_prompt(rng), terms_of(rng, num_layers)
        begun = []
        for manager, native in zip(managers, (native_begin_sequence, None), strict=True):
            monkeypatch.setattr(admission, "_native_begin_sequence", native)
            begun.append(begin(manager, manager.sequences.prepare(tokens, extra_keys), terms))
        compiled, plain = begun
        if isinstance(compiled, str) or isinstance(plain, str):
            assert compiled == plain
        else:
            assert image(compiled.sequence) == image(plain.sequence)
            assert compiled.num_pending_tokens == plain.num_pending_tokens
        outcomes.append(compiled)
        for step in rng.choices(["commit", "free", ""], k=2):
            chosen = rng.random()
            for manager in managers:
                change(manager, step, chosen)
        assert without_ids(managers[0]) == without_ids(managers[1])
    assert {type(outcome) for outcome in outcomes} == {Begun, str}
    assert any(isinstance(one, Begun) and one.num_pending_tokens for one in outcomes)
    assert any(isinstance(one, Begun) and one.sequence.num_cached_blocks for one in outcomes)


def change(manager: Manager, step: str, chosen: float) -> None:
    """Compute all of one sequence, or end it."""
    live = list(manager.sequences.live.by_id.values())
    if not step or not live:
        return
    sequence = live[int(chosen * len(live))]
    if step == "free":
        manager.sequences.live.end(sequence)
    else:
        start = sequence.num_computed
        row = CommitRow(sequence.sequence_id, start, sequence.num_tokens - start)
        manager.sequences.rows.commit(ONE, [row])


def test_tokens_that_are_none_are_refused_and_nothing_is_taken() -> None:
    manager = Manager(NUM_BLOCKS, SIZE)
    tokens = np.arange(8, dtype=np.uint32)
    chain = manager.sequences.prepare(tokens, NO_EXTRA_KEYS).chain
    terms = terms_of(random.Random(1), 1)
    before = snapshot(manager.sequences)
    for wrong in (tokens.astype(np.uint64), np.arange(16, dtype=np.uint32)[::2], [1, 2]):
        prompt: Any = Prompt(wrong, NO_EXTRA_KEYS, chain)
        with pytest.raises((TypeError, ValueError)):
            native_begin_sequence(manager.pool, Sequence, prompt, terms)
        assert snapshot(manager.sequences) == before

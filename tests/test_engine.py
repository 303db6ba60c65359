"""One step through the engine: its layers share a batch, and one by one they are what they were."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from prefixcache import engine
from prefixcache.attention.batch import AttentionBatch
from prefixcache.core.append_batch import AppendBatch
from prefixcache.core.sequence import AppendRow
from prefixcache.server.daemon import CacheOptions, Daemon, ModelOptions
from prefixcache.storage.layout import KVLayout
from prefixcache.types import NO_EXTRA_KEYS, PLAIN_ATTENTION, HostTensor

OWNER = b"an owner's secret"[:16]
LAYOUT = KVLayout(3, 2, 4, 4, "float32")
LAYERS = range(LAYOUT.num_layers)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    made = Daemon(CacheOptions(32, LAYOUT.block_size), ModelOptions(LAYOUT))
    yield made
    made.close()


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[AttentionBatch]:
    """The batch of each call of `prefill` and `decode`, in order."""
    seen: list[AttentionBatch] = []
    for name in ("prefill", "decode"):
        attend = getattr(engine, name)

        def spy(q, cache, batch, options, attend=attend):
            seen.append(batch)
            return attend(q, cache, batch, options)

        monkeypatch.setattr(engine, name, spy)
    return seen


def allocate(daemon: Daemon, num_tokens: int, first: int) -> int:
    tokens = np.arange(first, first + num_tokens, dtype=np.uint32)
    prompt = daemon.sequences.prepare(tokens, NO_EXTRA_KEYS)
    with daemon.sequences.lock:
        return int(daemon.sequences.allocate(OWNER, "", prompt).sequence_id)


def tensor(num_tokens: int, num_heads: int = 2) -> HostTensor:
    numbers = torch.randn(num_tokens, num_heads, LAYOUT.head_dim)
    return HostTensor("float32", tuple(numbers.shape), numbers.numpy().tobytes())


def attend(daemon: Daemon, name: str, layer: int, rows: list[tuple[int, int, int]]) -> None:
    """rows: sequence id, start position and count of each."""
    assert daemon.engine is not None
    num_tokens = sum(count for _, _, count in rows)
    columns = tuple(map(list, zip(*rows, strict=True)))
    tensors = (tensor(num_tokens, 4), tensor(num_tokens), tensor(num_tokens))
    getattr(daemon.engine, name)(OWNER, layer, columns, tensors, PLAIN_ATTENTION)


def append(daemon: Daemon, sequence_id: int, start: int) -> None:
    assert daemon.engine is not None
    row = AppendRow(sequence_id, start, np.array([9], np.uint32))
    daemon.engine.append(OWNER, AppendBatch.of([row]))


def test_the_layers_of_a_step_share_one_batch(
    daemon: Daemon, batches: list[AttentionBatch]
) -> None:
    ids = [allocate(daemon, 5, 0), allocate(daemon, 7, 100)]
    for layer in LAYERS:
        attend(daemon, "prefill", layer, [(ids[0], 0, 5), (ids[1], 0, 7)])
    for step in range(3):
        for sequence_id, length in zip(ids, (5, 7), strict=True):
            append(daemon, sequence_id, length + step)
        for layer in LAYERS:
            attend(daemon, "decode", layer, [(ids[0], 5 + step, 1), (ids[1], 7 + step, 1)])
    steps = [batches[at : at + len(LAYERS)] for at in range(0, len(batches), len(LAYERS))]
    assert len(steps) == 4
    assert all(batch is step[0] for step in steps for batch in step)
    assert len({id(step[0]) for step in steps}) == 4


def test_a_repeat_of_a_layer_has_a_batch_that_writes_nothing(
    daemon: Daemon, batches: list[AttentionBatch]
) -> None:
    sequence_id = allocate(daemon, 5, 0)
    for layer in (0, 0, 1):
        attend(daemon, "prefill", layer, [(sequence_id, 0, 5)])
    first, repeat, second = batches
    assert (first.slot_mapping >= 0).all() and (repeat.slot_mapping == -1).all()
    assert second is first


def test_a_block_that_was_copied_is_read_at_its_new_place_by_the_same_call_again(
    daemon: Daemon, batches: list[AttentionBatch]
) -> None:
    """Sequence, position and count are those of an earlier step; the table is not."""
    sequence_id = allocate(daemon, 8, 0)
    for start, count in ((0, 5), (5, 3)):
        for layer in LAYERS:
            attend(daemon, "prefill", layer, [(sequence_id, start, count)])
    with daemon.sequences.lock:
        daemon.sequences.truncate(OWNER, sequence_id, 8, 5)
    tokens = np.array([5, 6, 70], np.uint32)
    batch = AppendBatch.of([AppendRow(sequence_id, 5, tokens)])
    (result,) = daemon.engine.append(OWNER, batch).results()
    (copy,) = result.copies
    for layer in LAYERS:
        attend(daemon, "prefill", layer, [(sequence_id, 5, 3)])
    before, after = batches[len(LAYERS)], batches[-1]
    assert before.context_lens.tolist() == after.context_lens.tolist() == [5]
    assert before.block_tables[0, 1] == copy.source
    assert after.block_tables[0, 1] == copy.destination

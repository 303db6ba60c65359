"""What a view computes and writes is what the daemon computes and writes, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from prefixcache import errors
from prefixcache.attention.write_kv import write_kv
from prefixcache.types import FullHit, PoolAccess
from tests.attached.served import BLOCK_SIZE, KINDS, NUM_LAYERS, OPTIONS, Served, compute, serve
from tests.support.scrape import scrape

LAYERS = range(NUM_LAYERS)


@pytest.fixture(params=KINDS)
def of_kind(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serve(request.param) as served:
        yield served


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


# ---- as the daemon does it


@pytest.mark.parametrize("chunks", [[1], [3], [4], [13], [5, 1, 6], [4, 4]])
def test_prefill_writes_and_returns_what_the_daemon_does(
    of_kind: Served, chunks: list[int]
) -> None:
    client, view = of_kind.attached()
    other, tokens = of_kind.client(), range(sum(chunks))
    here, there = client.sequence(tokens), other.sequence(range(100, 100 + len(tokens)))
    for count in chunks:
        steps = of_kind.steps(count)
        assert same(compute(view, here, steps), compute(other, there, steps))
        here.commit(count)
    assert of_kind.span_bytes(here) == of_kind.span_bytes(there)
    assert here.num_computed_tokens == there.num_computed_tokens == len(tokens)


def test_decode_of_many_sequences_writes_and_returns_what_the_daemon_does(of_kind: Served) -> None:
    client, view = of_kind.attached()
    other = of_kind.client()
    lengths = (1, 4, 6)
    ours = [client.sequence(range(100 * i, 100 * i + n)) for i, n in enumerate(lengths)]
    theirs = [
        other.sequence(range(900 - 100 * i, 900 - 100 * i + n)) for i, n in enumerate(lengths)
    ]
    for one, another in zip(ours, theirs, strict=True):
        steps = of_kind.steps(one.num_tokens)
        compute(view, one, steps)
        compute(other, another, steps)
    client.commit(ours, list(lengths))
    for _ in range(3):
        client.append(ours, [[7]] * 3)
        other.append(theirs, [[8]] * 3)
        for layer, (q, k, v) in enumerate(of_kind.steps(3)):
            out = view.decode(layer, ours, q, k, v, OPTIONS)
            assert torch.equal(out, other.decode(layer, theirs, q, k, v, OPTIONS))
        client.commit(ours, [1] * 3)
    for one, another in zip(ours, theirs, strict=True):
        assert of_kind.span_bytes(one) == of_kind.span_bytes(another)


def test_numpy_arrays_go_in_and_come_out(served: Served) -> None:
    client, view = served.attached()
    sequence = client.sequence(range(5))
    q, k, v = (tensor.numpy() for tensor in served.tensors(5) if tensor is not None)
    q.flags.writeable = False
    out = view.prefill(0, [sequence], [5], q, np.asfortranarray(k), v, OPTIONS)
    assert isinstance(out, np.ndarray)
    expected = served.client().sequence(range(10, 15)).prefill(0, q, k, v, OPTIONS)
    assert np.array_equal(out, expected)


def test_drafts_run_in_reserved_slots_and_accepted_ones_stay(served: Served) -> None:
    client, view = served.attached()
    other = served.client()
    here, there = client.sequence(range(6)), other.sequence(range(50, 56))
    steps = served.steps(6)
    compute(view, here, steps)
    here.commit(6)
    compute(other, there, steps)
    for sequence in (here, there):
        sequence.append([1], num_lookahead_tokens=3)
    steps = served.steps(4)
    for layer, (q, k, v) in enumerate(steps):
        out = view.decode(layer, [here], q, k, v, OPTIONS, [4])
        assert torch.equal(out, there.decode(layer, q, k, v, OPTIONS))
    here.commit(1)
    for sequence in (here, there):
        sequence.append([2, 3, 4], num_kv_valid=2)
        assert sequence.num_computed_tokens == 9
    here.commit(2)
    steps = served.steps(1)
    assert same(compute(view, here, steps), compute(other, there, steps))
    here.commit(1)
    assert client.lookup(range(6)).num_cached_tokens == 4


# ---- with others


def test_what_is_committed_is_found_and_read_by_others(of_kind: Served) -> None:
    client, view = of_kind.attached()
    first = client.sequence(range(9))
    compute(view, first, of_kind.steps(9))
    assert of_kind.client().lookup(range(9)).num_cached_tokens == 0
    assert first.commit(9).num_cached_blocks == 2

    other, other_view = of_kind.attached()
    by_view, by_rpc = other.sequence(range(9)), other.sequence([*range(8), 77])
    assert by_view.num_cached_tokens == by_rpc.num_cached_tokens == 8
    assert by_view.block_ids.tolist()[:2] == first.block_ids.tolist()[:2]
    steps = of_kind.steps(1)
    assert same(compute(other_view, by_view, steps), compute(other, by_rpc, steps))


@pytest.mark.parametrize("block_size", [1, 4])
def test_the_recomputed_token_of_a_full_hit_is_not_written(block_size: int) -> None:
    with serve("float32", block_size=block_size) as served:
        client, view = served.attached()
        first = client.sequence(range(8))
        compute(view, first, served.steps(8))
        first.commit(8)
        before = served.spans.clone()
        again, by_rpc = client.sequence(range(8)), client.sequence(range(8))
        assert again.num_cached_tokens == 7
        steps = served.steps(1)
        assert same(compute(view, again, steps), compute(client, by_rpc, steps))
        assert torch.equal(served.spans, before)
        again.commit(1)
        again.append([9])
        compute(view, again, served.steps(1))
        again.commit(1)
        assert again.num_computed_tokens == 9
        assert torch.equal(served.spans[first.block_ids.tolist()], before[first.block_ids.tolist()])


def test_with_blocks_of_one_token_the_last_one_is_written_unless_it_was_a_hit() -> None:
    with serve("float32", block_size=1) as served:
        client, view = served.attached()
        first = client.sequence(range(7))
        compute(view, first, served.steps(7))
        first.commit(7)
        longer = client.sequence(range(8))
        assert longer.num_cached_tokens == 7
        compute(view, longer, served.steps(1))
        assert served.spans[longer.block_ids.tolist()[7]].any()


def test_a_last_block_left_to_compute_is_written(served: Served) -> None:
    client, view = served.attached()
    first = client.sequence(range(8))
    compute(view, first, served.steps(8))
    first.commit(8)
    again = client.sequence(range(8), full_hit=FullHit.LAST_BLOCK)
    assert again.num_cached_tokens == 4
    compute(view, again, served.steps(4))
    assert served.spans[again.block_ids.tolist()[1]].any()
    assert again.commit(4).num_cached_blocks == 2


def test_a_fork_writes_into_its_own_copy(served: Served) -> None:
    client, view = served.attached()
    parent = client.sequence(range(6))
    compute(view, parent, served.steps(6))
    with pytest.raises(errors.NotComputedError):
        parent.fork()
    parent.commit(6)
    before = served.span_bytes(parent)
    (child,) = parent.fork()
    (copy,) = child.append([50]).copies
    assert copy.source == parent.block_ids[1]
    compute(view, child, served.steps(1))
    child.commit(1)
    assert served.span_bytes(parent) == before
    slot = served.layout.block_bytes  # the copy has what was there, and the new token
    ours = served.spans[int(child.block_ids[1])]
    assert slot == len(ours)
    assert int((ours != served.spans[copy.source]).sum()) > 0


# ---- in turns with the daemon


def test_layers_of_one_sequence_are_computed_here_and_there(of_kind: Served) -> None:
    client, view = of_kind.attached()
    mixed, whole = client.sequence(range(9)), client.sequence(range(100, 109))
    for count in (5, 4):
        steps = of_kind.steps(count)
        expected = compute(client, whole, steps)
        out = []
        for layer, (q, k, v) in enumerate(steps):
            computer = client if layer == 1 else view
            out.append(computer.prefill(layer, [mixed], [count], q, k, v, OPTIONS))
        assert same(out, expected)
        mixed.commit(count)
    assert of_kind.span_bytes(mixed) == of_kind.span_bytes(whole)
    assert client.lookup(range(9)).num_cached_tokens == 8


def test_a_sequence_is_computed_here_then_there_then_here(served: Served) -> None:
    client, view = served.attached()
    mixed, whole = client.sequence(range(9)), client.sequence(range(100, 109))
    for turn, count in enumerate((3, 2, 4)):
        steps = served.steps(count)
        computer = client if turn == 1 else view
        assert same(compute(computer, mixed, steps), compute(client, whole, steps))
        if turn != 1:
            mixed.commit(count)
    assert served.span_bytes(mixed) == served.span_bytes(whole)


def test_the_daemon_does_not_go_on_from_what_it_was_not_told(served: Served) -> None:
    client, view = served.attached()
    sequence = client.sequence(range(6))
    compute(view, sequence, served.steps(4))
    before = served.spans.clone()
    with pytest.raises(errors.WrongPositionError):
        compute(client, sequence, served.steps(2))
    assert torch.equal(served.spans, before)
    sequence.commit(4)
    compute(client, sequence, served.steps(2))
    assert sequence.num_computed_tokens == 6


def test_an_engine_writes_through_the_layers_itself(served: Served) -> None:
    client, view = served.attached()
    own, theirs = client.sequence(range(6)), client.sequence(range(100, 106))
    steps = served.steps(6)
    compute(client, theirs, steps)
    positions = np.arange(6)
    slots = own.block_ids.astype(np.int64)[positions // BLOCK_SIZE] * BLOCK_SIZE
    slots += positions % BLOCK_SIZE
    for layer, (_, k, v) in enumerate(steps):
        write_kv(view.layer(layer), k, v, slots)
    assert own.commit(6).num_cached_blocks == 1
    assert own.num_computed_tokens == 6
    assert served.span_bytes(own) == served.span_bytes(theirs)


def test_a_commit_without_a_writer_is_refused(served: Served) -> None:
    client, reader = served.attached(writable=False)
    sequence = client.sequence(range(6))
    assert not reader.is_writable
    with pytest.raises(errors.StorageOwnedError):
        sequence.commit(6)
    assert served.running.daemon.sequences.pool.num_cached == 0


# ---- for reading


def test_a_reader_attends_over_what_is_cached_and_writes_nothing(of_kind: Served) -> None:
    client, view = of_kind.attached()
    written = client.sequence(range(8))
    compute(view, written, of_kind.steps(8))
    written.commit(8)
    reading, reader = of_kind.attached(writable=False)
    hit, by_rpc = reading.sequence(range(8)), reading.sequence(range(8))
    before = of_kind.spans.clone()
    steps = of_kind.steps(1)
    assert same(compute(reader, hit, steps), compute(reading, by_rpc, steps))
    for layer in LAYERS:
        ours, theirs = reader.layer(layer), view.layer(layer)
        assert ours.keys.view(torch.uint8).equal(theirs.keys.view(torch.uint8))
        assert (
            ours.values.contiguous()
            .view(torch.uint8)
            .equal(theirs.values.contiguous().view(torch.uint8))
        )
    assert torch.equal(of_kind.spans, before)


def test_a_reader_is_refused_what_would_write_before_anything_happens(served: Served) -> None:
    client, reader = served.attached(writable=False)
    sequence = client.sequence(range(6))
    q, k, v = served.tensors(6)
    before = served.spans.clone()
    with pytest.raises(errors.ReadOnlyViewError) as caught:
        reader.prefill(0, [sequence], [6], q, k, v, OPTIONS)
    assert caught.value.fields == {"sequence_id": sequence.sequence_id, "position": 0}
    assert torch.equal(served.spans, before)
    assert sequence.num_computed_tokens == 0


# ---- refusals


def test_a_bad_call_is_refused_and_changes_nothing(served: Served) -> None:
    client, view = served.attached()
    one, two = client.sequence(range(6)), client.sequence(range(100, 106))
    stranger = served.client().sequence(range(5))
    freed = client.sequence([1])
    freed.free()
    q, k, v = served.tensors(6)
    assert v is not None
    before = served.spans.clone()
    invalid = errors.InvalidArgumentError

    def refused(
        error: type[errors.PrefixCacheError], *arguments: object, field: str | None = None
    ) -> None:
        with pytest.raises(error) as caught:
            view.prefill(*arguments)  # type: ignore[arg-type]
        assert field is None or caught.value.fields["field"] == field
        assert torch.equal(served.spans, before)
        assert one.num_computed_tokens == two.num_computed_tokens == 0

    refused(invalid, -1, [one], [6], q, k, v, field="layer")
    refused(invalid, NUM_LAYERS, [one], [6], q, k, v, field="layer")
    refused(invalid, 0, [], [], q, k, v, field="sequence_ids")
    refused(invalid, 0, [one, one], [3, 3], q, k, v, field="sequence_ids")
    refused(invalid, 0, [one, two], [6, 0], q, k, v, field="num_tokens")
    refused(invalid, 0, [one, two], [6], q, k, v, field="num_tokens")
    refused(invalid, 0, [one], [5], q, k, v, field="q.shape")
    refused(invalid, 0, [one], [6], q[:, :3], k, v, field="q.shape")
    refused(invalid, 0, [one], [6], q, k[:, :, :8], v, field="k.shape")
    refused(invalid, 0, [one], [6], q.double(), k, v, field="q.data_type")
    refused(invalid, 0, [one], [6], q, k, v.half(), field="v.data_type")
    refused(invalid, 0, [one], [6], q, k, None, field="v")
    refused(invalid, 0, [one], [6], [1.0], k, v, field="q")
    refused(invalid, 0, [one], [6], q, k, v, OPTIONS.__class__(window=0), field="window")
    refused(errors.BeyondTokensError, 0, [one], [7], *served.tensors(7))
    refused(errors.SequenceNotFoundError, 0, [freed], [1], *served.tensors(1))
    refused(errors.FailedPreconditionError, 0, [stranger], [5], *served.tensors(5))
    refused(errors.FailedPreconditionError, 0, [one, stranger], [3, 3], q, k, v)


def test_a_slot_beyond_a_forks_tokens_is_not_written(served: Served) -> None:
    """The last block is shared, and has room: only an Append makes it the sequence's own."""
    client, view = served.attached()
    parent = client.sequence(range(6))
    compute(view, parent, served.steps(6))
    parent.commit(6)
    parent.fork()
    before = served.spans.clone()
    with pytest.raises(errors.BeyondTokensError):
        view.decode(0, [parent], *served.tensors(1), OPTIONS)
    parent.truncate(5)
    with pytest.raises(errors.BeyondTokensError):
        view.decode(0, [parent], *served.tensors(1), OPTIONS)
    assert torch.equal(served.spans, before)


# ---- many at once


def test_threads_use_one_view_at_once(served: Served) -> None:
    client, view = served.attached()
    other = served.client()

    def run(number: int) -> bool:
        first = 1000 * number
        here = client.sequence(range(first, first + 6))
        there = other.sequence(range(first + 500, first + 506))
        is_same = True
        for _ in range(5):
            generator = torch.Generator().manual_seed(first)
            steps = [
                tuple(torch.randn(1, num_heads, 16, generator=generator) for num_heads in (4, 2, 2))
                for _ in LAYERS
            ]
            is_same &= same(compute(view, here, steps), compute(other, there, steps))
            here.commit(1)
        # The last block has a slot that nobody has written since another sequence.
        is_same &= served.span_bytes(here)[0] == served.span_bytes(there)[0]
        for sequence in (here, there):
            sequence.free()
        return is_same

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(12)))


def test_who_is_attached_is_counted(served: Served) -> None:
    client, _ = served.attached()
    _, reader = served.attached(writable=False)
    assert {"attach", "attach_write"} <= set(client.server_info().capabilities)
    stats = client.stats()
    assert (stats.attached_readers, stats.attached_writers) == (1, 1)
    scraped = scrape(served.running)
    assert scraped["prefixcache_attached", {"access": "read"}] == 1
    assert scraped["prefixcache_attached", {"access": "write"}] == 1
    reader.close()
    stats = client.stats()
    assert (stats.attached_readers, stats.attached_writers) == (0, 1)
    attachments = served.running.daemon.attachments
    assert attachments is not None
    assert attachments.count(PoolAccess.WRITE) == 1

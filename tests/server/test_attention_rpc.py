"""Prefill and Decode through the daemon: equal to float64, and no K/V of anybody else harmed.

Every slot that holds nobody's K/V is NaN (or Inf) all the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
import torch

from prefixcache import engine
from prefixcache.attention.copy_blocks import copy_blocks
from prefixcache.rpc._pb import cache_pb2
from prefixcache.server.daemon import CacheOptions, Daemon, ModelOptions
from prefixcache.storage.fixed_scales import FixedScales
from prefixcache.storage.layout import KVLayout, LatentLayout, Layout, Quantization
from prefixcache.types import AttentionOptions
from tests.support.daemon import running_daemon
from tests.support.stubs import Peer, Stubs, connected
from tests.support.tolerances import is_close
from tests.support.toy_model import (
    Run,
    ToyModel,
    attention_request,
    bytes_of,
    compute_batch,
    from_wire,
    poison,
    poison_slots,
    split_output,
    to_wire,
)

BLOCK_SIZE, NUM_BLOCKS, NUM_LAYERS = 4, 48, 3
LAYERS = range(NUM_LAYERS)


def heads(
    num_kv_heads: int, head_dim: int, dtype: str, quantization: Quantization | None = None
) -> KVLayout:
    return KVLayout(NUM_LAYERS, num_kv_heads, head_dim, BLOCK_SIZE, dtype, quantization)


KINDS: dict[str, tuple[Layout, int]] = {
    # layout, query heads
    "float32-gqa": (heads(2, 16, "float32"), 4),
    "float32-mha-odd": (heads(3, 20, "float32"), 3),
    "float16-mqa": (heads(1, 16, "float16"), 4),
    "bfloat16-gqa": (heads(2, 16, "bfloat16"), 6),
    "float8-token_head": (heads(2, 16, "bfloat16", Quantization("float8_e4m3")), 4),
    "float8-tensor": (heads(1, 20, "float16", Quantization("float8_e4m3", "tensor")), 3),
    "int8-token_head": (heads(3, 20, "float16", Quantization("int8")), 6),
    "int8-tensor": (heads(2, 16, "float32", Quantization("int8", "tensor")), 4),
    "latent": (LatentLayout(NUM_LAYERS, 24, 8, BLOCK_SIZE, "bfloat16"), 5),
}
"""Scales a tensor are of a range that saturates now and then."""
FIXED_SCALES = FixedScales((0.02, 0.01, 0.03), (0.015, 0.02, 0.025))


@dataclass(frozen=True)
class Served:
    daemon: Daemon
    stubs: Stubs
    model: ToyModel

    def run(self, tokens: list[int] | range, peer: Peer | None = None, **fields: int) -> Run:
        """A sequence, allocated; every unused slot of the pool is poison then."""
        run = Run(peer or Peer(self.stubs), self.model, list(tokens)).allocate(**fields)
        poison(self.daemon)
        return run

    def filled(self, tokens: list[int] | range) -> list[int]:
        """Cache a prompt and free it; returns the blocks that it had."""
        run = self.run(tokens)
        run.compute()
        run.free()
        return run.block_ids


def serve(kind: str) -> Iterator[Served]:
    layout, num_query_heads = KINDS[kind]
    wants_scales = layout.quantization is not None and layout.quantization.scales == "tensor"
    scales = FIXED_SCALES if wants_scales else None
    cache, model = CacheOptions(NUM_BLOCKS, BLOCK_SIZE), ModelOptions(layout, scales=scales)
    with running_daemon(cache, model) as running, connected(running.target) as stubs:
        yield Served(running.daemon, stubs, ToyModel(layout, num_query_heads, scales=scales))


@pytest.fixture(params=KINDS)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    yield from serve(request.param)


@pytest.fixture
def plain() -> Iterator[Served]:
    """One kind, for what does not depend on shapes."""
    yield from serve("float32-gqa")


def scatter(served: Served) -> None:
    """Leave the free blocks in an order that is neither ascending nor contiguous."""
    peer = Peer(served.stubs)
    ids = [peer.allocate([i, i, i, i, i]).sequence_id for i in range(NUM_BLOCKS // 2)]
    peer.free(*ids[1::2])
    peer.free(*ids[::2])
    order = served.daemon.sequences.pool.free_order()
    assert (abs(order[1:] - order[:-1]) > 1).any()


# ---- equal to float64


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 13, 16])
def test_prefill_in_one_call_equals_float64(served: Served, num_tokens: int) -> None:
    scatter(served)
    served.run(range(num_tokens)).compute()


@pytest.mark.parametrize("poisoned", [float("nan"), float("inf"), float("-inf")])
def test_what_stands_in_unused_slots_never_shows(served: Served, poisoned: float) -> None:
    run = served.run(range(13))
    for layer in LAYERS:
        for count in (3, 6, 4):
            poison(served.daemon, poisoned)
            run.compute_layer(layer, count)


@pytest.mark.parametrize("name", ["Prefill", "Decode"])
def test_chunks_of_a_prompt_equal_float64(served: Served, name: str) -> None:
    scatter(served)
    run = served.run(range(21))
    for count in (1, 5, 3, 4, 1, 7):
        for layer in LAYERS:
            poison(served.daemon)
            run.compute_layer(layer, count, name)


def test_layers_may_stand_at_different_tokens(plain: Served) -> None:
    run = plain.run(range(11))
    run.compute_layer(2)
    for count in (4, 7):
        poison(plain.daemon)
        run.compute_layer(0, count)
    run.compute_layer(1, 1)
    poison(plain.daemon)
    run.compute_layer(1)


def test_one_prefill_for_many_prompts_equals_float64(served: Served) -> None:
    peer = Peer(served.stubs)
    runs = [served.run(range(n * 100, n * 100 + n), peer) for n in (1, 4, 7, 16)]
    for layer in LAYERS:
        poison(served.daemon)
        compute_batch(layer, [(run, len(run.tokens)) for run in runs], "Prefill")


def test_decoding_a_batch_equals_float64_over_block_edges(served: Served) -> None:
    scatter(served)
    peer = Peer(served.stubs)
    lengths = (1, 3, 4, 7, 8, 16)
    runs = [served.run(range(n * 100, n * 100 + n), peer) for n in lengths]
    for run in runs:
        run.compute()
    for step in range(6):
        for run in runs:
            before = len(run.block_ids)
            at_edge = len(run.tokens) % BLOCK_SIZE == 0
            run.append([1000 + step])
            assert len(run.block_ids) - before == at_edge
        for layer in LAYERS:
            poison(served.daemon)
            compute_batch(layer, [(run, 1) for run in runs], "Decode")


def test_decode_takes_a_different_number_of_tokens_of_each_sequence(served: Served) -> None:
    peer = Peer(served.stubs)
    runs = [served.run(range(n * 100, n * 100 + 9), peer) for n in range(4)]
    for run in runs:
        run.compute(4)
    for layer in LAYERS:
        poison(served.daemon)
        compute_batch(layer, [(run, 1 + i) for i, run in enumerate(runs)], "Decode")


@pytest.mark.parametrize("scale", [0.0, -0.5, 1.0, 3.0])
def test_the_scale_is_the_callers(plain: Served, scale: float) -> None:
    run = plain.run(range(7))
    for layer, name in zip(LAYERS, ("Prefill", "Decode", "Prefill"), strict=True):
        compute_batch(layer, [(run, 7)], name, AttentionOptions(scale=scale))


def options_for(model: ToyModel) -> list[AttentionOptions]:
    """Each option alone, and all of them; the scale is the model's."""
    of_heads = range(1, model.num_query_heads + 1)
    changes = {
        "window": 3,
        "soft_cap": 1.5,
        "alibi_slopes": tuple(2.0**-head for head in of_heads),
        "sinks": tuple(head - 2.5 for head in of_heads),
    }
    plain = model.options
    return [*(replace(plain, **{k: v}) for k, v in changes.items()), replace(plain, **changes)]


def test_the_options_are_the_callers(served: Served) -> None:
    for number, options in enumerate(options_for(served.model)):
        run = served.run(range(100 * number, 100 * number + 11))
        for count, name in ((7, "Prefill"), (3, "Decode"), (1, "Decode")):
            for layer in LAYERS:
                poison(served.daemon)
                compute_batch(layer, [(run, count)], name, options)
        run.free()


def test_a_window_wider_than_any_sequence_is_none(plain: Served) -> None:
    run = plain.run(range(9))
    for layer, window in zip(LAYERS, (9, 2**31, 2**32 - 1), strict=True):
        for count, name in ((6, "Prefill"), (3, "Decode")):
            compute_batch(layer, [(run, count)], name, AttentionOptions(window=window))


def test_each_call_has_its_own_options(plain: Served) -> None:
    run = plain.run(range(9))
    for options, count in zip(options_for(plain.model), (2, 3, 1, 2, 1), strict=True):
        for layer in LAYERS:
            compute_batch(layer, [(run, count)], "Decode", options)


def test_only_what_is_not_cached_has_to_be_computed(served: Served) -> None:
    shared = served.filled(range(13))[:3]
    run = served.run([*range(12), 90, 91, 92])
    assert run.num_cached_tokens == 12
    assert run.block_ids[:3] == shared
    before = bytes_of(served.daemon, shared)
    run.compute()
    assert bytes_of(served.daemon, shared) == before


# ---- full hits


@pytest.mark.parametrize("name", ["Prefill", "Decode"])
def test_a_full_hit_computes_exactly_one_token_and_writes_nothing(
    served: Served, name: str
) -> None:
    served.filled(range(8))
    run = served.run(range(8))
    assert run.num_cached_tokens == 7
    before = bytes_of(served.daemon)
    for layer in LAYERS:
        rows = [(run, 1)]
        request = attention_request(name, layer, rows)
        # The k and v of the token are not even looked at.
        spoil(request)
        out = split_output(served.stubs.call(name, request), rows)[0]
        assert is_close(out, served.model.exact(layer, range(8), 7))
        refusal = served.stubs.refused(name, request_at(run, name, layer, 6, 2))
        assert refusal.reason == "WRONG_POSITION"
        run.positions[layer] = 8
    assert bytes_of(served.daemon) == before
    assert served.stubs.stats().prefill_tokens_cached == 7
    # It goes on in a block of its own.
    assert run.append([50]) == ()
    run.compute(name="Decode")
    assert bytes_of(served.daemon, run.block_ids[:2]) == [before[i] for i in run.block_ids[:2]]


def test_a_full_hit_may_leave_the_last_block_to_compute(served: Served) -> None:
    shared = served.filled(range(8))
    before = bytes_of(served.daemon, shared)
    run = served.run(range(8), full_hit=cache_pb2.FULL_HIT_LAST_BLOCK)
    assert run.num_cached_tokens == 4
    assert run.block_ids[0] == shared[0] and run.block_ids[1] not in shared
    run.compute()
    assert bytes_of(served.daemon, shared) == before
    assert bytes_of(served.daemon, run.block_ids) == before
    assert served.stubs.stats().cached == 2


def spoil(request: Any) -> None:
    """NaN for all of k, and of v if there is one."""
    request.k.CopyFrom(to_wire(from_wire(request.k) * float("nan")))
    if request.HasField("v"):
        request.v.CopyFrom(to_wire(from_wire(request.v) * float("nan")))


def request_at(run: Run, name: str, layer: int, start: int, count: int) -> object:
    """The call that would come at another position."""
    positions = list(run.positions)
    positions[layer] = start
    return attention_request(name, layer, [(replace(run, positions=positions), count)])


# ---- fork, truncate, speculation


@pytest.mark.parametrize("num_tokens", [6, 8])
def test_both_sides_of_a_fork_equal_separate_runs(served: Served, num_tokens: int) -> None:
    parent = served.run(range(num_tokens))
    parent.compute()
    shared = list(parent.block_ids)
    before = bytes_of(served.daemon, shared)
    children = [
        parent.forked(sequence_id)
        for sequence_id in parent.peer.fork(parent.sequence_id, num_tokens, ["", ""])
    ]
    sides = [parent, *children]
    for number, side in enumerate(sides):
        copies = side.append([7 * 10**number, 8])
        # The last holder of a partly filled block has it for itself.
        is_last = number == len(sides) - 1
        assert len(copies) == (num_tokens % BLOCK_SIZE != 0 and not is_last)
        full = num_tokens // BLOCK_SIZE
        assert bytes_of(served.daemon, shared[:full]) == before[:full]
    assert len({side.block_ids[-1] for side in sides}) == 3
    for layer in LAYERS:
        poison(served.daemon)
        compute_batch(layer, [(side, 2) for side in sides], "Decode")
    assert (
        bytes_of(served.daemon, shared[: num_tokens // BLOCK_SIZE])
        == (before[: num_tokens // BLOCK_SIZE])
    )
    for side in sides:
        alone = served.run(side.tokens, cache_use=cache_pb2.CACHE_USE_NONE)
        alone.compute()
        full = len(side.tokens) // BLOCK_SIZE
        assert bytes_of(served.daemon, side.block_ids[:full]) == (
            bytes_of(served.daemon, alone.block_ids[:full])
        )


def test_a_fork_keeps_the_rows_of_a_shared_block_when_one_side_writes(plain: Served) -> None:
    parent = plain.run(range(6))
    parent.compute()
    child = parent.forked(parent.peer.fork(parent.sequence_id, 6)[0])
    shared = parent.block_ids[1]
    before = bytes_of(plain.daemon, [shared])
    (copy,) = child.append([70])
    assert copy[0] == shared and child.block_ids[1] == copy[1] != shared
    assert bytes_of(plain.daemon, [copy[1]]) == before
    child.compute(name="Decode")
    assert bytes_of(plain.daemon, [shared]) == before
    assert bytes_of(plain.daemon, [copy[1]]) != before


def test_drafts_are_found_by_nobody_until_they_are_accepted(served: Served) -> None:
    prompt, drafts = list(range(6)), [60, 61, 62]
    run = served.run(prompt, num_lookahead_tokens=3)
    run.compute()
    assert len(run.block_ids) == 3
    run.tokens += drafts  # the daemon has slots for them, and no ids
    run.compute(3, "Decode")
    assert found(served, [*prompt, *drafts, 0]) == 4
    del run.tokens[6:]

    assert run.append([60, 71], num_kv_valid=1, num_lookahead_tokens=3) == ()
    assert run.positions == [7] * NUM_LAYERS
    assert found(served, [*prompt, 60, 71, 0]) == 4
    run.tokens += [72, 73, 74]
    for layer in LAYERS:
        # The rejected drafts are overwritten; until then they are as good as poison.
        rejected = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.bool)
        rejected[run.block_ids[1], 3] = rejected[run.block_ids[2]] = True
        poison_slots(served.daemon.engine.memory.layer(layer), rejected)
        assert found(served, [*prompt, 60, 71, 0]) == 4
        run.compute_layer(layer, 4, "Decode")
    assert found(served, [*prompt, 60, 71, 72, 73]) == 8
    assert found(served, [*prompt, 60, 61, 62, 0]) == 4
    del run.tokens[8:]
    run.append([72, 73, 74, 75], num_kv_valid=3)
    run.compute(name="Decode")
    assert found(served, [*prompt, 60, 71, 72, 73, 74, 75, 0]) == 12


def test_accepted_drafts_become_findable_with_the_append(plain: Served) -> None:
    run = plain.run(range(6), num_lookahead_tokens=2)
    run.compute()
    run.tokens += [60, 61]
    run.compute(2, "Decode")
    assert found(plain, [*range(6), 60, 61, 0]) == 4
    del run.tokens[6:]
    run.append([60, 61], num_kv_valid=2)
    assert found(plain, [*range(6), 60, 61, 0]) == 8
    other = plain.run([*range(6), 60, 61, 62])
    assert other.num_cached_tokens == 8
    other.compute()


@pytest.mark.parametrize("num_kept", [5, 7])
def test_a_cut_block_that_is_cached_is_copied_and_not_written(
    served: Served, num_kept: int
) -> None:
    run = served.run(range(8))
    run.compute()
    shared = list(run.block_ids)
    before = bytes_of(served.daemon, shared)
    run.truncate(num_kept)
    ((source, destination),) = run.append([90, 91, 92, 93])
    assert source == shared[1] and destination not in shared
    poison(served.daemon)
    run.compute(name="Decode")
    assert bytes_of(served.daemon, shared) == before
    other = served.run([*range(8), 5])
    assert other.num_cached_tokens == 8 and other.block_ids[:2] == shared
    other.compute()


def test_a_cut_block_of_its_own_is_written_in_place(plain: Served) -> None:
    run = plain.run(range(7))
    run.compute()
    run.truncate(5)
    poison(plain.daemon)
    assert run.append([90, 91, 92]) == ()
    run.compute()


def found(served: Served, tokens: list[int]) -> int:
    return served.stubs.lookup(tokens).num_cached_tokens


# ---- commit, repeats, refusals


def test_a_block_is_found_once_the_last_layer_has_passed_it(plain: Served) -> None:
    first = plain.run(range(8))
    for layer in (1, 2, 0):
        assert found(plain, [*range(8), 0]) == 0
        second = plain.run(range(8))
        assert second.num_cached_tokens == 0
        second.free()
        first.compute_layer(layer, 4)
    assert found(plain, [*range(8), 0]) == 4
    first.compute()
    assert found(plain, [*range(8), 0]) == 8


def test_a_sequence_that_may_not_write_the_cache_is_found_by_nobody(plain: Served) -> None:
    for cache_use in (cache_pb2.CACHE_USE_NO_WRITE, cache_pb2.CACHE_USE_NONE):
        run = plain.run(range(8), cache_use=cache_use)
        run.compute()
        run.free()
        assert found(plain, list(range(9))) == 0
    run = plain.run(range(8), cache_use=cache_pb2.CACHE_USE_NO_READ)
    run.compute()
    assert found(plain, list(range(9))) == 8


def test_the_reply_of_allocate_rules_and_not_the_lookup_before_it(plain: Served) -> None:
    tokens = list(range(10))
    assert found(plain, tokens) == 0
    plain.filled(tokens[:5])
    run = plain.run(tokens)
    assert run.num_cached_tokens == 4
    run.compute(len(tokens) - 4)
    assert run.positions == [len(tokens)] * NUM_LAYERS


@pytest.mark.parametrize("name", ["Prefill", "Decode"])
def test_a_repeat_gives_the_same_output_and_writes_nothing(served: Served, name: str) -> None:
    run = served.run(range(7))
    for layer in LAYERS:
        for count in (4, 3):
            rows = [(run, count)]
            request = attention_request(name, layer, rows)
            first = served.stubs.call(name, request)
            before = bytes_of(served.daemon)
            assert served.stubs.call(name, request) == first
            spoil(request)
            assert served.stubs.call(name, request) == first
            assert bytes_of(served.daemon) == before
            run.positions[layer] += count
    assert found(served, list(range(7))) == 4
    before = served.stubs.stats()
    served.stubs.call(name, request)
    after = served.stubs.stats()
    assert after.prefill_tokens_computed == before.prefill_tokens_computed == 7


@pytest.mark.parametrize("name", ["Prefill", "Decode"])
def test_a_call_before_the_last_one_is_no_repeat(plain: Served, name: str) -> None:
    run = plain.run(range(7))
    first = attention_request(name, 0, [(run, 4)])
    plain.stubs.call(name, first)
    run.positions[0] = 4
    second = attention_request(name, 0, [(run, 3)])
    plain.stubs.call(name, second)
    assert plain.stubs.refused(name, first).reason == "WRONG_POSITION"
    run.append([9])
    refusal = plain.stubs.refused(name, second)
    assert (refusal.code, refusal.reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "WRONG_POSITION",
    )
    assert (refusal.numbers["given"], refusal.numbers["expected"]) == ("4", "7")


@pytest.mark.parametrize("name", ["Prefill", "Decode"])
@pytest.mark.parametrize(
    ("start", "count", "reason"),
    [
        (0, 3, "WRONG_POSITION"),
        (3, 1, "WRONG_POSITION"),
        (5, 1, "WRONG_POSITION"),
        (4, 4, "BEYOND_TOKENS"),
    ],
)
def test_one_bad_row_fails_the_whole_call_before_anything_is_written(
    plain: Served, name: str, start: int, count: int, reason: str
) -> None:
    peer = Peer(plain.stubs)
    good, bad = plain.run(range(5), peer), plain.run(range(10, 17), peer)
    compute_batch(0, [(bad, 4)], name)
    run = replace(bad, tokens=[*bad.tokens, 1], positions=[start, 0, 0])
    before = bytes_of(plain.daemon)
    for order in ([(good, 5), (run, count)], [(run, count), (good, 5)]):
        request = attention_request(name, 0, order)
        assert plain.stubs.refused(name, request).reason == reason
        assert bytes_of(plain.daemon) == before
    compute_batch(0, [(bad, 3), (good, 5)], name)


def test_a_kernel_that_fails_leaves_the_layer_where_it_stood(
    plain: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = plain.run(range(6))

    def fail(*arguments: object) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "prefill", fail)
        refusal = plain.stubs.refused("Prefill", attention_request("Prefill", 0, [(run, 6)]))
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
        assert "out of memory" not in refusal.message
    run.compute()
    assert found(plain, list(range(6))) == 4


# ---- cold and warm


def test_a_warm_run_stores_the_same_bytes_and_a_wrong_block_shows(served: Served) -> None:
    tokens = list(range(14))
    cold = served.run(tokens, cache_use=cache_pb2.CACHE_USE_NO_READ)
    cold.compute()
    warm = served.run([*tokens[:10], 77, 78])
    assert warm.num_cached_tokens == 8
    warm.compute()
    alone = served.run([*tokens[:10], 77, 78], cache_use=cache_pb2.CACHE_USE_NONE)
    alone.compute()
    assert bytes_of(served.daemon, warm.block_ids) == bytes_of(served.daemon, alone.block_ids)

    def still_right() -> bool:
        """A warm run's output, judged as every output here is."""
        probe = served.run([*tokens[:8], 5, 6])
        assert probe.num_cached_tokens == 8
        rows = [(probe, 2)]
        reply = served.stubs.call("Prefill", attention_request("Prefill", 0, rows))
        probe.free()
        return is_close(split_output(reply, rows)[0], served.model.exact(0, probe.tokens, 8))

    assert still_right()
    spans = served.daemon.engine.memory.spans
    copy_blocks(spans, [cold.block_ids[0]], spans, [cold.block_ids[1]])
    assert not still_right()

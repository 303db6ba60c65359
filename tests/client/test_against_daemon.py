"""The clients and the real daemon: the mirror is the daemon's own record, whatever is called."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from prefixcache.errors import (
    BeyondTokensError,
    ExceedsPoolError,
    FingerprintMismatchError,
    InvalidArgumentError,
    NoRoomError,
    NoStorageError,
    NotComputedError,
    PrefixCacheError,
    RequestIdConflictError,
    SequenceNotFoundError,
    SessionLostError,
    StorageOwnedError,
)
from prefixcache.server.daemon import CacheOptions, Daemon, ModelOptions
from prefixcache.server.rpc_server import RpcServer
from prefixcache.storage.layout import KVLayout, LatentLayout, Quantization
from prefixcache.types import (
    CacheUse,
    ExtraKeys,
    FullHit,
    KeyDifference,
    KeyKind,
    Lora,
    MissReason,
    ResultCode,
)
from tests.client.twins import open_client
from tests.support.daemon import running_daemon
from tests.support.tolerances import assert_close
from tests.support.toy_model import ToyModel
from tests.support.waiting import until

B, LAYERS, HQ, HKV, D = 4, 2, 4, 2, 8
CACHE = CacheOptions(num_blocks=48, block_size=B)


def _model(dtype: str = "float32", num_layers: int = LAYERS) -> ModelOptions:
    return ModelOptions(KVLayout(num_layers, HKV, D, B, dtype))


def _qkv(num_tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(num_tokens, heads, D, generator=generator).to(dtype) for heads in (HQ, HKV, HKV)
    )


@contextmanager
def _daemon_at(path: Path, model: ModelOptions | None = None) -> Iterator[str]:
    daemon = Daemon(CACHE, model)
    server = RpcServer(daemon, max_workers=4)
    target = server.listen(f"unix:{path}")
    server.start()
    try:
        yield target
    finally:
        server.stop(0.0)
        daemon.close()


ACTIONS = (
    "allocate",
    "append",
    "append_batch",
    "compute",
    "compute_all",
    "fork",
    "truncate",
    "free",
)


class _Walk:
    """Random calls on a few sequences; after each, the mirrors equal the daemon's records."""

    def __init__(self, client, daemon: Daemon, seed: int, *, has_storage: bool) -> None:
        self.rng = random.Random(seed)
        self.client, self.daemon, self.has_storage = client, daemon, has_storage
        self.sequences: list = []
        self.refused = 0
        self.done: dict[str, int] = {}

    def step(self) -> None:
        name = self.rng.choice(ACTIONS) if self.sequences else "allocate"
        try:
            getattr(self, f"_{name}")()
        except PrefixCacheError:
            self.refused += 1
        else:
            self.done[name] = self.done.get(name, 0) + 1
        self.check()

    def check(self) -> None:
        for sequence in self.sequences:
            record = self.daemon.sequences.live.find(self._owner(), sequence.sequence_id)
            assert sequence.num_tokens == record.num_tokens
            assert sequence.num_computed_tokens == record.num_computed
            assert sequence.block_ids.tolist() == list(record.block_table)

    def _owner(self) -> bytes:
        return self.client._connection.lease.owner

    def _tokens(self, most: int) -> list[int]:
        return [self.rng.randrange(2) for _ in range(self.rng.randint(1, most))]

    def _pick(self):
        return self.rng.choice(self.sequences)

    def _pick_computed(self):
        done = [s for s in self.sequences if s.num_computed_tokens >= s.num_tokens]
        return self.rng.choice(done or self.sequences)

    def _allocate(self) -> None:
        if len(self.sequences) > 5:
            self._free()
        self.sequences.append(
            self.client.sequence(
                self._tokens(20),
                num_lookahead_tokens=self.rng.randrange(6),
                full_hit=self.rng.choice(list(FullHit)),
                cache_use=self.rng.choice(list(CacheUse)),
            )
        )

    def _append(self) -> None:
        tokens = self._tokens(9)
        self._pick().append(tokens, self.rng.randint(0, len(tokens)), self.rng.randrange(6))

    def _append_batch(self) -> None:
        some = self.rng.sample(self.sequences, self.rng.randint(1, len(self.sequences)))
        results = self.client.append(some, [self._tokens(5) for _ in some])
        assert len(results) == len(some)

    def _compute(self) -> None:
        sequence = self._pick()
        count = self.rng.randint(1, 6)
        if self.has_storage:
            # One layer may go ahead of the others, and beyond the tokens into lookahead.
            sequence.prefill(self.rng.randrange(LAYERS), *_qkv(count))
        else:
            sequence.commit(count)

    def _compute_all(self) -> None:
        """Whatever is left of a sequence, so that it can be forked."""
        sequence = self._pick()
        if not self.has_storage:
            sequence.commit(sequence.num_tokens - sequence.num_computed_tokens)
            return
        record = self.daemon.sequences.live.find(self._owner(), sequence.sequence_id)
        for layer, computed in enumerate(list(record.computed)):
            if computed < sequence.num_tokens:
                sequence.decode(layer, *_qkv(sequence.num_tokens - computed))

    def _fork(self) -> None:
        if self.rng.random() < 0.8:
            self._compute_all()
        children = self._pick_computed().fork(self.rng.randint(1, 2))
        self.sequences += children
        while len(self.sequences) > 7:
            self._free()

    def _truncate(self) -> None:
        sequence = self._pick()
        before = sequence.block_ids.tolist()
        dropped = sequence.truncate(self.rng.randint(1, sequence.num_tokens))
        assert sequence.block_ids.tolist() + list(dropped) == before

    def _free(self) -> None:
        sequence = self.sequences.pop(self.rng.randrange(len(self.sequences)))
        sequence.free()
        assert sequence.is_freed


@pytest.mark.parametrize("has_storage", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_mirror_follows_the_daemon_through_random_calls(client_kind, has_storage, seed):
    with (
        running_daemon(CACHE, _model() if has_storage else None) as running,
        open_client(client_kind, running.target) as client,
    ):
        walk = _Walk(client, running.daemon, seed, has_storage=has_storage)
        for _ in range(250):
            walk.step()
        assert min(walk.done.get(name, 0) for name in ACTIONS) > 3, walk.done
        assert walk.refused > 0
        client.free(walk.sequences)
        assert client.stats().referenced == 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_chunks_and_hits_give_the_output_of_one_call(client_kind, dtype):
    q, k, v = _qkv(12, dtype=getattr(torch, dtype))
    with (
        running_daemon(CACHE, _model(dtype)) as running,
        open_client(client_kind, running.target) as client,
    ):
        with client.sequence(range(12), cache_use=CacheUse.NONE) as whole:
            out = [whole.prefill(layer, q, k, v) for layer in range(LAYERS)]
        with client.sequence(range(12)) as chunked:
            for layer in range(LAYERS):
                for rows in (slice(0, 5), slice(5, 11), slice(11, 12)):
                    part = chunked.prefill(layer, q[rows], k[rows], v[rows])
                    assert part.dtype == q.dtype
                    assert_close(part, out[layer][rows])
        with client.sequence(range(12)) as hit:
            assert hit.num_cached_tokens == 11
            for layer in range(LAYERS):
                last = hit.prefill(layer, q[11:], k[11:], v[11:])
                assert_close(last, out[layer][11:])
        assert client.stats().hit_tokens == 11


@pytest.mark.parametrize(
    "layout",
    [
        KVLayout(LAYERS, HKV, D, B, "bfloat16", Quantization("float8_e4m3")),
        KVLayout(LAYERS, HKV, D, B, "float16", Quantization("int8")),
        LatentLayout(LAYERS, D, 4, B, "float32"),
    ],
    ids=["float8", "int8", "latent"],
)
def test_kv_of_any_kind_give_the_numbers_of_float64(client_kind, layout):
    toy = ToyModel(layout, HQ)
    options = replace(toy.options, window=5, sinks=(0.5,) * HQ)
    tokens = list(range(10))

    def run(call, layer, first):
        part = [of(layer, tokens, first) for of in (toy.q, toy.k, toy.v)]
        assert_close(call(layer, *part, options), toy.exact(layer, tokens, first, options))

    with (
        running_daemon(CACHE, ModelOptions(layout)) as running,
        open_client(client_kind, running.target) as client,
    ):
        assert client.server_info().layout == layout
        with client.sequence(tokens) as sequence:
            for layer in range(LAYERS):
                run(sequence.prefill, layer, 0)
            (child,) = sequence.fork()
            tokens.append(7)
            assert len(child.append([7]).copies) == 1
            for layer in range(LAYERS):
                run(child.decode, layer, 10)
            child.free()
        tokens[8:] = [50, 51]
        with client.sequence(tokens) as hit:
            assert hit.num_cached_tokens == 8
            for layer in range(LAYERS):
                run(hit.prefill, layer, 8)


def test_numpy_and_torch_get_the_same_numbers(client_kind):
    tensors = _qkv(6)
    with (
        running_daemon(CACHE, _model()) as running,
        open_client(client_kind, running.target) as client,
    ):
        one, other = client.sequence(range(6)), client.sequence(range(6))
        from_torch = one.prefill(0, *tensors)
        from_numpy = other.prefill(0, *(tensor.numpy() for tensor in tensors))
    assert isinstance(from_torch, torch.Tensor)
    assert isinstance(from_numpy, np.ndarray)
    np.testing.assert_array_equal(from_torch.numpy(), from_numpy)


def test_a_batch_decodes_each_sequence_where_it_stands(client_kind):
    with (
        running_daemon(CACHE, _model()) as running,
        open_client(client_kind, running.target) as client,
    ):
        sequences = [client.sequence([i, *range(i)]) for i in (2, 5, 9)]
        q, k, v = _qkv(19)
        client.prefill(0, sequences, [3, 6, 10], q, k, v)
        for sequence in sequences:
            q, k, v = _qkv(sequence.num_tokens)
            sequence.prefill(1, q, k, v)
        results = client.append(sequences, [[1], [2], [3]])
        assert [result.code for result in results] == [ResultCode.OK] * 3
        for layer in range(LAYERS):
            assert client.decode(layer, sequences, *_qkv(3)).shape == (3, HQ, D)
        assert [s.num_computed_tokens for s in sequences] == [4, 7, 11]
        with pytest.raises(BeyondTokensError):
            client.decode(0, sequences, *_qkv(3))
        client.free(sequences)


def test_refusals_of_the_daemon_are_errors_of_the_tree(client_kind):
    with (
        running_daemon(CACHE, _model()) as running,
        open_client(client_kind, running.target) as client,
    ):
        with pytest.raises(ExceedsPoolError):
            client.sequence(range(B * 49))
        with client.sequence(range(B * 40)) as sequence:
            with pytest.raises(NoRoomError) as caught:
                client.sequence([99] * B * 9)
            assert caught.value.fields["needed"] == "9"
            with client.sequence([99] * B * 4), pytest.raises(NoRoomError):
                sequence.append(range(B * 8))
            with pytest.raises(ExceedsPoolError):
                sequence.append(range(B * 8), num_lookahead_tokens=1)
            with pytest.raises(NotComputedError):
                sequence.fork()
            with pytest.raises(StorageOwnedError):
                sequence.commit(1)
            with pytest.raises(InvalidArgumentError):
                sequence.decode(LAYERS, *_qkv(1))
            with pytest.raises(InvalidArgumentError):
                sequence.truncate(0)
        with pytest.raises(SequenceNotFoundError):
            sequence.append([1])
    with running_daemon(CACHE) as running, open_client(client_kind, running.target) as client:
        sequence = client.sequence([1])
        with pytest.raises(NoStorageError):
            sequence.decode(0, *_qkv(1))


def test_the_same_request_again_is_the_same_sequence(client_kind):
    with running_daemon(CACHE) as running, open_client(client_kind, running.target) as client:
        first = client.sequence([1, 2], request_id="r")
        again = client.sequence([1, 2], request_id="r")
        assert first.sequence_id == again.sequence_id
        with pytest.raises(RequestIdConflictError):
            client.sequence([1, 3], request_id="r")
        first.append([5])
        with pytest.raises(RequestIdConflictError):
            client.sequence([1, 2], request_id="r")
        assert client.stats().requests == 1
        client.free([first])


def test_sequences_answer_their_client_only(client_kind):
    with running_daemon(CACHE) as running, open_client(client_kind, running.target) as client:
        sequence = client.sequence([1, 2])
        with open_client("sync", running.target) as other:
            stranger = other.sequence([1, 2])
            stranger._state.sequence_id = sequence.sequence_id
            with pytest.raises(SequenceNotFoundError):
                stranger.append([1])
        assert sequence.append([3]).code is ResultCode.OK


def test_a_miss_is_explained(client_kind):
    with (
        running_daemon(replace(CACHE, verify_hits=True)) as running,
        open_client(client_kind, running.target) as client,
    ):
        adapter = ExtraKeys(lora=Lora("adapter", "v1"))
        with client.sequence(range(9), extra_keys=adapter) as sequence:
            sequence.commit(9)
        found = client.explain(range(9))
        assert (found.num_cached_blocks, found.reason) == (0, MissReason.DIVERGED)
        assert found.key_differences == (KeyDifference(KeyKind.LORA, "", "adapter (v1)"),)
        assert (found.first_different_token, found.age_s) == (None, None)
        found = client.explain([0, 1, 2, 3, 4, 9, 9, 9], extra_keys=adapter)
        assert (found.num_cached_tokens, found.first_different_token) == (4, 5)
        assert len(found.block_hash) == 32
        found = client.explain(range(8), extra_keys=adapter, full_hit=FullHit.LAST_BLOCK)
        assert (found.num_cached_blocks, found.reason) == (1, MissReason.LEFT_TO_COMPUTE)
        found = client.explain(range(8), extra_keys=adapter, cache_use=CacheUse.NO_READ)
        assert found.reason is MissReason.NOT_READ
        client.reset_cache()
        found = client.explain(range(9), extra_keys=adapter)
        assert found.reason is MissReason.RESET
        assert 0 <= found.age_s < 60
        with pytest.raises(InvalidArgumentError, match="tenant"):
            client.explain([1], tenant="nobody")


def test_more_than_a_page_of_sequences_is_listed(client_kind):
    with running_daemon(CACHE) as running, open_client(client_kind, running.target) as client:
        parent = client.sequence([1])
        parent.commit(1)
        children = [child for _ in range(4) for child in parent.fork(255)]
        listed = client.list_sequences()
        ids = [parent.sequence_id, *(child.sequence_id for child in children)]
        assert [info.sequence_id for info in listed] == ids
        assert len({info.owner_digest for info in listed}) == 1
        client.free([parent, *children])
        assert client.list_sequences() == []


def test_a_restart_ends_the_sequences_and_not_the_client(client_kind, tmp_path):
    path = tmp_path / "daemon.sock"
    with open_client(client_kind, f"unix:{path}") as client:
        with _daemon_at(path):
            sequence, other = client.sequence([1, 2, 3]), client.sequence([1, 2, 3])
            boot_id = client.server_info().boot_id
        with _daemon_at(path):
            with pytest.raises(SessionLostError, match="the daemon was restarted"):
                sequence.truncate(1)
            assert client.server_info().boot_id != boot_id
            assert client.free([other]) == [ResultCode.NOT_FOUND]
            with sequence:
                assert client.sequence([1, 2, 3]).append([4]).code is ResultCode.OK
            assert sequence.is_freed


def test_a_daemon_that_came_back_with_another_layout_is_refused(client_kind, tmp_path):
    path = tmp_path / "daemon.sock"
    with open_client(client_kind, f"unix:{path}") as client:
        with _daemon_at(path, _model()):
            client.sequence([1, 2, 3])
            fingerprint = client.server_info().fingerprint
        with _daemon_at(path, _model(num_layers=3)):
            for call in (lambda: client.sequence([1, 2, 3]), client.server_info):
                with pytest.raises(FingerprintMismatchError) as caught:
                    call()
                assert caught.value.fields["given"] == fingerprint.hex()


def test_a_daemon_of_another_layout_than_expected_is_refused(client_kind):
    with (
        running_daemon(CACHE, _model()) as running,
        open_client(client_kind, running.target, expected_fingerprint=b"f" * 32) as client,
        pytest.raises(FingerprintMismatchError),
    ):
        client.stats()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_sequence_says_what_is_pending_and_waits_for_it(kind: str) -> None:
    with (
        running_daemon(CACHE) as running,
        open_client("sync", running.target) as first,
        open_client(kind, running.target) as client,
    ):
        tokens = range(4 * B)
        assert client.server_info().max_wait_pending_s == 60.0
        held = first.sequence(tokens)
        assert client.lookup(tokens).num_pending_tokens == 4 * B - 1
        with client.sequence(tokens, wait_pending_s=0.01) as sequence:
            assert (sequence.num_cached_tokens, sequence.num_pending_tokens) == (0, 4 * B - 1)
        pending = running.daemon.sequences.pending

        def commit_once_waited_for() -> None:
            until(lambda: pending.num_waiters)
            held.commit(4 * B)

        with ThreadPoolExecutor(1) as threads:
            committed = threads.submit(commit_once_waited_for)
            with client.sequence(tokens, wait_pending_s=20) as sequence:
                assert sequence.num_cached_tokens == 4 * B - 1
                assert sequence.num_pending_tokens == 0
            committed.result()


@pytest.mark.parametrize("wait_s", [-1, 30.0, float("nan"), float("inf")])
def test_a_wait_must_end_before_the_call_does(wait_s: float) -> None:
    with running_daemon(CACHE) as running, open_client("sync", running.target) as client:
        with pytest.raises(InvalidArgumentError) as refused:
            client.sequence([1], wait_pending_s=wait_s)
        assert refused.value.field == "wait_pending_s"
        assert client.list_sequences() == []

"""What may come over the wire: every legal spelling is read, every bad value is named."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
import numpy as np
import pytest

from prefixcache.errors import InvalidArgumentError
from prefixcache.rpc._pb import admin_pb2, attention_pb2, cache_pb2
from prefixcache.server.daemon import CacheOptions, Daemon, LimitOptions, ModelOptions
from prefixcache.storage.layout import KVLayout, LatentLayout, Quantization
from prefixcache.types import AttentionOptions
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.invariants import check_invariants, snapshot
from tests.support.stubs import (
    METHODS,
    Peer,
    Refused,
    Row,
    Stubs,
    connected,
    read_append,
    refusals,
)
from tests.support.wire_bytes import SPELLINGS, length_delimited, spelled, tag, varint

BLOCK_SIZE = 4
NUM_BLOCKS = 16
HEADS, HEAD_DIM = 2, 8
LAYOUT = KVLayout(2, HEADS, HEAD_DIM, BLOCK_SIZE, "float32")
LATENT_DIM = HEAD_DIM - 2
LATENT_LAYOUT = LatentLayout(2, LATENT_DIM, 2, BLOCK_SIZE, "float32")
MAX_UINT32 = 2**32 - 1


@dataclass(frozen=True)
class Served:
    """A daemon with one live sequence of six tokens, all of them to compute."""

    running: RunningDaemon
    stubs: Stubs
    peer: Peer
    sequence_id: int

    def state(self) -> dict[str, Any]:
        return snapshot(self.running.daemon.sequences)


def serve(model: ModelOptions | None = None) -> Iterator[Served]:
    cache = CacheOptions(NUM_BLOCKS, BLOCK_SIZE, hash_seed="a seed of the wire tests")
    with running_daemon(cache, model) as running, connected(running.target) as stubs:
        peer = Peer(stubs)
        yield Served(running, stubs, peer, peer.allocate(range(6)).sequence_id)


@pytest.fixture(scope="module")
def bare() -> Iterator[Served]:
    """Without K/V memory."""
    yield from serve()


@pytest.fixture(scope="module")
def stored() -> Iterator[Served]:
    """With K/V memory."""
    yield from serve(ModelOptions(LAYOUT))


@pytest.fixture(scope="module")
def quantised() -> Iterator[Served]:
    yield from serve(ModelOptions(replace(LAYOUT, quantization=Quantization("float8_e4m3"))))


@pytest.fixture(scope="module")
def latent() -> Iterator[Served]:
    yield from serve(ModelOptions(LATENT_LAYOUT))


# ---- spellings


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_columns_are_read_in_every_legal_spelling(spelling: str) -> None:
    cache = CacheOptions(NUM_BLOCKS, BLOCK_SIZE, hash_seed="a seed of the wire tests")
    with running_daemon(cache) as running, connected(running.target) as stubs:
        peer = Peer(stubs)

        def call(name: str, request: Any) -> Any:
            return stubs.call(name, spelled(request, spelling))

        first, second = (
            call("Allocate", cache_pb2.AllocateRequest(owner=peer.owner, token_ids=tokens))
            for tokens in ([7, 1, MAX_UINT32, 0, 5], list(range(100, 110)))
        )
        assert [len(reply.block_ids) for reply in (first, second)] == [2, 3]
        ids = [first.sequence_id, second.sequence_id]
        committed = cache_pb2.CommitRequest(
            owner=peer.owner, sequence_ids=ids, start_positions=[0, 0], num_computed_tokens=[5, 10]
        )
        assert list(call("Commit", committed).num_cached_blocks) == [1, 2]
        append = peer.append_request([Row(ids[0], 5, (1, 2, 3), 0, 2), Row(ids[1], 10, (9,), 1)])
        rows = read_append(call("Append", append))
        assert [len(row.new_block_ids) for row in rows] == [1, 0]
        assert [row.code for row in rows] == [cache_pb2.RESULT_CODE_OK] * 2
        looked_up = cache_pb2.LookupRequest(token_ids=range(100, 110), want_hashes=True)
        found = call("Lookup", looked_up)
        assert found.num_cached_tokens == 8
        assert list(found.block_hashes) == list(
            stubs.lookup(range(100, 110), want_hashes=True).block_hashes
        )
        freed = call("Free", cache_pb2.FreeRequest(owner=peer.owner, sequence_ids=[*ids, 1]))
        assert list(freed.result_codes) == [1, 1, cache_pb2.RESULT_CODE_NOT_FOUND]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_columns_within_a_step_are_read_in_every_legal_spelling(spelling: str) -> None:
    replies = []
    for spell in (spelled, lambda request, _: request):
        cache = CacheOptions(NUM_BLOCKS, BLOCK_SIZE, hash_seed="a seed of the wire tests")
        with (
            running_daemon(cache) as running,
            connected(running.target) as stubs,
            stubs.steps() as steps,
        ):
            peer = Peer(stubs, bytes(16))
            ids = [peer.allocate(range(n, n + 6)).sequence_id for n in (0, 10, 20)]
            request = cache_pb2.StepRequest(
                free=cache_pb2.FreeRequest(owner=peer.owner, sequence_ids=[ids[2], 1, 2]),
                commit=peer.commit_request([(ids[0], 0, 6), (ids[1], 0, 5)]),
                append=peer.append_request(
                    [Row(ids[0], 6, (MAX_UINT32, 0, 1)), Row(ids[1], 6, (9,), 1, 4)]
                ),
                allocates=[
                    cache_pb2.AllocateRequest(owner=peer.owner, token_ids=range(9)),
                    cache_pb2.AllocateRequest(owner=peer.owner, token_ids=[7, MAX_UINT32, 0]),
                ],
            )
            reply = steps.run(spell(request, spelling))
            assert not reply.errors
            for part in reply.allocates:
                assert part.sequence_id
                part.sequence_id = 0
            replies.append(reply)
    assert replies[0] == replies[1]
    assert [part.num_cached_tokens for part in replies[0].allocates] == [4, 0]


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("name", ["Prefill", "Decode"])
def test_columns_of_an_attention_batch_are_read_in_every_legal_spelling(
    stored: Served, name: str, spelling: str
) -> None:
    peer = Peer(stored.stubs)
    lengths = [2, 1, 3]
    ids = [peer.allocate(range(length)).sequence_id for length in lengths]
    rows = [(sequence_id, 0, n) for sequence_id, n in zip(ids, lengths, strict=True)]
    request = attention_request(name, peer, rows)
    replies = [
        stored.stubs.call(name, encoded) for encoded in (spelled(request, spelling), request)
    ]
    assert replies[0].out.shape == [6, HEADS, HEAD_DIM]
    assert replies[0] == replies[1], "a repeat in the usual spelling has another output"
    peer.free(*ids)


def test_fields_from_a_later_version_are_ignored(bare: Served) -> None:
    later = tag(100, 0) + varint(1) + length_delimited(101, b"from the future")
    request = cache_pb2.LookupRequest(token_ids=range(5))
    assert bare.stubs.call("Lookup", request.SerializeToString() + later) == bare.stubs.call(
        "Lookup", request
    )


def test_fields_from_a_later_version_are_ignored_within_a_step(bare: Served) -> None:
    later = tag(100, 0) + varint(1) + length_delimited(101, b"from the future")
    free = cache_pb2.FreeRequest(owner=bare.peer.owner, sequence_ids=[1]).SerializeToString()
    with bare.stubs.steps() as steps:
        reply = steps.run(length_delimited(1, free + later) + later)
    assert list(reply.free.result_codes) == [cache_pb2.RESULT_CODE_NOT_FOUND]


# ---- bytes that are no message


MALFORMED = {
    "a tag without its value": b"\x08",
    "a length beyond the end": length_delimited(1, b"0123456789")[:-4],
    "a varint without end": b"\x08" + b"\xff" * 11,
    "wire type 7": b"\x0f",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("name", sorted(METHODS))
def test_malformed_bytes_are_the_callers_fault(bare: Served, name: str, data: bytes) -> None:
    before = bare.state()
    refusal = bare.stubs.refused(name, data)
    assert_refused(bare, refusal, "request")
    assert bare.state() == before


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_bytes_end_a_stream_as_they_end_a_call(bare: Served, data: bytes) -> None:
    before = bare.state()
    for message in (data, length_delimited(2, data), length_delimited(4, data)):
        with bare.stubs.steps() as steps:
            steps.send(message)
            assert_refused(bare, steps.ended(), "request")
    assert bare.state() == before


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("Lookup", length_delimited(1, b"12345")),  # five bytes of packed fixed32
        ("Free", length_delimited(2, b"123456789")),  # nine bytes of packed fixed64
        ("Allocate", length_delimited(2, b"\xff\xfe")),  # a request_id that is no UTF-8
        ("Fork", length_delimited(4, b"\xc0\x80")),
        ("Free", length_delimited(3, b"\xff\xfe")),
        ("ListSequences", length_delimited(2, b"\xed\xa0\x80")),  # a lone surrogate
    ],
)
def test_values_that_do_not_fit_their_type_are_the_callers_fault(
    bare: Served, name: str, data: bytes
) -> None:
    assert_refused(bare, bare.stubs.refused(name, data), "request")


# ---- values


def tensor(
    *shape: int, data_type: int = attention_pb2.DATA_TYPE_FLOAT32, num_bytes: int | None = None
) -> attention_pb2.Tensor:
    size = 4 * math.prod(shape) if num_bytes is None else num_bytes
    data = np.random.default_rng(0).standard_normal(-(-size // 4), dtype=np.float32).tobytes()
    return attention_pb2.Tensor(data_type=data_type, shape=shape, data=data[:size])


def many_dimensions(count: int) -> attention_pb2.Tensor:
    """The product of its lengths has millions of bits."""
    return attention_pb2.Tensor(
        data_type=attention_pb2.DATA_TYPE_FLOAT32, shape=[MAX_UINT32] * count
    )


def attention_request(name: str, peer: Peer, rows: list[tuple[int, int, int]]) -> Any:
    num_tokens = sum(row[2] for row in rows)
    return METHODS[name].request(
        batch=peer.batch(0, rows),
        q=tensor(num_tokens, HEADS, HEAD_DIM),
        k=tensor(num_tokens, HEADS, HEAD_DIM),
        v=tensor(num_tokens, HEADS, HEAD_DIM),
    )


def latent_request(name: str, served: Served) -> Any:
    """A call with three query heads that a daemon with latents would serve."""
    rows = [(served.sequence_id, 0, 6)]
    return METHODS[name].request(
        batch=served.peer.batch(0, rows, AttentionOptions(scale=0.3)),
        q=tensor(6, 3, HEAD_DIM),
        k=tensor(6, 1, HEAD_DIM),
    )


def good(name: str, served: Served) -> Any:
    """A request of RPC `name` that would be served; each bad value below is one change to it."""
    peer, sequence_id = served.peer, served.sequence_id
    match name:
        case "Lookup":
            return cache_pb2.LookupRequest(token_ids=range(10))
        case "Allocate":
            return cache_pb2.AllocateRequest(owner=peer.owner, token_ids=range(10))
        case "Append":
            return peer.append_request([Row(sequence_id, 6, (1, 2, 3))])
        case "Commit":
            return cache_pb2.CommitRequest(
                owner=peer.owner,
                sequence_ids=[sequence_id],
                start_positions=[0],
                num_computed_tokens=[6],
            )
        case "Fork":
            return cache_pb2.ForkRequest(
                owner=peer.owner, sequence_id=sequence_id, num_tokens=6, request_ids=[""]
            )
        case "Truncate":
            return cache_pb2.TruncateRequest(
                owner=peer.owner, sequence_id=sequence_id, num_tokens_before=6, num_tokens_after=5
            )
        case "Free":
            return cache_pb2.FreeRequest(owner=peer.owner, request_ids=["unknown"])
        case "Prefill" | "Decode":
            return attention_request(name, peer, [(sequence_id, 0, 6)])
        case _:
            return METHODS[name].request()


Change = Callable[[Any], Any]
LORA_PATH = cache_pb2.ExtraKeys(lora=cache_pb2.Lora(path="/adapters/a"))
LORA = cache_pb2.ExtraKeys(lora=cache_pb2.Lora(name="a"))
SALT = cache_pb2.ExtraKeys(cache_salt="salt")


def image(offset: int, num_tokens: int, identifier: str = "image") -> cache_pb2.ExtraKeys:
    item = cache_pb2.MultimodalItem(identifier=identifier, offset=offset, num_tokens=num_tokens)
    return cache_pb2.ExtraKeys(multimodal_items=[item])


def embeds(offset: int, num_tokens: int, *digests: bytes) -> cache_pb2.ExtraKeys:
    span = cache_pb2.PromptEmbeds(offset=offset, num_tokens=num_tokens, digests=digests)
    return cache_pb2.ExtraKeys(prompt_embeds=[span])


def put(field: str, value: Any) -> Change:
    """Set a field: a scalar, a message, or all elements of a repeated one."""

    def change(request: Any) -> None:
        holder, _, name = field.rpartition(".")
        target = getattr(request, holder) if holder else request
        target.ClearField(name)
        if isinstance(value, (list, range)):
            getattr(target, name).extend(value)
        elif hasattr(value, "DESCRIPTOR"):
            getattr(target, name).CopyFrom(value)
        else:
            setattr(target, name, value)

    return change


def add_keys(row: int, keys: cache_pb2.ExtraKeys, times: int = 1) -> Change:
    def change(request: Any) -> None:
        for _ in range(times):
            request.extra_keys.add(row=row, extra_keys=keys)

    return change


DIGEST = bytes(32)
PROMPT_VALUES: list[tuple[Change, str]] = [
    (put("token_ids", []), "token_ids"),
    (put("full_hit", 3), "full_hit"),
    (put("full_hit", -1), "full_hit"),
    (put("extra_keys", LORA_PATH), "extra_keys.lora.name"),
    (put("extra_keys", image(0, 1, "")), "extra_keys.multimodal_items.identifier"),
    (put("extra_keys", image(0, 0)), "extra_keys.multimodal_items.offset"),
    (put("extra_keys", image(9, 2)), "extra_keys.multimodal_items.offset"),
    (put("extra_keys", image(10, 1)), "extra_keys.multimodal_items.offset"),
    (put("extra_keys", image(MAX_UINT32, MAX_UINT32)), "extra_keys.multimodal_items.offset"),
    (put("extra_keys", embeds(0, 0)), "extra_keys.prompt_embeds.offset"),
    (put("extra_keys", embeds(8, 3, DIGEST)), "extra_keys.prompt_embeds.offset"),
    (put("extra_keys", embeds(3, 2, DIGEST)), "extra_keys.prompt_embeds.digests"),
    (put("extra_keys", embeds(0, 4, DIGEST, DIGEST)), "extra_keys.prompt_embeds.digests"),
    (put("extra_keys", embeds(0, 4, bytes(31))), "extra_keys.prompt_embeds.digests"),
]
OWNERS = [b"", bytes(15), bytes(17)]
COLUMN_VALUES: list[tuple[Change, str]] = [
    (put("sequence_ids", []), "sequence_ids"),
    (put("sequence_ids", [1, 2]), "start_positions"),
    (put("start_positions", []), "start_positions"),
    (put("start_positions", [6, 6]), "start_positions"),
]


def twice(columns: dict[str, int]) -> Change:
    """The same sequence in two rows. columns: the value of each, in both rows."""

    def change(request: Any) -> None:
        request.sequence_ids.append(request.sequence_ids[0])
        for name, value in columns.items():
            put(name, [value, value])(request)

    return change


BAD_VALUES: list[tuple[str, Change, str]] = [
    *(("Lookup", *value) for value in PROMPT_VALUES),
    *(("Allocate", *value) for value in PROMPT_VALUES),
    *(
        (name, put("owner", owner), "owner")
        for name in ("Allocate", "Append", "Commit", "Fork", "Truncate", "Free")
        for owner in OWNERS
    ),
    ("Allocate", put("request_id", "x" * 257), "request_id"),
    ("Allocate", put("request_id", "é" * 129), "request_id"),
    ("Allocate", put("cache_use", 5), "cache_use"),
    ("Allocate", put("cache_use", -1), "cache_use"),
    *(("Append", *value) for value in COLUMN_VALUES),
    ("Append", put("num_tokens", []), "num_tokens"),
    ("Append", put("num_tokens", [3, 0]), "num_tokens"),
    ("Append", put("num_tokens", [2]), "token_ids"),
    ("Append", put("num_tokens", [MAX_UINT32]), "token_ids"),
    ("Append", put("token_ids", range(4)), "token_ids"),
    ("Append", put("num_kv_valid", [0, 0]), "num_kv_valid"),
    ("Append", put("num_kv_valid", [4]), "num_kv_valid"),
    ("Append", put("num_lookahead_tokens", [0, 0]), "num_lookahead_tokens"),
    (
        "Append",
        twice({"start_positions": 6, "num_tokens": 0, "num_kv_valid": 0}),
        "sequence_ids",
    ),
    ("Append", add_keys(1, image(6, 1)), "extra_keys.row"),
    ("Append", add_keys(0, image(6, 1), times=2), "extra_keys.row"),
    ("Append", add_keys(0, LORA), "extra_keys.extra_keys"),
    ("Append", add_keys(0, LORA_PATH), "extra_keys.extra_keys"),
    ("Append", add_keys(0, SALT), "extra_keys.extra_keys"),
    ("Append", add_keys(0, image(5, 2)), "extra_keys.multimodal_items.offset"),
    ("Append", add_keys(0, image(8, 2)), "extra_keys.multimodal_items.offset"),
    ("Append", add_keys(0, image(6, 1, "")), "extra_keys.multimodal_items.identifier"),
    ("Append", add_keys(0, embeds(6, 3, DIGEST)), "extra_keys.prompt_embeds.digests"),
    *(("Commit", *value) for value in COLUMN_VALUES),
    ("Commit", put("num_computed_tokens", []), "num_computed_tokens"),
    ("Commit", put("num_computed_tokens", [6, 0]), "num_computed_tokens"),
    ("Commit", twice({"start_positions": 0, "num_computed_tokens": 0}), "sequence_ids"),
    ("Fork", put("request_ids", []), "request_ids"),
    ("Fork", put("request_ids", [""] * 257), "request_ids"),
    ("Fork", put("request_ids", ["a", ""]), "request_ids"),
    ("Fork", put("request_ids", ["a", "b", "a"]), "request_ids"),
    ("Fork", put("request_ids", ["x" * 257]), "request_ids"),
    ("Truncate", put("num_tokens_after", 0), "num_tokens_after"),
    ("Truncate", put("num_tokens_after", 7), "num_tokens_after"),
    ("Truncate", put("num_tokens_after", MAX_UINT32), "num_tokens_after"),
    ("Free", put("request_ids", [""]), "request_ids"),
    ("Free", put("request_ids", ["a", ""]), "request_ids"),
    ("Free", put("request_ids", ["x" * 257]), "request_ids"),
    ("Free", put("request_ids", ["é" * 129]), "request_ids"),
    ("ListSequences", put("page_size", 1001), "page_size"),
    ("ListSequences", put("order", 3), "order"),
    ("ListSequences", put("order", -1), "order"),
    ("ListSequences", put("page_size", MAX_UINT32), "page_size"),
    *(
        ("ListSequences", put("page_token", token), "page_token")
        for token in ("x", "-1", " 1", "1.0", "²", "٣", "9" * 5000)
    ),
]
BAD_ATTENTION_VALUES: list[tuple[Change, str]] = [
    *((put("batch.owner", owner), "owner") for owner in OWNERS),
    (lambda request: request.ClearField("batch"), "owner"),
    (put("batch.layer", 2), "layer"),
    (put("batch.layer", MAX_UINT32), "layer"),
    (put("batch.sequence_ids", []), "sequence_ids"),
    (put("batch.sequence_ids", [1, 2]), "start_positions"),
    (put("batch.start_positions", []), "start_positions"),
    (put("batch.num_tokens", []), "num_tokens"),
    (put("batch.num_tokens", [6, 6]), "num_tokens"),
    (put("batch.num_tokens", [0]), "num_tokens"),
    (put("batch.num_tokens", [5]), "q.shape"),
    (put("batch.num_tokens", [2**22]), "q.shape"),
    (put("batch.num_tokens", [MAX_UINT32]), "num_tokens"),
    *(
        (put(f"batch.{name}", value), name)
        for name, values in (
            ("scale", (math.nan, -math.inf)),
            ("window", (0,)),
            ("soft_cap", (0.0, -1.0, math.inf, math.nan)),
            ("alibi_slopes", ([1.0], [1.0] * 3, [1.0, math.nan], [math.inf, 1.0])),
            ("sinks", ([1.0], [1.0] * 3, [1.0, math.nan], [-math.inf, 1.0])),
        )
        for value in values
    ),
    (lambda request: request.ClearField("q"), "q.data_type"),
    (lambda request: request.ClearField("k"), "k.data_type"),
    (lambda request: request.ClearField("v"), "v"),
    *(
        (put(name, bad), f"{name}.{field}")
        for name in ("q", "k", "v")
        for bad, field in (
            (tensor(6, HEADS, HEAD_DIM, data_type=0), "data_type"),
            (tensor(6, HEADS, HEAD_DIM, data_type=4), "data_type"),
            (tensor(6, HEADS, HEAD_DIM, data_type=-1), "data_type"),
            (tensor(6, HEADS, HEAD_DIM, data_type=2, num_bytes=192), "data_type"),
            (tensor(6, HEADS, HEAD_DIM, num_bytes=0), "data"),
            (tensor(6, HEADS, HEAD_DIM, num_bytes=383), "data"),
            (tensor(6, HEADS, HEAD_DIM, num_bytes=388), "data"),
            (tensor(*[MAX_UINT32] * 3, num_bytes=384), "data"),
            (many_dimensions(9), "shape"),
            (many_dimensions(100_000), "shape"),
            (tensor(num_bytes=4), "shape"),
            (tensor(96), "shape"),
            (tensor(6, HEADS * HEAD_DIM), "shape"),
            (tensor(1, 6, HEADS, HEAD_DIM), "shape"),
            (tensor(5, HEADS, HEAD_DIM), "shape"),
            (tensor(7, HEADS, HEAD_DIM), "shape"),
            (tensor(6, HEADS + 1, HEAD_DIM), "shape"),
            (tensor(6, 0, HEAD_DIM), "shape"),
            (tensor(0, HEADS, HEAD_DIM), "shape"),
            (tensor(6, HEADS, HEAD_DIM + 1), "shape"),
            (tensor(6, HEADS, 0), "shape"),
        )
    ),
    (put("k", tensor(6, 2 * HEADS, HEAD_DIM)), "k.shape"),
]


@pytest.mark.parametrize(
    ("name", "change", "field"),
    BAD_VALUES,
    ids=[f"{row[0]}-{row[2]}-{index}" for index, row in enumerate(BAD_VALUES)],
)
def test_a_bad_value_is_refused_by_its_name(
    bare: Served, name: str, change: Change, field: str
) -> None:
    request = good(name, bare)
    change(request)
    before = bare.state()
    assert_refused(bare, bare.stubs.refused(name, request), field)
    assert bare.state() == before


@pytest.mark.parametrize("name", ["Prefill", "Decode"])
@pytest.mark.parametrize(
    ("change", "field"),
    BAD_ATTENTION_VALUES,
    ids=[f"{row[1]}-{index}" for index, row in enumerate(BAD_ATTENTION_VALUES)],
)
def test_a_bad_value_of_an_attention_call_is_refused_by_its_name(
    stored: Served, name: str, change: Change, field: str
) -> None:
    request = good(name, stored)
    change(request)
    before = stored.state()
    assert_refused(stored, stored.stubs.refused(name, request), field)
    assert stored.state() == before


@pytest.mark.parametrize("name", ["Prefill", "Decode"])
@pytest.mark.parametrize(
    ("change", "field"),
    [
        (put("v", tensor(6, 1, LATENT_DIM)), "v"),
        (put("v", tensor(6, 1, HEAD_DIM)), "v"),
        (put("v", attention_pb2.Tensor()), "v.data_type"),
        (lambda request: request.batch.ClearField("scale"), "scale"),
        (put("q", tensor(6, 3, LATENT_DIM)), "q.shape"),
        (put("k", tensor(6, 2, HEAD_DIM)), "k.shape"),
        (put("k", tensor(6, 1, LATENT_DIM)), "k.shape"),
        (put("batch.sinks", [1.0, 1.0]), "sinks"),
    ],
)
def test_a_bad_value_of_a_call_on_latents_is_refused_by_its_name(
    latent: Served, name: str, change: Change, field: str
) -> None:
    request = latent_request(name, latent)
    change(request)
    before = latent.state()
    assert_refused(latent, latent.stubs.refused(name, request), field)
    assert latent.state() == before


@pytest.mark.parametrize("name", ["Prefill", "Decode"])
@pytest.mark.parametrize("operand", ["q", "k", "v"])
@pytest.mark.parametrize("data_type", [2, 3, 4])
def test_quantised_storage_takes_tensors_of_the_layouts_dtype_only(
    quantised: Served, name: str, operand: str, data_type: int
) -> None:
    """4 is no type: what is stored does not come over the wire."""
    request = good(name, quantised)
    num_bytes = 2 * 6 * HEADS * HEAD_DIM
    put(operand, tensor(6, HEADS, HEAD_DIM, data_type=data_type, num_bytes=num_bytes))(request)
    before = quantised.state()
    refusal = quantised.stubs.refused(name, request)
    assert_refused(quantised, refusal, f"{operand}.data_type")
    assert quantised.state() == before


@pytest.mark.parametrize("name", ["Prefill", "Decode"])
def test_one_sequence_in_two_rows_of_an_attention_call_is_refused(
    stored: Served, name: str
) -> None:
    rows = [(stored.sequence_id, 0, 3), (stored.sequence_id, 3, 3)]
    request = attention_request(name, stored.peer, rows)
    assert_refused(stored, stored.stubs.refused(name, request), "sequence_ids")


@pytest.mark.parametrize("name", ["Prefill", "Decode"])
def test_the_requests_on_other_kinds_of_storage_that_the_bad_values_change_are_good(
    latent: Served, quantised: Served, name: str
) -> None:
    for served, make in ((latent, latent_request), (quantised, good)):
        peer = Peer(served.stubs)
        sequence_id = peer.allocate(range(6)).sequence_id
        other = Served(served.running, served.stubs, peer, sequence_id)
        served.stubs.call(name, make(name, other))
        assert peer.free(sequence_id) == [cache_pb2.RESULT_CODE_OK]


@pytest.mark.parametrize(
    "name", ["Lookup", "Append", "Commit", "Truncate", "ListSequences", "Prefill", "Decode"]
)
def test_the_requests_that_the_bad_values_change_are_good(
    bare: Served, stored: Served, name: str
) -> None:
    served = stored if name in ("Prefill", "Decode") else bare
    peer = Peer(served.stubs)
    sequence_id = peer.allocate(range(6)).sequence_id
    served.stubs.call(name, good(name, Served(served.running, served.stubs, peer, sequence_id)))
    assert peer.free(sequence_id) == [cache_pb2.RESULT_CODE_OK]


def assert_refused(
    served: Served,
    refusal: Refused,
    field: str,
    code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT,
    reason: str = InvalidArgumentError.reason,
) -> None:
    assert (refusal.code, refusal.reason, refusal.field) == (code, reason, field)
    assert [info.domain for info in refusal.infos] == ["prefixcache"]
    assert refusal.numbers["boot_id"] == served.running.daemon.boot_id.hex()
    assert field in refusal.message
    assert refusal.retry_delay_s is None


# ---- what errors carry


def test_no_room_now_says_the_numbers_and_when_to_come_again(bare: Served) -> None:
    held = bare.stubs.stats().referenced
    free = NUM_BLOCKS - held
    request = cache_pb2.AllocateRequest(
        owner=bare.peer.owner, token_ids=range(1000, 1000 + NUM_BLOCKS * BLOCK_SIZE)
    )
    refusal = bare.stubs.refused("Allocate", request)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_ROOM")
    # Who holds the rest has tests of its own.
    own = {key: text for key, text in refusal.numbers.items() if not key.startswith("holder_")}
    assert own == {
        "boot_id": bare.running.daemon.boot_id.hex(),
        "needed": str(NUM_BLOCKS),
        "free": str(free),
        "referenced": str(held),
    }
    assert refusal.message.startswith(f"needs {NUM_BLOCKS} blocks, {free} free, {held} referenced")
    assert refusal.retry_delay_s is not None and refusal.retry_delay_s > 0


@pytest.mark.parametrize(
    ("num_tokens", "num_lookahead_tokens", "needed"),
    [
        (NUM_BLOCKS * BLOCK_SIZE + 1, 0, NUM_BLOCKS + 1),
        (1, NUM_BLOCKS * BLOCK_SIZE, NUM_BLOCKS + 1),
        (1, 2**22 - 1, 2**20),
    ],
)
def test_more_than_the_whole_pool_is_refused_for_good(
    bare: Served, num_tokens: int, num_lookahead_tokens: int, needed: int
) -> None:
    request = cache_pb2.AllocateRequest(
        owner=bare.peer.owner,
        token_ids=range(num_tokens),
        num_lookahead_tokens=num_lookahead_tokens,
    )
    before = bare.state()
    refusal = bare.stubs.refused("Allocate", request)
    assert_refused(bare, refusal, "token_ids", reason="EXCEEDS_POOL")
    assert (refusal.numbers["needed"], refusal.numbers["num_blocks"]) == (
        str(needed),
        str(NUM_BLOCKS),
    )
    assert bare.state() == before


def test_the_whole_pool_is_not_too_much() -> None:
    with running_daemon(CacheOptions(7, BLOCK_SIZE)) as running, connected(running.target) as stubs:
        assert sorted(Peer(stubs).allocate(range(7 * BLOCK_SIZE)).block_ids) == list(range(7))


@pytest.mark.parametrize("name", ["Fork", "Truncate", "Prefill", "Decode"])
def test_another_owners_sequence_is_as_unknown_as_one_that_never_was(
    stored: Served, name: str
) -> None:
    stranger = Peer(stored.stubs)
    refusals = []
    for sequence_id in (stored.sequence_id, stored.sequence_id ^ 1):
        asked = Served(stored.running, stored.stubs, stranger, sequence_id)
        refusal = stored.stubs.refused(name, good(name, asked))
        assert (refusal.code, refusal.reason) == (
            grpc.StatusCode.NOT_FOUND,
            "SEQUENCE_NOT_FOUND",
        )
        assert refusal.numbers == {
            "boot_id": stored.running.daemon.boot_id.hex(),
            "sequence_id": str(sequence_id),
        }
        refusals.append(refusal.message.replace(f"{sequence_id:#018x}", ""))
    assert refusals[0] == refusals[1]


def test_another_owners_sequence_is_not_found_in_the_rows_of_batches(bare: Served) -> None:
    stranger, before = Peer(bare.stubs), bare.state()
    assert stranger.append(bare.sequence_id, 6, [1]).code == cache_pb2.RESULT_CODE_NOT_FOUND
    assert stranger.commit(bare.sequence_id, 0, 6) == cache_pb2.RESULT_CODE_NOT_FOUND
    assert stranger.free(bare.sequence_id) == [cache_pb2.RESULT_CODE_NOT_FOUND]
    assert bare.state() == before


@pytest.mark.parametrize(
    ("name", "field"),
    [("GetServerInfo", "expected_fingerprint"), ("Allocate", "layout_fingerprint")],
)
@pytest.mark.parametrize("given", [bytes(32), b"x", bytes(200_000)], ids=["other", "short", "long"])
def test_a_client_of_another_layout_is_refused(
    bare: Served, name: str, field: str, given: bytes
) -> None:
    request = good(name, bare)
    setattr(request, field, given)
    refusal = bare.stubs.refused(name, request)
    assert (refusal.code, refusal.reason) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "FINGERPRINT_MISMATCH",
    )
    assert refusal.numbers["actual"] == bare.running.daemon.info.layout_fingerprint.hex()


def test_an_error_about_a_long_value_still_arrives(stored: Served) -> None:
    request = good("Prefill", stored)
    request.q.shape[:] = [1] * 50_000
    request.q.data = b"1234"
    assert_refused(stored, stored.stubs.refused("Prefill", request), "q.shape")


def test_any_text_may_be_a_request_id(bare: Served) -> None:
    peer, request_id = Peer(bare.stubs), 'é\x00\n"%20 🙂'
    held = peer.allocate([1], request_id=request_id)
    request = cache_pb2.AllocateRequest(owner=peer.owner, token_ids=[2], request_id=request_id)
    refusal = bare.stubs.refused("Allocate", request)
    assert (refusal.code, refusal.reason) == (
        grpc.StatusCode.ALREADY_EXISTS,
        "REQUEST_ID_CONFLICT",
    )
    assert refusal.numbers["request_id"] == request_id
    assert peer.free(held.sequence_id) == [cache_pb2.RESULT_CODE_OK]


def test_an_unknown_method_is_unimplemented(bare: Served) -> None:
    call = bare.stubs.channel.unary_unary("/prefixcache.v1.PrefixCacheService/Fly")
    with pytest.raises(grpc.RpcError) as caught:
        call(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


# ---- sizes


LIMIT_BYTES = 64 * 1024


@pytest.fixture
def limited() -> Iterator[Served]:
    """A daemon that takes and sends little: a reply with all block ids just fits."""
    cache, limits = CacheOptions(LIMIT_BYTES // 4 - 256, 1), LimitOptions(LIMIT_BYTES)
    with running_daemon(cache, limits=limits) as running, connected(running.target) as stubs:
        yield Served(running, stubs, Peer(stubs), 0)


def test_a_message_over_the_limit_is_refused_and_nothing_is_allocated(limited: Served) -> None:
    assert limited.stubs.info().limits.max_message_bytes == LIMIT_BYTES
    before, peer = limited.state(), limited.peer
    too_long = range(LIMIT_BYTES // 4)
    request = cache_pb2.AllocateRequest(owner=peer.owner, token_ids=too_long)
    refusal = limited.stubs.refused("Allocate", request)
    assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert limited.state() == before
    num_blocks = len(too_long) - 256
    assert len(peer.allocate(too_long[:num_blocks]).block_ids) == num_blocks


def test_a_lookup_whose_hashes_exceed_the_limit_is_refused(limited: Served) -> None:
    before, request = limited.state(), cache_pb2.LookupRequest(token_ids=range(3000))
    assert limited.stubs.call("Lookup", request).num_blocks_needed == 3000
    request.want_hashes = True
    refusal = limited.stubs.refused("Lookup", request)
    assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert limited.state() == before


def test_every_reply_with_block_ids_fits_into_a_message(limited: Served) -> None:
    peer, num_blocks = limited.peer, LIMIT_BYTES // 4 - 256
    sequence_id = peer.allocate([1], num_lookahead_tokens=num_blocks - 1).sequence_id
    assert len(peer.truncate(sequence_id, 1, 1)) == num_blocks - 1
    row = peer.append(sequence_id, 1, [], num_lookahead_tokens=num_blocks - 1)
    assert len(row.new_block_ids) == num_blocks - 1


def test_a_step_makes_no_sequence_whose_block_ids_do_not_fit_into_its_answer(
    limited: Served,
) -> None:
    peer, cached = limited.peer, range(6000)
    sequence_id = peer.allocate(cached).sequence_id
    peer.commit(sequence_id, 0, len(cached))
    hit = cache_pb2.AllocateRequest(owner=peer.owner, token_ids=cached)
    drafts = cache_pb2.AllocateRequest(
        owner=peer.owner, token_ids=[1], num_lookahead_tokens=LIMIT_BYTES // 8
    )
    with limited.stubs.steps() as steps:
        reply = steps.run(cache_pb2.StepRequest(allocates=[hit, hit, drafts]))
        assert [len(part.block_ids) for part in reply.allocates] == [6000, 6000, 0]
        ((place, refusal),) = refusals(reply).items()
        assert (place, refusal.field) == (("allocates", 2), "allocates")
        reply = steps.run(cache_pb2.StepRequest(allocates=[drafts]))
        assert len(reply.allocates[0].block_ids) == 1 + LIMIT_BYTES // 8


def test_a_pool_whose_block_ids_do_not_fit_into_a_message_is_not_served() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Daemon(CacheOptions(LIMIT_BYTES // 4), limits=LimitOptions(LIMIT_BYTES))
    assert caught.value.field == "max_message_bytes"


def test_two_million_tokens_and_a_million_block_ids_fit_in_a_message() -> None:
    cache = CacheOptions(num_blocks=1_000_000, block_size=2)
    with running_daemon(cache) as running, connected(running.target) as stubs:
        peer = Peer(stubs)
        tokens = np.arange(2_000_000, dtype=np.uint32)
        found = stubs.lookup(tokens)
        assert (found.num_cached_tokens, found.num_blocks_needed) == (0, 1_000_000)
        reply = peer.allocate([1], num_lookahead_tokens=1_999_999)
        assert len(reply.block_ids) == len(set(reply.block_ids)) == 1_000_000
        assert stubs.stats().referenced == 1_000_000
        peer.free(reply.sequence_id)
        check = running.daemon.sequences.pool
        assert check.num_blank == check.num_blocks


def test_numbers_at_the_end_of_their_range_do_not_overflow_the_reply() -> None:
    limits = LimitOptions(max_tokens_per_call=MAX_UINT32)
    with (
        running_daemon(CacheOptions(8, 1), None, limits) as running,
        connected(running.target) as stubs,
    ):
        found = stubs.lookup(range(100), num_lookahead_tokens=MAX_UINT32 - 100)
        assert found.num_blocks_needed == MAX_UINT32
        peer = Peer(stubs)
        sequence_id = peer.allocate([1]).sequence_id
        for change in (
            put("start_positions", [MAX_UINT32]),
            put("num_lookahead_tokens", [MAX_UINT32 - 1]),
        ):
            request = peer.append_request([Row(sequence_id, 1, (5,))])
            change(request)
            code = stubs.call("Append", request).result_codes[0]
            assert code in (
                cache_pb2.RESULT_CODE_WRONG_POSITION,
                cache_pb2.RESULT_CODE_EXCEEDS_POOL,
            )
        assert peer.commit(sequence_id, MAX_UINT32, MAX_UINT32) == (
            cache_pb2.RESULT_CODE_WRONG_POSITION
        )
        assert peer.commit(sequence_id, 0, MAX_UINT32) == cache_pb2.RESULT_CODE_BEYOND_TOKENS
        assert peer.free(2**64 - 1, 0) == [cache_pb2.RESULT_CODE_NOT_FOUND] * 2
        page = stubs.call("ListSequences", admin_pb2.ListSequencesRequest(page_token="9" * 19))
        assert not page.sequences
        check_invariants(running.daemon.sequences)

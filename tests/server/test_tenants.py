"""Tenants beside each other: nobody hits, names, ends or learns of what is another's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import cbor2
import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixcache.core.tenants import TenantQuota
from prefixcache.rpc import wire
from prefixcache.rpc._pb import admin_pb2, attention_pb2, cache_pb2, session_pb2
from prefixcache.server.access import AccessControl
from prefixcache.server.auth_file import parse_auth_rules
from prefixcache.server.cache_service import CacheService
from prefixcache.server.callers import ANYONE, Caller
from prefixcache.server.daemon import CacheOptions, Daemon, ModelOptions
from prefixcache.server.peer_tickets import PeerTickets
from prefixcache.storage.layout import KVLayout
from prefixcache.types import ResultCode
from tests.support.bearer import bearing, hash_of
from tests.support.daemon import RunningDaemon, running_daemon
from tests.support.invariants import snapshot
from tests.support.stubs import Peer, Refused, Row, Stubs, refusals

SIZE = 4
SEED = "a seed of the tenants' tests"
LAYOUT = KVLayout(1, 1, 8, SIZE, "float32")
PROMPT = list(range(1, 10))
NOT_FOUND = grpc.StatusCode.NOT_FOUND
RULES = {
    "identities": [
        {"token_sha256": hash_of(name), "tenant": name, "roles": roles}
        for name, roles in {
            "a": ["client"],
            "b": ["client"],
            "sharing-c": ["client"],
            "sharing-d": ["client"],
            "ops": ["admin", "client"],
        }.items()
    ],
    "tenants": {"sharing-c": {"namespace": "shared"}, "sharing-d": {"namespace": "shared"}},
}


@pytest.fixture(params=["none", "cpu"])
def running(request: pytest.FixtureRequest) -> Iterator[RunningDaemon]:
    access = AccessControl(parse_auth_rules(RULES), PeerTickets())
    model = ModelOptions(LAYOUT) if request.param == "cpu" else None
    options = CacheOptions(64, SIZE, hash_seed=SEED)
    with running_daemon(options, model, access=access) as running:
        yield running


As = Callable[[str], Stubs]


@pytest.fixture
def as_tenant(running: RunningDaemon) -> Iterator[As]:
    opened: dict[str, tuple[Any, Stubs]] = {}

    def stubs(name: str) -> Stubs:
        if name not in opened:
            manager = bearing(running.target, name)
            opened[name] = (manager, manager.__enter__())
        return opened[name][1]

    yield stubs
    for manager, _ in opened.values():
        manager.__exit__(None, None, None)


def compute(peer: Peer, sequence_id: int, start: int, count: int) -> None:
    """K/V of these tokens are complete, in either kind of daemon."""
    if peer.stubs.info().device == "none":
        assert peer.commit(sequence_id, start, count) == ResultCode.OK
        return
    tensor = tensor_of(count)
    peer.stubs.call(
        "Prefill",
        attention_pb2.PrefillRequest(
            batch=peer.batch(0, [(sequence_id, start, count)]), q=tensor, k=tensor, v=tensor
        ),
    )


def tensor_of(count: int) -> attention_pb2.Tensor:
    return attention_pb2.Tensor(
        data_type=attention_pb2.DATA_TYPE_FLOAT32, shape=[count, 1, 8], data=bytes(count * 32)
    )


def fill(stubs: Stubs, prompt: list[int] = PROMPT, **fields: Any) -> int:
    """Commit a prompt and free it; returns its hits."""
    peer = Peer(stubs)
    reply = peer.allocate(prompt, **fields)
    cached = int(reply.num_cached_tokens)
    compute(peer, reply.sequence_id, cached, len(prompt) - cached)
    peer.free(reply.sequence_id)
    return cached


# ---- blocks


def test_a_tenants_prompt_is_a_miss_for_every_other(as_tenant: As) -> None:
    assert fill(as_tenant("a")) == 0
    for other in ("b", "sharing-c", "ops"):
        found = as_tenant(other).lookup(PROMPT)
        assert (found.num_cached_tokens, found.num_cached_blocks) == (0, 0)
        assert found.num_blocks_needed == 3
        assert fill(as_tenant(other)) == 0
    assert fill(as_tenant("a")) == 8


def test_what_a_tenant_computes_is_pending_for_its_namespace_only(as_tenant: As) -> None:
    Peer(as_tenant("a")).allocate(PROMPT)
    for other in ("b", "sharing-c", "ops"):
        assert as_tenant(other).lookup(PROMPT).num_pending_tokens == 0
        reply = Peer(as_tenant(other)).allocate(PROMPT, wait_pending_ms=60_000)
        assert reply.num_pending_tokens == 0
    assert as_tenant("a").lookup(PROMPT).num_pending_tokens == 8
    assert as_tenant("sharing-d").lookup(PROMPT).num_pending_tokens == 8


def test_tenants_of_one_namespace_share(as_tenant: As) -> None:
    assert fill(as_tenant("sharing-c")) == 0
    assert as_tenant("sharing-d").lookup(PROMPT).num_cached_tokens == 8
    assert fill(as_tenant("sharing-d")) == 8
    assert as_tenant("a").lookup(PROMPT).num_cached_tokens == 0


def plain_hashes(prompt: list[int], keys: Callable[[int], list[Any]]) -> list[bytes]:
    parent = hashlib.sha256(cbor2.dumps(SEED, canonical=True)).digest()
    hashes = []
    for block in range(len(prompt) // SIZE):
        tokens = prompt[block * SIZE : (block + 1) * SIZE]
        message = [parent, tokens, keys(block) or None]
        parent = hashlib.sha256(cbor2.dumps(message, canonical=True)).digest()
        hashes.append(parent)
    return hashes


def test_the_namespace_is_the_first_key_of_the_first_block(as_tenant: As) -> None:
    def hashes(tenant: str, **extra: Any) -> list[bytes]:
        keys = cache_pb2.ExtraKeys(**extra) if extra else None
        reply = as_tenant(tenant).lookup(PROMPT, extra_keys=keys, want_hashes=True)
        return list(reply.block_hashes)

    a, shared = ["tenant", "a"], ["tenant", "shared"]
    assert hashes("a") == plain_hashes(PROMPT, lambda block: [a] if block == 0 else [])
    assert hashes("sharing-c") == plain_hashes(PROMPT, lambda block: [] if block else [shared])
    assert hashes("a", cache_salt="s") == plain_hashes(
        PROMPT, lambda block: [] if block else [a, ["cache_salt", "s"]]
    )
    image = cache_pb2.MultimodalItem(identifier="i", offset=3, num_tokens=2)
    digest = hashlib.sha256(b"").digest()
    everything = {
        "lora": cache_pb2.Lora(name="l", path="p"),
        "multimodal_items": [image],
        "cache_salt": "s",
        "prompt_embeds": [cache_pb2.PromptEmbeds(offset=1, num_tokens=1, digests=[digest])],
    }
    assert hashes("a", **everything) == plain_hashes(
        PROMPT,
        lambda block: [
            [a, ["lora", "l", "p"], ["mm", "i", 3], ["cache_salt", "s"], ["prompt_embeds", digest]],
            [["lora", "l", "p"], ["mm", "i", -1]],
        ][block],
    )


@pytest.mark.parametrize("salt", ["a", '"tenant"a', "tenant"])
def test_no_field_of_a_request_stands_for_a_namespace(as_tenant: As, salt: str) -> None:
    fill(as_tenant("a"))
    named = {
        (method.name, field.name)
        for method in wire.methods()
        for field in method.request.DESCRIPTOR.fields
        if "tenant" in field.name or "namespace" in field.name
    }
    assert named == {("Explain", "tenant")}, "which takes the role admin, and only looks"
    for keys in (
        cache_pb2.ExtraKeys(cache_salt=salt),
        cache_pb2.ExtraKeys(lora=cache_pb2.Lora(name=salt)),
    ):
        reply = as_tenant("b").lookup(PROMPT, extra_keys=keys)
        assert reply.num_cached_tokens == 0


@pytest.mark.parametrize("fork", [False, True])
def test_a_short_prompt_that_grows_stays_its_tenants(as_tenant: As, fork: bool) -> None:
    """The first block is full only after Append, so that is where its namespace enters."""
    peer = Peer(as_tenant("a"))
    sequence_id = peer.allocate(PROMPT[:2]).sequence_id
    compute(peer, sequence_id, 0, 2)
    if fork:
        (sequence_id,) = peer.fork(sequence_id, 2)
    assert peer.append(sequence_id, 2, PROMPT[2:]).code == ResultCode.OK
    compute(peer, sequence_id, 2, 7)
    assert as_tenant("b").lookup(PROMPT).num_cached_tokens == 0
    assert as_tenant("a").lookup(PROMPT).num_cached_tokens == 8
    peer.truncate(sequence_id, 9, 2)
    assert peer.append(sequence_id, 2, [77] * 7).code == ResultCode.OK
    compute(peer, sequence_id, 2, 7)
    other = PROMPT[:2] + [77] * 7
    assert as_tenant("b").lookup(other).num_cached_tokens == 0
    assert as_tenant("a").lookup(other).num_cached_tokens == 8


# ---- what a tenant holds


def named_calls(peer: Peer, sequence_id: int) -> dict[str, Any]:
    """A request of every RPC that names an owner, a session or a sequence."""
    row, tensor = [(sequence_id, 9, 1)], tensor_of(1)
    attention = {"batch": peer.batch(0, row), "q": tensor, "k": tensor, "v": tensor}
    calls = {
        "Append": peer.append_request([Row(sequence_id, 9, (1,))]),
        "Commit": peer.commit_request(row),
        "Fork": cache_pb2.ForkRequest(
            owner=peer.owner, sequence_id=sequence_id, num_tokens=9, request_ids=[""]
        ),
        "Truncate": cache_pb2.TruncateRequest(
            owner=peer.owner, sequence_id=sequence_id, num_tokens_before=9, num_tokens_after=1
        ),
        "Free": cache_pb2.FreeRequest(
            owner=peer.owner, sequence_ids=[sequence_id], request_ids=["mine"]
        ),
        "Prefill": attention_pb2.PrefillRequest(**attention),
        "Decode": attention_pb2.DecodeRequest(**attention),
    }
    calls["Step"] = cache_pb2.StepRequest(
        free=calls["Free"], commit=calls["Commit"], append=calls["Append"]
    )
    if len(peer.owner) == 24:
        calls["CloseSession"] = session_pb2.CloseSessionRequest(session_id=peer.owner)
        calls["KeepAlive"] = session_pb2.KeepAliveRequest(session_id=peer.owner)
    return calls


NAMES_NOBODY = {
    "GetServerInfo",
    "Lookup",
    "Explain",
    "OpenSession",
    "Allocate",
    "GetStats",
    "ResetCache",
    "ListSequences",
    "ListSessions",
    "WatchEvents",
}
"""Allocate names an owner, and makes one that is not known: its own test is below."""


def outcome(stubs: Stubs, name: str, request: Any) -> str:
    """A word for what the caller learns."""
    try:
        if name in ("Step", "KeepAlive"):
            with stubs.stream(name) as stream:
                reply = stream.run(request)
        else:
            reply = stubs.call(name, request)
    except Refused as refusal:
        return refusal.code.name
    if name == "Step":
        parts = [refused.code.name for refused in refusals(reply).values()]
        columns = (reply.free, reply.commit, reply.append)
        codes = [code for part in columns for code in part.result_codes]
        return " ".join(sorted({*parts, *(ResultCode(code).name for code in codes)}))
    if hasattr(reply, "result_codes"):
        return " ".join(sorted({ResultCode(code).name for code in reply.result_codes}))
    return "OK"


@pytest.mark.parametrize("in_session", [False, True])
def test_knowing_the_bytes_of_an_owner_gives_no_other_tenant_anything(
    running: RunningDaemon, as_tenant: As, in_session: bool
) -> None:
    mine, theirs = as_tenant("sharing-c"), as_tenant("sharing-d")  # the same namespace, even
    owner = None
    if in_session:
        owner = mine.call("OpenSession", session_pb2.OpenSessionRequest(ttl_s=60)).session_id
    peer = Peer(mine, owner)
    sequence_id = peer.allocate(PROMPT, request_id="mine").sequence_id
    compute(peer, sequence_id, 0, 9)
    before = snapshot(running.daemon.sequences)
    calls = named_calls(Peer(theirs, peer.owner), sequence_id)
    assert calls.keys() | NAMES_NOBODY >= {method.name for method in wire.methods()} - (
        set() if in_session else {"CloseSession", "KeepAlive"}
    )
    has_storage = mine.info().device != "none"
    for name, request in calls.items():
        found = outcome(theirs, name, request)
        unknown = {"NOT_FOUND"}
        if name in ("Prefill", "Decode") and not has_storage:
            unknown = {"FAILED_PRECONDITION"}
        if name in ("Commit", "Step") and has_storage:
            unknown |= {"FAILED_PRECONDITION"}  # Commit on a daemon with storage
        assert set(found.split()) <= unknown, (name, found)
        assert snapshot(running.daemon.sequences) == before, name
    assert peer.append(sequence_id, 9, [1]).code == ResultCode.OK


def test_two_tenants_that_choose_the_same_owner_are_two(as_tenant: As) -> None:
    owner = bytes(16)
    one, other = Peer(as_tenant("a"), owner), Peer(as_tenant("b"), owner)
    first = one.allocate(PROMPT, request_id="r").sequence_id
    second = other.allocate(PROMPT[:5], request_id="r").sequence_id
    assert first != second
    assert one.allocate(PROMPT, request_id="r").sequence_id == first
    assert other.free(first) == [ResultCode.NOT_FOUND]
    assert other.free(second) == [ResultCode.OK]
    assert one.free(first) == [ResultCode.OK]


def test_the_retry_key_of_a_session_is_its_tenants(as_tenant: As) -> None:
    request = session_pb2.OpenSessionRequest(ttl_s=60, request_id="r")
    first = as_tenant("a").call("OpenSession", request).session_id
    assert as_tenant("a").call("OpenSession", request).session_id == first
    other = session_pb2.OpenSessionRequest(ttl_s=50, request_id="r")
    assert as_tenant("b").call("OpenSession", other).session_id != first
    close = session_pb2.CloseSessionRequest(session_id=first)
    as_tenant("a").call("CloseSession", close)
    assert as_tenant("a").call("OpenSession", request).session_id != first


def test_an_allocate_in_another_tenants_session_is_refused(as_tenant: As) -> None:
    session = as_tenant("a").call("OpenSession", session_pb2.OpenSessionRequest(ttl_s=60))
    with pytest.raises(Refused) as refused:
        Peer(as_tenant("b"), session.session_id).allocate(PROMPT)
    assert refused.value.code is NOT_FOUND
    assert Peer(as_tenant("a"), session.session_id).allocate(PROMPT).sequence_id


def test_admins_see_the_sequences_and_sessions_of_all(
    running: RunningDaemon, as_tenant: As
) -> None:
    with running.daemon.sequences.lock:
        running.daemon.sequences.tenants.apply([TenantQuota("a", "a"), TenantQuota("b", "b")])
    for tenant in ("a", "b"):
        Peer(as_tenant(tenant)).allocate(PROMPT)
        as_tenant(tenant).call("OpenSession", session_pb2.OpenSessionRequest(ttl_s=60))
    ops = as_tenant("ops")
    sequences = ops.call("ListSequences", admin_pb2.ListSequencesRequest()).sequences
    assert [sequence.tenant for sequence in sequences] == ["a", "b"]
    sessions = ops.call("ListSessions", admin_pb2.ListSessionsRequest()).sessions
    assert [session.tenant for session in sessions] == ["a", "b"]


def test_a_refusal_for_want_of_room_names_nobody_elses_clients(
    running: RunningDaemon, as_tenant: As
) -> None:
    with running.daemon.sequences.lock:
        running.daemon.sequences.tenants.apply(
            [TenantQuota("a", "a"), TenantQuota("b", "b"), TenantQuota("sharing-d", "shared")]
        )
    opened = session_pb2.OpenSessionRequest(ttl_s=60, client_name="of tenant a")
    hog = Peer(as_tenant("a"), as_tenant("a").call("OpenSession", opened).session_id)
    hog.allocate(range(60 * SIZE))

    def refusal(tenant: str) -> str:
        with pytest.raises(Refused) as refused:
            Peer(as_tenant(tenant)).allocate(range(9000, 9000 + 5 * SIZE))
        assert refused.value.reason == "NO_ROOM"
        return f"{refused.value} {refused.value.numbers}"

    assert "of tenant a" in refusal("a")
    assert "of tenant a" not in refusal("b")
    assert "holder" not in refusal("b")


# ---- what a tenant can tell of another

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=10)
CALLS = st.lists(
    st.tuples(st.booleans(), st.sampled_from(["lookup", "fill", "grow"]), PROMPTS), max_size=20
)
ONE, OTHER = (Caller(name, name, frozenset({"client"})) for name in ("one", "other"))


def twin_of(request: Message) -> Any:
    return wire.twin(request.DESCRIPTOR.name).FromString(request.SerializeToString())


def view(service: CacheService, caller: Caller, name: str, prompt: list[int]) -> tuple[Any, ...]:
    """What one call tells its caller of the cache, ids aside."""
    if name == "lookup":
        request = cache_pb2.LookupRequest(token_ids=prompt, want_hashes=True)
        found = service.lookup(twin_of(request), caller)
        return (
            found.num_cached_tokens,
            found.num_cached_blocks,
            found.num_blocks_needed,
            list(found.block_hashes),
        )
    owner = bytes(16)
    start = prompt if name == "fill" else prompt[:1]
    request = twin_of(cache_pb2.AllocateRequest(owner=owner, token_ids=start))
    made = service.allocate(request, caller)
    done, codes = made.num_cached_tokens, []
    if len(prompt) > len(start):
        peer = Peer(None, owner)  # type: ignore[arg-type]  # it only makes the request
        rows = [Row(made.sequence_id, len(start), tuple(prompt[1:]))]
        codes.append(service.append(twin_of(peer.append_request(rows)), caller).result_codes)
    commit = cache_pb2.CommitRequest(
        owner=owner,
        sequence_ids=[made.sequence_id],
        start_positions=[done],
        num_computed_tokens=[len(prompt) - done],
    )
    codes.append(service.commit(twin_of(commit), caller).result_codes)
    free = cache_pb2.FreeRequest(owner=owner, sequence_ids=[made.sequence_id])
    codes.append(service.free(twin_of(free), caller).result_codes)
    return done, codes


@given(calls=CALLS, verify=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_tenant_sees_the_same_with_and_without_another(calls: Any, verify: bool) -> None:
    """Prompts of two tokens' kinds: without namespaces nearly every one of them would hit."""
    options = CacheOptions(256, 2, hash_seed=SEED, verify_hits=verify)
    both, alone = CacheService(Daemon(options)), CacheService(Daemon(options))
    for is_mine, name, prompt in calls:
        seen = view(both, ONE if is_mine else OTHER, name, prompt)
        if is_mine:
            assert view(alone, ONE, name, prompt) == seen


def test_that_test_would_notice_a_shared_namespace() -> None:
    both, alone = (CacheService(Daemon(CacheOptions(64, 2, hash_seed=SEED))) for _ in range(2))
    view(both, ANYONE, "fill", [1, 1, 1])
    seen = view(both, ANYONE, "lookup", [1, 1, 1])
    assert seen != view(alone, ANYONE, "lookup", [1, 1, 1])

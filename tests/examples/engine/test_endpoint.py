"""The HTTP endpoint answers in OpenAI's form, and what it answers is what the model says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from examples.engine.app import MAX_BODY_BYTES
from examples.engine.loop import Engine
from prefixcache.client import Client
from tests.examples.engine.endpoint import MODEL_NAME, Endpoint, served
from tests.examples.engine.held_engine import held_after
from tests.examples.engine.tiny_model import plain_answer
from tests.support.daemon import RunningDaemon
from tests.support.waiting import until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
HELLO_TEXT = "user: hello\nassistant:"


@pytest.fixture(scope="module")
def endpoint(folder: Path, running: RunningDaemon) -> Iterator[Endpoint]:
    with served(folder, running.target) as endpoint:
        yield endpoint


def joined(events: list[Any], index: int = 0) -> str:
    parts = [choice for event in events for choice in event["choices"]]
    return "".join(
        part["text"] if "text" in part else part["delta"].get("content", "")
        for part in parts
        if part["index"] == index
    )


def reasons(events: list[Any]) -> list[str]:
    parts = [choice for event in events for choice in event["choices"]]
    return [part["finish_reason"] for part in parts if part["finish_reason"] is not None]


# ---- answers


@pytest.mark.parametrize("prompt", ["a", "abc", "abcd", "a longer prompt, of several steps: é€"])
def test_a_completion_is_what_plain_transformers_generates(endpoint: Endpoint, prompt: str) -> None:
    reply = endpoint.complete(prompt, max_tokens=12)
    (choice,) = reply["choices"]
    assert choice["text"] == plain_answer(prompt, 12)
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert reply["object"] == "text_completion" and reply["model"] == MODEL_NAME
    assert reply["id"].startswith("cmpl-")
    num_prompt = len(prompt.encode())
    assert reply["usage"]["prompt_tokens"] == num_prompt
    assert reply["usage"]["completion_tokens"] == 12
    assert reply["usage"]["total_tokens"] == num_prompt + 12


def test_a_prompt_may_be_tokens(endpoint: Endpoint) -> None:
    reply = endpoint.complete(list(b"abc"), max_tokens=5)
    assert reply["choices"][0]["text"] == plain_answer("abc", 5)


def test_several_prompts_with_several_choices_each(endpoint: Endpoint) -> None:
    prompts = ["abcdefgh", "12", "xyz"]
    reply = endpoint.complete(prompts, max_tokens=3, n=2)
    wanted = [plain_answer(prompt, 3) for prompt in prompts for _ in range(2)]
    assert [choice["text"] for choice in reply["choices"]] == wanted
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    assert reply["usage"]["prompt_tokens"] == 13
    assert reply["usage"]["completion_tokens"] == 18


def test_a_second_request_finds_the_prompt_cached(endpoint: Endpoint) -> None:
    prompt = "one that nobody else asks, 35 bytes"
    for cached in (0, 32):
        usage = endpoint.complete(prompt, max_tokens=2, n=2)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached


def test_cached_tokens_are_those_of_all_prompts(endpoint: Endpoint) -> None:
    prompts = ["the first of two, 24 bytes", "its second, 16 by"]
    for cached in (0, 24 + 16):
        usage = endpoint.complete(prompts, max_tokens=2, n=2)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == cached


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_salt_keeps_cached_prompts_apart(endpoint: Endpoint, path: str) -> None:
    text = "a prompt of which nobody else knows a word"
    body = (
        {"prompt": text} if path == COMPLETIONS else {"messages": [{**HELLO[0], "content": text}]}
    )
    for salt, is_cached in (("a", False), ("b", False), ("a", True), ("b", True)):
        reply = endpoint.post(path, {**body, "cache_salt": salt, "max_tokens": 2})[1]
        assert bool(reply["usage"]["prompt_tokens_details"]["cached_tokens"]) is is_cached


def test_max_tokens_is_16_for_a_completion(endpoint: Endpoint) -> None:
    assert endpoint.complete("abc")["usage"]["completion_tokens"] == 16


def test_a_chat_is_what_plain_transformers_makes_of_its_template(endpoint: Endpoint) -> None:
    body = {"model": MODEL_NAME, "messages": HELLO, "temperature": 0, "max_completion_tokens": 9}
    status, reply = endpoint.post(CHAT, body)
    assert status == 200
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": plain_answer(HELLO_TEXT, 9)}
    assert reply["object"] == "chat.completion" and reply["id"].startswith("chatcmpl-")
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    body["messages"] = [{"role": "user", "content": parts}]
    assert endpoint.post(CHAT, body)[1]["choices"][0]["message"] == choice["message"]


def test_a_chat_goes_on_for_as_long_as_there_is_room(endpoint: Endpoint) -> None:
    """Up to the model's 256 tokens, or its end."""
    body = {"model": MODEL_NAME, "messages": HELLO, "temperature": 0}
    (choice,) = endpoint.post(CHAT, body)[1]["choices"]
    assert choice["message"]["content"] == plain_answer(HELLO_TEXT, 256 - len(HELLO_TEXT))


@pytest.mark.parametrize("stop_at", [0, 3, 7])
def test_a_stop_text_ends_the_answer(endpoint: Endpoint, stop_at: int) -> None:
    prompt = "stop here"
    whole = plain_answer(prompt, 12)
    stop = whole[stop_at : stop_at + 2]
    (choice,) = endpoint.complete(prompt, max_tokens=12, stop=stop)["choices"]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"


def test_the_same_seed_gives_the_same_answer_and_choices_differ(endpoint: Endpoint) -> None:
    asked = {"max_tokens": 20, "temperature": 1.0, "n": 3, "seed": 7}
    texts = [
        [choice["text"] for choice in endpoint.complete("seeded", **asked)["choices"]]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


def test_a_top_p_of_0_leaves_the_most_likely_token(endpoint: Endpoint) -> None:
    (choice,) = endpoint.complete("top p", max_tokens=9, temperature=2.0, top_p=0)["choices"]
    assert choice["text"] == plain_answer("top p", 9)


# ---- streams


def test_a_completion_in_parts(endpoint: Endpoint) -> None:
    body = {"model": MODEL_NAME, "prompt": ["stream", "é"], "temperature": 0, "max_tokens": 9}
    events = list(endpoint.stream(COMPLETIONS, body))
    assert [joined(events, index) for index in (0, 1)] == [
        plain_answer("stream", 9),
        plain_answer("é", 9),
    ]
    assert reasons(events) == ["length", "length"]
    assert len({event["id"] for event in events}) == 1
    assert all(event["object"] == "text_completion" for event in events)
    assert not any("usage" in event for event in events)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_says_why_it_ends_also_if_no_text_is_left(endpoint: Endpoint, path: str) -> None:
    whole = plain_answer(HELLO_TEXT, 12)
    body = {"prompt": HELLO_TEXT} if path == COMPLETIONS else {"messages": HELLO}
    events = list(endpoint.stream(path, {**body, "temperature": 0, "stop": whole[5:7]}))
    assert joined(events) == whole[: whole.index(whole[5:7])]
    assert reasons(events) == ["stop"]


def test_a_chat_in_parts_with_its_usage(endpoint: Endpoint) -> None:
    body = {
        "model": MODEL_NAME,
        "messages": HELLO,
        "temperature": 0,
        "max_tokens": 9,
        "n": 2,
        "stream_options": {"include_usage": True},
    }
    *events, last = endpoint.stream(CHAT, body)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [joined(events, index) for index in (0, 1)] == [plain_answer(HELLO_TEXT, 9)] * 2
    assert reasons(events) == ["length", "length"]
    assert all(event["object"] == "chat.completion.chunk" for event in events)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 18
    assert last["usage"]["prompt_tokens"] == len(HELLO_TEXT)


def test_parts_come_while_the_answer_is_computed(endpoint: Endpoint) -> None:
    body = {"model": MODEL_NAME, "prompt": "parts", "temperature": 0, "max_tokens": 40}
    events = list(endpoint.stream(COMPLETIONS, body))
    assert len(events) > 20


# ---- callers that go


@pytest.mark.parametrize("is_stream", [True, False])
def test_what_a_caller_has_dropped_is_freed(
    endpoint: Endpoint, running: RunningDaemon, is_stream: bool
) -> None:
    engine = endpoint.engine
    assert engine is not None
    before = engine.counters.output_tokens
    body = {
        "model": MODEL_NAME,
        "prompt": "dropped",
        "temperature": 0,
        "max_tokens": 240,
        "n": 2,
        "stream": is_stream,
        "logit_bias": {},
    }

    def all_are_gone() -> bool:
        return all(request.caller.is_gone for request in engine.scheduler.running)

    with held_after(engine, 30, all_are_gone):
        if is_stream:
            with endpoint.opened(COMPLETIONS, body) as response:
                response.readline()
        else:
            drop_before_the_reply(engine, endpoint.port, body)
        until(lambda: engine.scheduler.is_idle)
    with Client(running.target) as client:
        assert client.stats().referenced == 0
    assert engine.counters.output_tokens - before < 2 * 240


def drop_before_the_reply(engine: Engine, port: int, body: Any) -> None:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", COMPLETIONS, json.dumps(body))
    until(lambda: engine.scheduler.running)
    connection.close()


# ---- models, health, errors


def test_the_model_is_listed(endpoint: Endpoint) -> None:
    status, reply = endpoint.get("/v1/models")
    assert status == 200 and reply["object"] == "list"
    (card,) = reply["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL_NAME, "model", 256)
    assert endpoint.get(f"/v1/models/{MODEL_NAME}") == (200, card)


def test_health_counts(endpoint: Endpoint) -> None:
    before = endpoint.get("/health")[1]
    usage = endpoint.complete("counted, and found by nobody", max_tokens=3)["usage"]
    status, after = endpoint.get("/health")
    assert status == 200 and after["status"] == "ok"
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    computed = usage["prompt_tokens"] - cached
    assert after["computed_prompt_tokens"] - before["computed_prompt_tokens"] == computed
    assert after["computed_tokens"] - before["computed_tokens"] == computed + 2
    assert after["output_tokens"] - before["output_tokens"] == 3


VALID: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "a"},
    CHAT: {"messages": HELLO},
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 257}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": 0.5}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [1]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"other": True}}, "other"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"tools": [{}]}, "tools"),
        ({"something": 1}, "something"),
        ({"cache_salt": 1}, "cache_salt"),
        ({"model": 5}, "model"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_name(
    endpoint: Endpoint, path: str, fields: dict[str, Any], param: str
) -> None:
    status, reply = endpoint.post(path, {"model": MODEL_NAME, **VALID[path], **fields})
    assert (status, reply["error"]["param"]) == (400, param)
    assert reply["error"]["type"] == "invalid_request_error"
    assert reply["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {}),
        (COMPLETIONS, {"prompt": ""}),
        (COMPLETIONS, {"prompt": []}),
        (COMPLETIONS, {"prompt": [""]}),
        (COMPLETIONS, {"prompt": [257]}),
        (COMPLETIONS, {"prompt": [-1]}),
        (COMPLETIONS, {"prompt": [True]}),
        (COMPLETIONS, {"prompt": [1, "a"]}),
        (COMPLETIONS, {"prompt": [["a"]]}),
        (COMPLETIONS, {"prompt": 5}),
        (COMPLETIONS, {"prompt": ["a"] * 257}),
        (CHAT, {}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": ["hello"]}),
        (CHAT, {"messages": [{"role": "user"}]}),
        (CHAT, {"messages": [{"content": "hello"}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ],
)
def test_a_prompt_that_is_none_is_refused(
    endpoint: Endpoint, path: str, fields: dict[str, Any]
) -> None:
    status, reply = endpoint.post(path, {"model": MODEL_NAME, **fields})
    assert status == 400, reply
    assert reply["error"]["param"] in {"prompt", "messages"}


def test_a_prompt_that_is_too_long_says_so(endpoint: Endpoint) -> None:
    status, reply = endpoint.post(COMPLETIONS, {"prompt": "a" * 250, "max_tokens": 7})
    assert (status, reply["error"]["code"]) == (400, "context_length_exceeded")
    assert endpoint.complete("a" * 250, max_tokens=6)["usage"]["total_tokens"] == 256


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b"\xff", b'{"prompt": "\\ud800"}', b"[" * 100_000],
    ids=range(7),
)
def test_a_body_that_is_no_json_object_is_refused(endpoint: Endpoint, body: bytes) -> None:
    status, reply = endpoint.post(COMPLETIONS, body)
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error")


def test_what_is_not_there_is_not_found(endpoint: Endpoint) -> None:
    status, reply = endpoint.post(COMPLETIONS, {"model": "other", "prompt": "a"})
    assert (status, reply["error"]["code"]) == (404, "model_not_found")
    assert endpoint.get("/v1/models/other")[0] == 404
    status, reply = endpoint.get("/v1/nothing")
    assert (status, reply["error"]["type"]) == (404, "invalid_request_error")
    assert endpoint.get(COMPLETIONS)[0] == 405


def test_a_body_that_is_too_large_is_refused(endpoint: Endpoint) -> None:
    status, reply = endpoint.post(COMPLETIONS, {"prompt": "a" * (MAX_BODY_BYTES + 1)})
    assert (status, reply["error"]["type"]) == (413, "invalid_request_error")

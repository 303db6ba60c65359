"""`traceparent` as W3C Trace Context has it: what is not valid is as if it were not there."""

from __future__ import annotations

import pytest

from prefixcache.server.trace_context import TraceContext, trace_context_of

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{SPAN}-01"


def test_the_callers_span_is_read() -> None:
    metadata = [("user-agent", "x"), ("traceparent", VALID)]
    assert trace_context_of(metadata) == TraceContext(TRACE, SPAN, 1)


@pytest.mark.parametrize("flags", ["00", "01", "03", "ff"])
def test_all_flags_are_handed_on(flags: str) -> None:
    found = trace_context_of([("traceparent", f"00-{TRACE}-{SPAN}-{flags}")])
    assert found is not None
    assert found.flags == int(flags, 16)


def test_several_states_are_one_list() -> None:
    metadata = [("traceparent", VALID), ("tracestate", "a=1"), ("tracestate", "b=2")]
    found = trace_context_of(metadata)
    assert found is not None
    assert found.state == "a=1,b=2"


@pytest.mark.parametrize("text", [f"01-{TRACE}-{SPAN}-01", f"01-{TRACE}-{SPAN}-01-more"])
def test_later_versions_are_read_as_this_one_and_may_have_more(text: str) -> None:
    assert trace_context_of([("traceparent", text)]) == TraceContext(TRACE, SPAN, 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        VALID.upper(),
        VALID[:-1],
        f"{VALID}0",
        f"{VALID}-more",
        f"{VALID}\n",
        f" {VALID}",
        f"ff-{TRACE}-{SPAN}-01",
        f"0-{TRACE}-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01.more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        f"00-{TRACE}{SPAN}-01",
        "\u0660\u0660-" + VALID[3:],
    ],
)
def test_an_invalid_one_is_ignored(text: str) -> None:
    assert trace_context_of([("traceparent", text)]) is None


def test_two_of_them_and_bytes_are_ignored() -> None:
    assert trace_context_of([("traceparent", VALID), ("traceparent", VALID)]) is None
    assert trace_context_of([("traceparent", VALID.encode())]) is None


def test_without_one_a_state_means_nothing() -> None:
    assert trace_context_of([("tracestate", "a=1")]) is None

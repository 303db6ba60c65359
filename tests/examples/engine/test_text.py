"""Text comes as soon as it is certain, and not before; a stop text ends it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from examples.engine.text import TextStream


def utf8(tokens: Sequence[int]) -> str:
    """A token is a byte."""
    return bytes(tokens).decode(errors="replace")


def words(tokens: Sequence[int]) -> str:
    """The first word has no space before it, whichever it is, as with SentencePiece."""
    return " ".join(["one", "two", "three"][token] for token in tokens)


def pieces(text: bytes, stop: Sequence[str] = ()) -> tuple[list[str], bool]:
    stream = TextStream(utf8, stop)
    found = []
    for byte in text:
        found.append(stream.push(byte))
        if stream.is_stopped:
            break
    return [*found, stream.finish()], stream.is_stopped


def test_each_token_gives_its_text() -> None:
    assert pieces(b"abc") == (["a", "b", "c", ""], False)


def test_a_character_comes_when_its_last_byte_does() -> None:
    assert pieces("aé€b".encode()) == (["a", "", "é", "", "", "€", "b", ""], False)


def test_an_unfinished_character_comes_at_the_end() -> None:
    assert pieces("a€".encode()[:3]) == (["a", "", "", "\N{REPLACEMENT CHARACTER}"], False)


def test_a_space_that_hangs_on_the_token_before_is_kept() -> None:
    stream = TextStream(words)
    assert [stream.push(token) for token in (0, 1, 2, 2)] == ["one", " two", " three", " three"]


@pytest.mark.parametrize(
    ("text", "stop", "wanted"),
    [
        (b"one END two", ["END"], "one "),
        (b"ENDone", ["END"], ""),
        (b"aaab", ["aab"], "a"),
        (b"xxyz", ["yz", "xy"], "x"),
        (b"one\n\ntwo", ["\n\n", "two"], "one"),
    ],
)
def test_a_stop_text_ends_it(text: bytes, stop: list[str], wanted: str) -> None:
    found, is_stopped = pieces(text, stop)
    assert ("".join(found), is_stopped) == (wanted, True)


@pytest.mark.parametrize("text", [b"one EN", b"ENENE", b"", b"E"])
def test_a_beginning_of_a_stop_text_is_text(text: bytes) -> None:
    found, is_stopped = pieces(text, ["END"])
    assert ("".join(found), is_stopped) == (text.decode(), False)


def test_nothing_of_a_stop_text_is_released_before_it_is_whole() -> None:
    assert pieces(b"aENDb", ["END"])[0] == ["a", "", "", "", ""]
    assert pieces(b"aENx", ["END"])[0] == ["a", "", "", "ENx", ""]


def test_the_first_of_several_stop_texts_counts() -> None:
    stream = TextStream(
        lambda tokens: "".join("a STOP b END"[:12] for _ in tokens), ["END", "STOP"]
    )
    assert stream.push(0) == "a "
    assert stream.is_stopped

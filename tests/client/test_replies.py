"""The replies of a stream whose end gRPC does not tell to who waits for the first of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from prefixcache.client.sync_replies import Replies


class Stuck(grpc.RpcError):
    """A call that has ended, and whose reader waits on."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code
        self.is_over = threading.Event()

    def is_active(self) -> bool:
        return False

    def code(self) -> grpc.StatusCode:
        return self._code

    def __next__(self) -> Any:
        self.is_over.wait()
        raise self


@pytest.fixture(params=[grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK], ids=lambda c: c.name)
def stuck(request: pytest.FixtureRequest) -> Iterator[Stuck]:
    stream = Stuck(request.param)
    yield stream
    stream.is_over.set()


def test_a_reader_hears_of_an_end_that_grpc_keeps_from_it(stuck: Stuck) -> None:
    replies = Replies(stuck)
    with pytest.raises((grpc.RpcError, StopIteration)) as caught:
        replies.next()
    if stuck.code() is grpc.StatusCode.OK:
        assert caught.type is StopIteration
    else:
        assert caught.value is stuck


def test_what_comes_is_given_in_its_order() -> None:
    class Stream(Iterator[int]):
        def __init__(self) -> None:
            self._numbers = iter(range(3))

        def is_active(self) -> bool:
            return True

        def __next__(self) -> int:
            return next(self._numbers)

    replies = Replies(Stream())
    assert [replies.next() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(StopIteration):
        replies.next()

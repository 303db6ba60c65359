"""The tensors of one call: in its messages, or in an arena of its caller's."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from prefixcache.errors import ArenaLostError, InvalidArgumentError
from prefixcache.rpc import codec
from prefixcache.server.arenas import Arenas
from prefixcache.server.callers import Caller
from prefixcache.storage.layout import DTYPE_BYTES
from prefixcache.types import HostTensor

_REPEAT = "grpc-previous-rpc-attempts"
"""Metadata that gRPC adds to a call that it sends again."""


class CallTensors:
    """context: of the call."""

    def __init__(self, arenas: Arenas, caller: Caller, context: grpc.ServicerContext) -> None:
        self._arenas, self._caller, self._context = arenas, caller, context
        self._used: list[tuple[str, Any]] = []
        """Fields whose elements are in an arena, and their spans."""

    def read(self, message: Any, field: str) -> HostTensor:
        """message: a Tensor. Raises InvalidArgumentError, or ArenaLostError."""
        if not message.HasField("arena"):
            return codec.tensor_from_wire(message, field)
        if message.data:
            raise InvalidArgumentError(f"{field}.data", "is given, and a place in an arena too")
        dtype, shape, num_bytes = codec.tensor_type_from_wire(message, field)
        span = message.arena
        if span.num_bytes != num_bytes:
            raise InvalidArgumentError(
                f"{field}.arena.num_bytes",
                f"is {span.num_bytes}, {dtype} {list(shape)} needs {num_bytes}",
            )
        memory = self._memory(span, f"{field}.arena", DTYPE_BYTES[dtype])
        self._used.append((field, span))
        return HostTensor(dtype, shape, memory.data)

    def place_of_output(self, request: Any, q: HostTensor) -> npt.NDArray[np.uint8] | None:
        """After q, k and v have been read; None if the output goes into the reply.

        Raises InvalidArgumentError, or ArenaLostError.
        """
        if not request.HasField("out"):
            return None
        memory = self._memory(request.out, "out", DTYPE_BYTES[q.dtype])
        for field, span in self._used:
            if _overlap(span, request.out):
                raise InvalidArgumentError("out.offset", f"is where {field} is")
        return memory

    def reply(self, response: Any, request: Any, out: HostTensor) -> Any:
        """response: class of the message, whose field `out` is a Tensor."""
        if not request.HasField("out"):
            return codec.TensorReply(response.OUT_FIELD_NUMBER, out)
        message = response()
        codec.set_tensor_type(message.out, out.dtype, out.shape)
        span = message.out.arena
        span.arena_id, span.offset = request.out.arena_id, request.out.offset
        span.num_bytes = request.out.num_bytes
        return message

    @cached_property
    def _is_repeat(self) -> bool:
        return any(key == _REPEAT for key, _ in self._context.invocation_metadata())

    def _memory(self, span: Any, field: str, itemsize: int) -> npt.NDArray[np.uint8]:
        if self._is_repeat:
            raise ArenaLostError("gRPC repeats the call, and the first may be at work there")
        if span.offset % itemsize:
            problem = f"is {span.offset}, must be a multiple of {itemsize}"
            raise InvalidArgumentError(f"{field}.offset", problem)
        try:
            return self._arenas.bytes_at(
                span.arena_id, span.offset, span.num_bytes, self._caller.tenant
            )
        except ValueError as error:
            raise InvalidArgumentError(f"{field}.offset", str(error)) from None


def _overlap(one: Any, other: Any) -> bool:
    return bool(
        one.arena_id == other.arena_id
        and one.offset < other.offset + other.num_bytes
        and other.offset < one.offset + one.num_bytes
    )

"""AttentionService: check, convert, one call of the engine, reply. Requests are twins."""

from __future__ import annotations

from typing import Any

import grpc

from prefixcache.errors import InvalidArgumentError, NoStorageError
from prefixcache.rpc import codec
from prefixcache.rpc._pb import attention_pb2
from prefixcache.server import checks
from prefixcache.server.callers import Caller
from prefixcache.server.daemon import Daemon
from prefixcache.server.tensors import CallTensors


class AttentionService:
    def __init__(self, daemon: Daemon) -> None:
        self._engine = daemon.engine
        self._arenas = daemon.arenas
        self._max_tokens = daemon.info.limits.max_tokens_per_call
        self._max_rows = daemon.info.limits.max_rows_per_call

    def prefill(self, request: Any, caller: Caller, context: grpc.ServicerContext) -> Any:
        if self._engine is None:
            raise NoStorageError
        tensors = CallTensors(self._arenas, caller, context)
        out = self._engine.prefill(*self._arguments(request, caller, tensors))
        return tensors.reply(attention_pb2.PrefillResponse, request, out)

    def decode(self, request: Any, caller: Caller, context: grpc.ServicerContext) -> Any:
        if self._engine is None:
            raise NoStorageError
        tensors = CallTensors(self._arenas, caller, context)
        out = self._engine.decode(*self._arguments(request, caller, tensors))
        return tensors.reply(attention_pb2.DecodeResponse, request, out)

    def _arguments(self, request: Any, caller: Caller, tensors: CallTensors) -> Any:
        batch = request.batch
        owner = checks.owner(batch.owner, caller)
        columns = checks.rows(batch, "start_positions", "num_tokens", self._max_rows).lists()
        if 0 in columns[2]:
            raise InvalidArgumentError("num_tokens", "is 0 in some row")
        checks.num_tokens(sum(columns[2]), "num_tokens", self._max_tokens)
        q = tensors.read(request.q, "q")
        k = tensors.read(request.k, "k")
        v = tensors.read(request.v, "v") if request.HasField("v") else None
        out = tensors.place_of_output(request, q)
        options = codec.options_from_wire(batch)
        return owner, batch.layer, columns, (q, k, v), options, checks.order(batch), out

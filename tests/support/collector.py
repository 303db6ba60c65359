"""A collector of OpenTelemetry spans: a real OTLP server on a free port."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.support.waiting import until


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """`spans` are protobuf messages; `attributes_of` reads theirs."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        for group in request.resource_spans:
            self.resources.append(_plain(group.resource.attributes))
            for scope in group.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Any]:
        """Spans whose name ends so, in the order of their ends."""
        return [span for span in self.spans if span.name.endswith(name)]

    def wait_for(self, name: str, count: int = 1) -> list[Any]:
        until(lambda: len(self.named(name)) >= count)
        return self.named(name)


def attributes_of(span: Any) -> dict[str, Any]:
    return _plain(span.attributes)


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None)


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(part) for part in value.array_value.values]
    return getattr(value, kind)

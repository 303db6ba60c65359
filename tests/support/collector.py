"""A collector of OpenTelemetry spans: a real OTLP server on a free port, over gRPC or HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """`spans` are protobuf messages; `attributes_of` reads theirs."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self.take(request)

    def take(self, request: Any) -> Any:
        for group in request.resource_spans:
            self.resources.append(_plain(group.resource.attributes))
            for scope in group.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Any]:
        """Spans whose name ends so, in the order of their ends."""
        return [span for span in self.spans if span.name.endswith(name)]


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


@contextmanager
def collecting_over_http() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if self.path != "/v1/traces":
                self.send_error(404)
                return
            data = self.rfile.read(int(self.headers["content-length"]))
            request = trace_service_pb2.ExportTraceServiceRequest.FromString(data)
            reply = collector.take(request).SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.endpoint = f"http://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield collector
        finally:
            server.shutdown()
            serving.join()


def _plain(attributes: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(part) for part in value.array_value.values]
    return getattr(value, kind)

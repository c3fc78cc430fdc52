"""Spans at a collector, as OpenTelemetry's own messages say what they are."""

from __future__ import annotations

import gzip
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import fw
from server import batch_calls as calls
from serving import Server, serving, until

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector():
    """An address, and the spans that have come there."""
    spans = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            asked = trace_service.ExportTraceServiceRequest.FromString(body)
            for group in asked.resource_spans:
                about = {each.key: value(each.value) for each in group.resource.attributes}
                spans.extend((about, span) for scope in group.scope_spans for span in scope.spans)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *words):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        server.shutdown()
        thread.join()


def value(any_value):
    kind = any_value.WhichOneof("value")
    return [value(each) for each in any_value.array_value.values] if kind == "array_value" else getattr(any_value, kind)


def test_a_span_for_each_request_none_lost_at_the_end(directory, collector):
    address, spans = collector
    with serving(directory, "inference.dtype=fp32", f"serve.traces={address}") as server, server.client() as http:
        asked = {"prompt": "a secret", "max_tokens": 3, "ignore_eos": True, "stream": True, "model": directory.name}
        carried = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert http.post("/v1/completions", json=asked, headers=carried).status_code == 200
        assert http.post("/v1/completions", json={**asked, "stream": False}).status_code == 200
        assert http.post("/v1/completions", json={"prompt": 3}).status_code == 400
        assert http.get("/health").status_code == 200
        (line,) = until(lambda: [each for each in server.log if each.get("trace_id") == TRACE])
        assert line["completion_tokens"] == 3
    assert [span.name for _, span in spans] == ["POST /v1/completions"] * 3
    (about, first), (_, second), (_, wrong) = spans
    assert about["service.name"] == "fw" and about["service.version"] == fw.__version__
    assert first.trace_id.hex() == TRACE and first.parent_span_id.hex() == PARENT and first.kind == first.SPAN_KIND_SERVER
    assert second.trace_id.hex() != TRACE and not second.parent_span_id
    found = {each.key: value(each.value) for each in first.attributes}
    assert 0 < found.pop("gen_ai.response.time_to_first_chunk") < (first.end_time_unix_nano - first.start_time_unix_nano) / 1e9
    assert found.pop("http.response.header.x-request-id") == [line["id"]]
    assert found == {
        "http.request.method": "POST",
        "url.path": "/v1/completions",
        "http.response.status_code": 200,
        "gen_ai.request.model": directory.name,
        "gen_ai.usage.input_tokens": len("a secret"),
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ["length"],
    }
    assert {each.key: value(each.value) for each in wrong.attributes}["http.response.status_code"] == 400
    assert not any(b"secret" in span.SerializeToString() for _, span in spans)


def test_lines_of_batches_and_what_is_in_no_log(directory, collector):
    address, spans = collector
    with serving(directory, "inference.dtype=fp32", f"serve.traces={address}", "serve.log=none") as server, server.client() as http:
        asked = {"prompt": "a secret", "max_tokens": 2, "ignore_eos": True}
        id = http.post("/v1/completions", json=asked, headers={"X-Request-Id": "mine"}).headers["x-request-id"]
        client = server.openai()
        batch = calls.ended(client, calls.create(client, [calls.line(1, **asked), calls.line(2, prompt=[])]))
        answers = calls.answers(client, batch)
    found = [(span.name, {each.key: value(each.value) for each in span.attributes}) for _, span in spans]
    by_id = {of["http.response.header.x-request-id"][0]: of for name, of in found if name == "POST /v1/completions"}
    assert id == "mine" and len(by_id) == 3 and "fw.batch.id" not in by_id[id]
    assert by_id[id]["gen_ai.usage.output_tokens"] == 2
    for number, status in ((1, 200), (2, 400)):
        told = answers[f"line {number}"]["response"]
        of = by_id[told["request_id"]]
        assert of["fw.batch.id"] == batch.id and of["http.response.status_code"] == told["status_code"] == status
        assert of.get("gen_ai.usage.output_tokens") == (2 if status == 200 else None)
    assert not [line for line in server.errors if line.startswith("{")]


def test_a_collector_that_is_not_there_holds_up_nobody(directory):
    server = Server(directory, "inference.dtype=fp32", "serve.traces=http://127.0.0.1:9/v1/traces")
    try:
        with server.client() as http:
            assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
        server.terminate()
        assert server.ended() == 0
        assert any(line["event"] == "log" and "opentelemetry" in line["logger"] for line in server.log), "it is said, as a line"
    finally:
        server.process.kill()


def test_what_sends_them_is_not_installed(directory, monkeypatch):
    from fw.errors import UserError
    from fw.server.traces import Traces

    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(UserError, match=r"pip install 'fw\[traces\]'"):
        Traces("http://127.0.0.1:9")

"""OTLP in, over the wire: the real anthropic client's spans, Claude Code's records, refusals, secrets."""

import asyncio
import contextlib
import gzip
import http.client
import json
import math
import time

import pytest

from opusmon.channels import REQUEST, STATUS
from opusmon.clock import NS, SystemClock
from opusmon.collectors.otlp import OtlpCollector, OtlpUnavailable, collector, receiver
from opusmon.schema import StringTable

from .canary_server import delta, good, serving, start

CLOCK = SystemClock()


class Running:
    """A collector in this loop, with the rows that it gave out."""

    def __init__(self, source):
        self.source, self.rows, self.status = source, [], []
        self.came = asyncio.Condition()

    @property
    def port(self):
        return int(self.source.address.rpartition(":")[2])

    async def read(self):
        async with contextlib.aclosing(self.source.batches()) as batches:
            async for batch in batches:
                async with self.came:
                    if batch.channel is REQUEST:
                        self.rows += [self.words(row, REQUEST) for row in batch.rows]
                    elif batch.channel is STATUS:
                        self.status += [self.words(row, STATUS) for row in batch.rows]
                    self.came.notify_all()

    def words(self, row, channel):
        text = {field.name for field in channel.fields if field.text}
        strings = self.source.strings
        return {name: strings.text(row[name]) if name in text else row[name] for name in row.dtype.names}

    async def until(self, condition):
        async with asyncio.timeout(15), self.came:
            await self.came.wait_for(lambda: condition(self))

    async def post(self, path, body, kind="application/json", method="POST", **headers):
        """Status, headers and body of the answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        words = {"Content-Type": kind, **{name.replace("_", "-"): value for name, value in headers.items()}}
        return await asyncio.to_thread(self._post, path, data, method, words)

    def _post(self, path, data, method, headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, path, data, headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()


@contextlib.asynccontextmanager
async def running(listen="127.0.0.1:0", interval_ns=250_000_000, hold_s=0.25):
    one = Running(OtlpCollector(StringTable(), CLOCK, interval_ns, listen=listen, hold_s=hold_s))
    task = asyncio.create_task(one.read())
    try:
        await one.until(lambda one: one.status or task.done())
        yield one
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# The real client


@contextlib.contextmanager
def exporting(port, compression):
    """The OpenTelemetry SDK as an application sets it up, with its real HTTP/protobuf exporter."""
    export = pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    from opentelemetry.exporter.otlp.proto.http import Compression
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = export.OTLPSpanExporter(
        f"http://127.0.0.1:{port}/v1/traces", compression=Compression(compression)
    )
    provider = TracerProvider(resource=Resource({"user.email": "planted@example.com"}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield provider
    finally:
        provider.shutdown()


async def call(url, provider, stream=True, retries=0, **words):
    """One call as an application makes it, content recorded; how it failed, or None."""
    import anthropic

    telemetry = {"tracer_provider": provider, "traces": {"content_mode": "content"}}
    async with anthropic.AsyncAnthropic(
        api_key="sk-planted", base_url=url, max_retries=retries, open_telemetry=telemetry, **words
    ) as client:
        try:
            answer = await client.messages.create(
                model="m",
                max_tokens=5,
                stream=stream,
                messages=[{"role": "user", "content": "prompt-planted"}],
            )
            if stream:
                async for _ in answer:
                    pass
        except Exception as error:
            return error
    return None


def scripted(*bodies, finish=True):
    async def answer(seen, out):
        await out.head(request_id="req_1")
        for n, body in enumerate(bodies):
            await out.event(str(n), body)
        if finish:
            await out.end()
        else:
            out.cut()

    return answer


def refusing(status, kind="overloaded_error"):
    async def answer(seen, out):
        await out.plain(status, {"type": "error", "error": {"type": kind, "message": "planted"}})

    return answer


async def after_one_529(seen, out):
    if "1" in seen.headers["x-stainless-retry-count"]:
        await good(seen, out)
    else:
        await refusing(529)(seen, out)


async def silent(seen, out):
    await asyncio.sleep(60)


OVERLOADED = {"type": "error", "error": {"type": "overloaded_error", "message": "planted"}}
CASES = [
    (lambda seen, out: good(seen, out, pause_s=0.05), {}, ("ok", "", 200)),
    (after_one_529, {"retries": 1}, ("ok", "", 200)),
    (scripted(start(), delta(), OVERLOADED), {}, ("stream_error_event", "overloaded_error", 200)),
    (scripted(start(), delta()), {}, ("truncated", "api_error", 200)),
    (scripted(start(), delta(), finish=False), {}, ("truncated", "connection_error", 200)),
    (refusing(529), {}, ("upstream_http_error", "overloaded_error", 529)),
    (silent, {"timeout": 0.2}, ("timeout", "client_timeout_error", None)),
]


@pytest.mark.parametrize("compression", ["none", "gzip"])
async def test_the_real_clients_spans_become_rows(compression):
    async with running() as one:
        expected, times = [], []
        with exporting(one.port, compression) as provider:
            for answer, words, outcome in CASES:
                async with serving(answer) as server:
                    before = CLOCK.now()
                    await call(server.url, provider, **words)
                    times.append((before, CLOCK.now(), server.seen[-1].wrote))
                expected.append(outcome)
            assert await asyncio.to_thread(provider.force_flush, 5000)
            await one.until(lambda one: len(one.rows) == len(CASES))
        texts = "\n".join(text for _, text in one.source.strings.since(0))
    rows = sorted(one.rows, key=lambda row: row["t"])
    got = [
        (row["outcome"], row["error"], None if math.isnan(row["status"]) else row["status"]) for row in rows
    ]
    assert got == expected
    assert {row["source"] for row in rows} == {"otlp"}
    assert {row["start"] for row in rows} == {"API call, retries included"}
    for row, (before, after, _) in zip(rows, times, strict=True):
        # The exporter has the wall clock's times; on the session's clock they must lie within the call.
        assert before - 2_000_000 <= row["t"] - row["e2e_ns"] <= row["t"] <= after + 2_000_000
    first, retried = rows[0], rows[1]
    wrote = times[0][2]
    ttft_at = first["t"] - first["e2e_ns"] + first["ttft_ns"]
    assert wrote["token0"] - 2_000_000 <= ttft_at <= wrote["token1"] + 2_000_000
    assert (first["input_tokens"], first["output_tokens"], first["stop"]) == (10, 3, "end_turn")
    assert (first["streaming"], first["retry"], retried["retry"]) == (1, 0, 1)
    assert (
        retried["ttft_ns"] > 0.3e9
    )  # the wait before the second attempt counts: the clock starts at the call
    assert "planted" not in texts


async def test_a_whole_answer_has_no_first_token():
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m-1",
        "content": [{"type": "text", "text": "planted"}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 5, "cache_read_input_tokens": 7, "output_tokens": 2},
    }

    async def answer(seen, out):
        await out.plain(200, message, request_id="req_9")

    async with running() as one:
        with exporting(one.port, "none") as provider:
            async with serving(answer) as server:
                await call(server.url, provider, stream=False)
            await asyncio.to_thread(provider.force_flush, 5000)
            await one.until(lambda one: one.rows)
    row = one.rows[0]
    assert (row["streaming"], row["outcome"], row["model"], row["id"]) == (0, "ok", "m-1", "req_9")
    assert (row["input_tokens"], row["cache_read_tokens"], row["output_tokens"]) == (12, 7, 2)
    assert math.isnan(row["ttft_ns"])


# Claude Code


def value(one):
    kinds = {bool: "boolValue", int: "intValue", float: "doubleValue", str: "stringValue"}
    return {kinds[type(one)]: str(one) if type(one) is int else one}


def pairs(attributes):
    return [{"key": name.replace("__", "."), "value": value(one)} for name, one in attributes.items()]


PERSON = {"user__email": "planted@example.com", "user__id": "planted-id", "session__id": "planted-session"}


def logs(*events, scope="com.anthropic.claude_code.events", t=None):
    at = str(time.time_ns() if t is None else t)
    records = [
        {"timeUnixNano": at, "body": {"stringValue": name}, "attributes": pairs({**PERSON, **attributes})}
        for name, attributes in events
    ]
    resource = {"attributes": pairs({"service__name": "claude-code", **PERSON})}
    return {
        "resourceLogs": [
            {"resource": resource, "scopeLogs": [{"scope": {"name": scope}, "logRecords": records}]}
        ]
    }


def span(name, took_ms, t=None, status=None, **attributes):
    ended = time.time_ns() if t is None else t
    record = {
        "traceId": "0" * 32,
        "spanId": "0" * 16,
        "name": name,
        "startTimeUnixNano": str(ended - took_ms * 1_000_000),
        "endTimeUnixNano": str(ended),
        "attributes": pairs({**PERSON, **attributes}),
        "status": {} if status is None else {"code": status},
    }
    return {"resourceSpans": [{"scopeSpans": [{"scope": {"name": "x"}, "spans": [record]}]}]}


ASKED = {
    "model": "claude-opus-5",
    "input_tokens": 2,
    "output_tokens": 1200,
    "cache_read_tokens": 84562,
    "cache_creation_tokens": 7096,
    "duration_ms": 15000,
    "cost_usd": 0.1,
    "prompt": "planted",
}


async def test_an_event_of_claude_code_becomes_a_row():
    async with running() as one:
        body = logs(("claude_code.api_request", {**ASKED, "duration_ms": "15000", "request_id": "req_a"}))
        status, _, answer = await one.post("/v1/logs", body)
        assert (status, json.loads(answer)) == (200, {})
        await one.until(lambda one: one.rows)
    row = one.rows[0]
    assert (row["start"], row["model"], row["outcome"]) == (
        "duration_ms of Claude Code",
        "claude-opus-5",
        "ok",
    )
    assert row["e2e_ns"] == 15e9
    assert row["input_tokens"] == 2 + 84562 + 7096
    assert (row["output_tokens"], row["cache_read_tokens"], row["cache_write_tokens"]) == (1200, 84562, 7096)
    assert math.isnan(row["ttft_ns"])
    assert math.isnan(row["tpot_ns"])


async def test_what_is_held_is_given_out_when_it_is_stopped():
    """Turns and others of the same request are waited for longer than a test lasts."""
    async with running(interval_ns=60_000_000_000, hold_s=600) as one:
        await one.post("/v1/logs", logs(("claude_code.api_request", {**ASKED, "request_id": "req_a"})))
        assert one.rows == []
        one.source.stop()
        await one.until(lambda one: one.rows)
    assert [row["id"] for row in one.rows] == ["req_a"]


async def test_a_span_and_events_of_one_request_make_one_row(monkeypatch):
    async with running() as one:
        await one.post("/v1/logs", logs(("claude_code.api_request", {**ASKED, "request_id": "req_a"})))
        ended = time.time_ns()
        await one.post(
            "/v1/traces",
            span(
                "claude_code.llm_request",
                14_000,
                ended,
                request_id="req_a",
                ttft_ms=812.5,
                model="claude-opus-5",
            ),
        )
        refusal = ("claude_code.api_refusal", {"model": "claude-opus-5", "request_id": "req_a", "attempt": 1})
        await one.post(
            "/v1/logs", logs(refusal, ("claude_code.api_request", {**ASKED, "request_id": "req_b"}))
        )
        await one.until(lambda one: len(one.rows) == 2)
        await one.post("/v1/logs", logs(("claude_code.api_request", {**ASKED, "request_id": "req_a"})))
        await one.post("/v1/logs", logs(("claude_code.api_request", {**ASKED, "request_id": "req_c"})))
        await one.until(lambda one: any(row["id"] == "req_c" for row in one.rows))
    assert sorted(row["id"] for row in one.rows) == ["req_a", "req_b", "req_c"]
    row = next(row for row in one.rows if row["id"] == "req_a")
    assert (row["start"], row["stop"], row["retry"]) == ("span of Claude Code", "refusal", 0)
    assert (row["ttft_ns"], row["e2e_ns"]) == (812.5e6, 14e9)
    assert row["output_tokens"] == 1200
    assert row["t"] == pytest.approx(CLOCK.now() - (time.time_ns() - ended), abs=5_000_000)


@pytest.mark.parametrize(
    ("attributes", "outcome", "error"),
    [
        ({"status_code": 529, "attempt": 11, "error": "planted text"}, "upstream_http_error", ""),
        ({"attempt": 3, "error": "planted text"}, "transport_error", ""),
    ],
)
async def test_errors_of_claude_code(attributes, outcome, error):
    async with running() as one:
        await one.post(
            "/v1/logs", logs(("claude_code.api_error", {"model": "m", "duration_ms": 9, **attributes}))
        )
        await one.until(lambda one: one.rows)
        texts = "\n".join(text for _, text in one.source.strings.since(0))
    row = one.rows[0]
    assert (row["outcome"], row["error"]) == (outcome, error)
    assert row["retry"] == attributes["attempt"] - 1
    assert "planted" not in texts


async def test_short_names_count_in_claude_codes_scope_only():
    short = ("api_request", {**ASKED, "event__name": "api_request"})
    async with running() as one:
        await one.post("/v1/logs", logs(short, scope="some.other.program"))
        await one.post("/v1/logs", logs(("user_prompt", {"prompt": "planted"})))
        await one.post("/v1/logs", logs(short))
        await one.until(lambda one: one.rows)
    assert len(one.rows) == 1


async def test_planted_texts_are_nowhere(caplog, capfd):
    """Prompts, people and keys in attributes, resource, body, headers and query of everything that is taken."""
    async with running() as one:
        words = {"authorization": "Bearer planted", "cookie": "planted"}
        event = ("claude_code.api_request", {**ASKED, "request_id": "req_a", "error_class": "planted text"})
        await one.post("/v1/logs?key=planted", logs(event), **words)
        await one.post("/v1/logs", b"planted{", **words)
        await one.post("/planted", logs(event), **words)
        await one.post(
            "/v1/traces", span("claude_code.llm_request", 5, error__type="planted@example.com"), **words
        )
        await one.until(lambda one: len(one.rows) == 2)
        texts = "\n".join(text for _, text in one.source.strings.since(0))
    out, err = capfd.readouterr()
    assert "planted" not in texts + out + err + caplog.text + repr(one.rows) + repr(vars(one.source))


# The wire


async def test_what_is_not_taken_is_refused_with_the_right_status():
    async with running() as one:
        ok = span("x", 1)
        checks = [
            (("/v1/traces", ok), {"Host": "evil.example"}, 403),
            (("/v1/traces", ok), {"Origin": "https://evil.example"}, 403),
            (("/v1/traces", ok), {"Origin": "http://localhost:3000"}, 200),
            (("/v1/traces", ok), {"Host": f"localhost:{one.port}"}, 200),
            (("/v1/other", ok), {}, 404),
            (("/v1/traces", ok, "text/plain"), {}, 415),
            (("/v1/traces", ok), {"Content-Encoding": "br"}, 415),
            (("/v1/traces", b"{"), {}, 400),
            (("/v1/traces", b"[]"), {}, 400),
            (("/v1/traces", b'{"resourceSpans": 5}'), {}, 400),
            (("/v1/traces", b"[" * 200_000), {}, 400),
            (("/v1/traces", b"\xff\xff\xff", "application/x-protobuf"), {}, 400),
            (("/v1/traces", b"not gzip"), {"Content-Encoding": "gzip"}, 400),
            (("/v1/traces", gzip.compress(b"{}")[:-4]), {"Content-Encoding": "gzip"}, 400),
            (("/v1/traces", gzip.compress(json.dumps(ok).encode())), {"Content-Encoding": "gzip"}, 200),
            (("/v1/traces", gzip.compress(b" " * (5 << 20))), {"Content-Encoding": "gzip"}, 413),
            (("/v1/traces", b" " * ((4 << 20) + 1)), {}, 413),
            (("/v1/metrics", b"\x00\x01", "application/x-protobuf"), {}, 200),
        ]
        for (path, body, *kind), headers, expected in checks:
            status, answered, text = await one.post(path, body, *kind, **headers)
            assert status == expected, (path, headers, text)
            assert answered["Content-Type"].split(";")[0] == (
                kind[0] if "protobuf" in str(kind) else "application/json"
            )
        status, _, _ = await one.post("/v1/traces", b"", method="GET")
        assert status == 405


def left_out(one):
    return [(row["state"], row["remedy"]) for row in one.status if row["scope"] == "left out"]


async def test_telemetry_of_other_programs_is_said_to_be_left_out():
    """It is taken with success, as the protocol wants it: the sender cannot know."""
    others = [
        ("/v1/traces", span("chat gpt-test", 5, gen_ai__system="planted")),
        ("/v1/logs", logs(("user_prompt", {}))),
        ("/v1/metrics", {"resourceMetrics": []}),
    ]
    for path, body in others:
        async with running() as one:
            status, _, answer = await one.post(path, body)
            assert (status, json.loads(answer)) == (200, {})
            await one.until(left_out)
            texts = "\n".join(text for _, text in one.source.strings.since(0))
        assert not one.rows
        assert "planted" not in texts
        assert left_out(one) == [("not_supported", "time other clients with --proxy URL")]


async def test_what_is_left_out_beside_requests_is_no_trouble():
    async with running() as one:
        await one.post("/v1/traces", span("claude_code.llm_request", 5))
        await one.post("/v1/traces", span("chat gpt-test", 5))
        await one.until(lambda one: one.rows and left_out(one))
    assert {state for state, _ in left_out(one)} == {"ok"}


async def test_a_sender_with_a_wrong_path_is_told_of_on_the_screen_too():
    async with running() as one:
        status, _, _ = await one.post("/planted", span("claude_code.llm_request", 5))
        assert status == 404
        await one.until(lambda one: any("refused" in row["scope"] for row in one.status))
    said = next(row for row in one.status if "refused" in row["scope"])
    assert said["scope"] == "refused: there are /v1/traces, /v1/logs and /v1/metrics"
    assert "planted" not in said["reason"]


async def test_times_that_cannot_be_are_rejected_in_part():
    now = time.time_ns()
    bad = [
        span("claude_code.llm_request", 5, now + 3600 * NS),
        span("claude_code.llm_request", 5, now - 3600 * NS),
        span("claude_code.llm_request", -5, now),
        span("claude_code.llm_request", 5, now),
    ]
    spans = [one["resourceSpans"][0] for one in bad]
    async with running() as one:
        status, _, answer = await one.post("/v1/traces", {"resourceSpans": spans})
        part = json.loads(answer)["partialSuccess"]
        assert (status, part["rejectedSpans"]) == (200, "3")
        for words in ("ahead", "15 minutes", "before it starts"):
            assert words in part["errorMessage"]
        await one.until(lambda one: one.rows and any(row["scope"] == "rejected" for row in one.status))
    assert len(one.rows) == 1


async def test_partial_success_in_protobuf_is_what_the_package_reads():
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

    wrong = Span(name="claude_code.llm_request", start_time_unix_nano=9, end_time_unix_nano=3)
    body = service.ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=[wrong] * 300)])]
    )
    async with running() as one:
        status, _, answer = await one.post("/v1/traces", body.SerializeToString(), "application/x-protobuf")
    read = service.ExportTraceServiceResponse.FromString(answer)
    assert (status, read.partial_success.rejected_spans) == (200, 300)
    assert "before it starts" in read.partial_success.error_message


async def test_protobuf_without_the_package_is_refused_with_the_command(monkeypatch):
    monkeypatch.setattr(receiver, "has_protobuf", lambda: False)
    async with running() as one:
        status, _, answer = await one.post("/v1/logs", b"", "application/x-protobuf")
        assert status == 415
        assert b"pip install" in answer
        status, _, _ = await one.post("/v1/logs", logs(("claude_code.api_request", ASKED)))
        assert status == 200
        await one.until(lambda one: any(row["scope"] == "protobuf" for row in one.status))
    said = next(row for row in one.status if row["scope"] == "protobuf")
    assert "pip install 'opusmon[otlp]'" in said["remedy"]


async def test_senders_that_come_too_often_are_told_to_wait(monkeypatch):
    monkeypatch.setattr(receiver, "POSTS_PER_S", 0.5)
    async with running() as one:
        assert (await one.post("/v1/metrics", b"{}"))[0] == 200
        status, headers, _ = await one.post("/v1/metrics", b"{}")
        assert (status, headers["Retry-After"]) == (429, "1")


async def test_a_port_in_use_and_an_open_address_are_refused_in_one_line():
    async with running() as one:
        for listen, word in (
            (one.source.address, "in use"),
            ("0.0.0.0:4318", "loopback"),
            ("nonsense", "address"),
        ):
            with pytest.raises(OtlpUnavailable) as refused:
                await anext(OtlpCollector(StringTable(), CLOCK, listen=listen).batches())
            assert word in refused.value.why.reason
            assert "address" in refused.value.why.remedy or "127.0.0.1:" in refused.value.why.remedy
            assert "key" not in refused.value.why.reason
            assert "\n" not in str(refused.value)
    assert collector.AHEAD_NS < collector.LATE_NS

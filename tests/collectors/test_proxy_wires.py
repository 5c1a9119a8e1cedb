"""Every odd wire through the proxy: the bytes are the upstream's, the outcome and the counts are right, and the clocks
lie between the upstream's own and those of the client, which brackets them without a tolerance.
"""

import asyncio
import hashlib
import json
import math
import time

import aiohttp
import fake_upstream as up
import pytest
from fake_upstream import Script
from proxyrun import Proxied, fetch

NAN = math.nan
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
GAP = 0.01
SIGNATURE = up.delta({"type": "signature_delta", "signature": "c2ln"})
CITATION = up.delta({"type": "citations_delta", "citation": {"type": "char_location", "cited_text": "x"}})
TOOL = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
END = (up.block_stop(), up.message_delta(), up.message_stop())


def crlf(eol):
    text = up.text("one", eol=eol)
    return [
        up.start(eol=eol),
        up.block(eol=eol),
        GAP,
        text,
        up.block_stop(eol=eol),
        up.message_delta(eol=eol),
        up.message_stop(eol=eol),
    ], text


def unnamed(piece):
    """The event without its `event:` line."""
    return piece.partition(b"\n")[2]


LONG = up.text("\u2028\u0085\u20ac\U0001f600" * 3)
CASES = {
    # name: (path, script, first token or None, first answer or None, expected fields)
    "plain": (None, Script([*up.STREAM[:2], GAP, *up.STREAM[2:]]), up.STREAM[2], up.STREAM[2],
        {"outcome": "ok", "chunks": 3, "stop": "end_turn", "input_tokens": 10, "output_tokens": 3, "id": "msg_1"}),
    "lf": (None, Script(crlf("\n")[0]), crlf("\n")[1], crlf("\n")[1], {"outcome": "ok", "chunks": 1}),
    "crlf": (None, Script(crlf("\r\n")[0]), crlf("\r\n")[1], crlf("\r\n")[1], {"outcome": "ok", "chunks": 1}),
    "cr": (None, Script(crlf("\r")[0]), crlf("\r")[1], crlf("\r")[1], {"outcome": "ok", "chunks": 1}),
    "one byte at a time": (None, Script(up.one_by_one(b"".join([*up.STREAM[:2], LONG, *END]))), None, None,
        {"outcome": "ok", "chunks": 1}),
    "unicode separators": (None, Script([*up.STREAM[:2], GAP, LONG, *END]), LONG, LONG, {"outcome": "ok", "chunks": 1}),
    "character cut in two": (None, Script([*up.STREAM[:2], LONG[:55], GAP, LONG[55:], *END]), None, None,
        {"outcome": "ok", "chunks": 1}),
    "byte order mark": (None, Script([b"\xef\xbb\xbf" + up.STREAM[0], *up.STREAM[1:]]), up.STREAM[2], up.STREAM[2],
        {"outcome": "ok", "input_tokens": 10}),
    "data only": (None, Script([unnamed(piece) for piece in up.STREAM]), unnamed(up.STREAM[2]), unnamed(up.STREAM[2]),
        {"outcome": "ok", "chunks": 3}),
    "comments and pings first": (None, Script([up.COMMENT, GAP, up.PING, GAP, up.STREAM[0], up.PING, GAP, *up.STREAM[1:]]),
        up.STREAM[2], up.STREAM[2], {"outcome": "ok", "chunks": 3}),
    "comment as data": (None, Script([up.sse(": OPENROUTER PROCESSING"), *up.STREAM]), up.STREAM[2], up.STREAM[2],
        {"outcome": "ok", "chunks": 3}),
    "empty deltas are no tokens": (None, Script([*up.STREAM[:2], up.text(""), GAP, up.text("x"), *END]),
        up.text("x"), up.text("x"), {"outcome": "ok", "chunks": 1}),
    "thinking, then text": (None,
        Script([up.start(), up.block(0, {"type": "thinking", "thinking": "", "signature": ""}), GAP, up.thinking(), GAP,
            SIGNATURE, up.block_stop(), up.block(1), GAP, up.text("a", 1), up.block_stop(1),
            up.message_delta({"output_tokens": 9, "output_tokens_details": {"thinking_tokens": 7}}), up.message_stop()]),
        up.thinking(), up.text("a", 1), {"outcome": "ok", "chunks": 2, "thinking_tokens": 7, "output_tokens": 9}),
    "redacted thinking": (None,
        Script([up.start(), GAP, up.block(0, {"type": "redacted_thinking", "data": "xyz"}), up.block_stop(), GAP,
            up.block(1), up.text("a", 1), *END]),
        up.block(0, {"type": "redacted_thinking", "data": "xyz"}), up.text("a", 1), {"outcome": "ok", "chunks": 2}),
    "tool only": (None,
        Script([up.start(), up.block(0, TOOL), up.tool_input(""), GAP, up.tool_input('{"a":'), up.tool_input("1}"),
            up.block_stop(), up.message_delta(stop="tool_use"), up.message_stop()]),
        up.tool_input('{"a":'), up.tool_input('{"a":'),
        {"outcome": "ok", "chunks": 2, "tool_calls": 1, "stop": "tool_use"}),
    "citation": (None, Script([*up.STREAM[:2], GAP, CITATION, GAP, up.text("x"), *END]), CITATION, up.text("x"),
        {"outcome": "ok", "chunks": 2}),
    "unknown events and deltas": (None,
        Script([up.anthropic({"type": "future_event", "x": [1]}), *up.STREAM[:2], up.delta({"type": "future_delta", "y": "z"}),
            GAP, *up.STREAM[2:]]),
        up.STREAM[2], up.STREAM[2], {"outcome": "ok", "chunks": 3}),
    "overloaded after 200, at once": (None, Script([up.OVERLOADED]), None, None,
        {"outcome": "stream_error_event", "error": "overloaded_error", "status": 200, "chunks": 0}),
    "overloaded after a delta": (None, Script([*up.STREAM[:3], up.OVERLOADED]), up.STREAM[2], up.STREAM[2],
        {"outcome": "stream_error_event", "error": "overloaded_error", "chunks": 1, "tpot_ns": NAN}),
    "error as data only": (None, Script([*up.STREAM[:3], unnamed(up.OVERLOADED)]), up.STREAM[2], up.STREAM[2],
        {"outcome": "stream_error_event", "error": "overloaded_error"}),
    "error without a type": (None, Script([up.sse({"error": {"message": "m", "code": 500}})]), None, None,
        {"outcome": "stream_error_event", "error": "500"}),
    "error event that is text": (None, Script([up.sse("Internal error", "error")]), None, None,
        {"outcome": "stream_error_event", "error": "error"}),
    "clean end without message_stop": (None, Script(up.STREAM[:4]), up.STREAM[2], up.STREAM[2],
        {"outcome": "truncated", "chunks": 2, "stop": "", "output_tokens": 1, "tpot_ns": NAN}),
    "end with the connection, without message_stop": (None, Script(up.STREAM[:4], framing="close"), up.STREAM[2],
        up.STREAM[2], {"outcome": "truncated", "chunks": 2}),
    "end with the connection": (None, Script(up.STREAM, framing="close"), up.STREAM[2], up.STREAM[2],
        {"outcome": "ok", "chunks": 3}),
    "last blank line missing": (None, Script([*up.STREAM[:-1], up.STREAM[-1].rstrip()]), up.STREAM[2], up.STREAM[2],
        {"outcome": "ok", "chunks": 3}),
    "200 and nothing": (None, Script([]), None, None, {"outcome": "truncated", "chunks": 0, "response_b": 0}),
    "200 with pings only": (None, Script([up.PING, up.COMMENT]), None, None,
        {"outcome": "truncated", "chunks": 0, "first_event_ns": NAN}),
    "json error in 200": (None, Script.json({"type": "error", "error": {"type": "api_error", "message": "m"}}), None, None,
        {"outcome": "json_error_in_200", "error": "api_error", "streaming": 0}),
    "page in 200": (None, Script([b"<html>log in</html>"], headers=[("Content-Type", "text/html; charset=utf-8")]), None,
        None, {"outcome": "json_error_in_200", "error": "not JSON but text/html"}),
    "429": (None, Script.json({"type": "error", "error": {"type": "rate_limit_error", "message": "m"}}, 429,
            [("retry-after", "7"), ("request-id", "req_429"), ("anthropic-ratelimit-requests-limit", "50"),
             ("anthropic-ratelimit-requests-remaining", "0"), ("anthropic-ratelimit-input-tokens-limit", "40000"),
             ("anthropic-ratelimit-input-tokens-remaining", "39000"), ("anthropic-ratelimit-output-tokens-limit", "8000"),
             ("anthropic-ratelimit-output-tokens-remaining", "7000")]), None, None,
        {"outcome": "upstream_http_error", "status": 429, "error": "rate_limit_error", "retry_after_s": 7,
         "id": "req_429", "limit_requests": 50, "left_requests": 0, "limit_input_tokens": 40000,
         "left_input_tokens": 39000, "limit_output_tokens": 8000, "left_output_tokens": 7000}),
    "529": (None, Script.json({"type": "error", "error": {"type": "overloaded_error"}}, 529, [("retry-after-ms", "250")]),
        None, None, {"outcome": "upstream_http_error", "status": 529, "error": "overloaded_error", "retry_after_s": 0.25}),
    "502 of a gateway": (None, Script([b"<html>bad gateway</html>"], 502, [("Content-Type", "text/html")]), None, None,
        {"outcome": "upstream_http_error", "status": 502, "error": "502"}),
    "vllm's 400": (None, Script.json({"object": "error", "message": "m", "type": "BadRequestError", "code": 400}, 400),
        None, None, {"outcome": "upstream_http_error", "error": "BadRequestError"}),
    "not streamed": (None, Script.json(up.MESSAGE), None, None,
        {"outcome": "ok", "streaming": 0, "ttft_ns": NAN, "chunks": NAN, "input_tokens": 42, "cache_read_tokens": 30,
         "cache_write_tokens": 2, "output_tokens": 5, "stop": "end_turn", "id": "msg_2"}),
    "not streamed, cut by a clean end": (None, Script([json.dumps(up.MESSAGE).encode()[:90]],
            headers=[("Content-Type", "application/json")]), None, None, {"outcome": "truncated", "output_tokens": NAN}),
    "count_tokens": ("/v1/messages/count_tokens", Script.json({"input_tokens": 2095}), None, None,
        {"outcome": "ok", "input_tokens": 2095, "output_tokens": NAN}),
    "usage only in message_delta": (None,
        Script([up.start({"input_tokens": 0, "output_tokens": 0}), *up.STREAM[1:6],
            up.message_delta({"input_tokens": 33000, "cache_read_input_tokens": 5, "output_tokens": 15}), up.message_stop()]),
        up.STREAM[2], up.STREAM[2], {"input_tokens": 33005, "output_tokens": 15, "cache_read_tokens": 5}),
    "usage is cumulative": (None,
        Script([up.start({"input_tokens": 27, "cache_read_input_tokens": 100, "output_tokens": 1}), *up.STREAM[1:6],
            up.message_delta({"output_tokens": 15}, None),
            up.message_delta({"input_tokens": None, "output_tokens": 47, "cache_read_input_tokens": None}),
            up.message_stop()]),
        up.STREAM[2], up.STREAM[2], {"input_tokens": 127, "output_tokens": 47, "cache_read_tokens": 100}),
    "unknown usage": (None,
        Script([*up.STREAM[:6], up.message_delta({"output_tokens": 3, "kv_cache_hit_rate": 0.5, "nested": {"a": 2},
            "service_tier": "standard", "iterations": [{"x": 1}]}), up.message_stop()]),
        up.STREAM[2], up.STREAM[2], {"usage_more": "kv_cache_hit_rate=0.5, nested.a=2"}),
    "chat": (CHAT, Script([up.CHAT_STREAM[0], GAP, *up.CHAT_STREAM[1:]]), up.CHAT_STREAM[1], up.CHAT_STREAM[1],
        {"outcome": "ok", "chunks": 2, "stop": "stop", "input_tokens": 40, "output_tokens": 6, "cache_read_tokens": 30,
         "thinking_tokens": 2, "id": "chatcmpl-1", "usage_more": ""}),
    "chat with thinking": (CHAT,
        Script([up.CHAT_STREAM[0], GAP, up.chat({"reasoning_content": "hm", "content": None}), GAP,
            up.chat({"reasoning": "hm"}), GAP, *up.CHAT_STREAM[1:]]),
        up.chat({"reasoning_content": "hm", "content": None}), up.CHAT_STREAM[1], {"outcome": "ok", "chunks": 4}),
    "chat with tools": (CHAT,
        Script([up.CHAT_STREAM[0],
            up.chat({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}}]}), GAP,
            up.chat({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}),
            up.chat({"tool_calls": [{"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}}]}),
            up.chat({}, "tool_calls"), up.DONE]),
        up.chat({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}),
        up.chat({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}),
        {"outcome": "ok", "tool_calls": 2, "chunks": 2, "stop": "tool_calls", "output_tokens": NAN}),
    "chat without [DONE]": (CHAT, Script(up.CHAT_STREAM[:4]), up.CHAT_STREAM[1], up.CHAT_STREAM[1], {"outcome": "ok"}),
    "chat cut short by a clean end": (CHAT, Script(up.CHAT_STREAM[:3]), up.CHAT_STREAM[1], up.CHAT_STREAM[1],
        {"outcome": "truncated"}),
    "chat error in the stream": (CHAT,
        Script([up.CHAT_STREAM[0], up.sse({"error": {"message": "m", "type": "server_error", "code": 500}}), up.DONE]),
        None, None, {"outcome": "stream_error_event", "error": "server_error", "chunks": 0}),
    "chat, only [DONE]": (CHAT, Script([up.DONE]), None, None, {"outcome": "truncated", "chunks": 0}),
    "chat, usage in every chunk": (CHAT,
        Script([up.chat({"content": "a"}, usage={"prompt_tokens": 5, "completion_tokens": 1}),
            up.chat({"content": "b"}, "length", usage={"prompt_tokens": 5, "completion_tokens": 2}),
            up.chat(usage=None), up.DONE]),
        None, None, {"outcome": "ok", "input_tokens": 5, "output_tokens": 2, "stop": "length"}),
    "chat, not streamed": (CHAT,
        Script.json({"id": "c", "object": "chat.completion", "model": "gpt-test", "usage": up.CHAT_USAGE, "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "x", "tool_calls": None}}]}),
        None, None, {"outcome": "ok", "output_tokens": 6, "stop": "stop", "ttft_ns": NAN, "tool_calls": 0}),
    "completions": ("/v1/completions",
        Script([up.sse({"choices": [{"index": 0, "text": ""}]}), GAP, up.sse({"choices": [{"index": 0, "text": "a"}]}),
            up.sse({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}), up.DONE]),
        up.sse({"choices": [{"index": 0, "text": "a"}]}), up.sse({"choices": [{"index": 0, "text": "a"}]}),
        {"outcome": "ok", "chunks": 1, "stop": "length"}),
    "responses": (RESPONSES, Script([up.RESPONSES_STREAM[0], GAP, *up.RESPONSES_STREAM[1:]]), up.RESPONSES_STREAM[1],
        up.RESPONSES_STREAM[1],
        {"outcome": "ok", "chunks": 2, "input_tokens": 40, "output_tokens": 6, "cache_read_tokens": 30,
         "thinking_tokens": 2, "stop": "completed", "id": "resp_1"}),
    "responses with reasoning and a tool": (RESPONSES,
        Script([up.RESPONSES_STREAM[0], GAP, up.response_event("response.reasoning_summary_text.delta", delta="hm"), GAP,
            up.response_event("response.output_item.added", output_index=1, item={"type": "function_call"}),
            up.response_event("response.function_call_arguments.delta", delta="{}"), up.RESPONSES_STREAM[-1]]),
        up.response_event("response.reasoning_summary_text.delta", delta="hm"),
        up.response_event("response.function_call_arguments.delta", delta="{}"),
        {"outcome": "ok", "chunks": 2, "tool_calls": 1}),
    "responses failed": (RESPONSES,
        Script([up.RESPONSES_STREAM[0], up.response_event("response.failed", response=up.response_body(
            "failed", error={"code": "server_error", "message": "m"}))]),
        None, None, {"outcome": "stream_error_event", "error": "server_error"}),
    "responses error event": (RESPONSES,
        Script([up.RESPONSES_STREAM[0], up.response_event("error", code="rate_limit_exceeded", message="m", param=None)]),
        None, None, {"outcome": "stream_error_event", "error": "rate_limit_exceeded"}),
    "responses incomplete": (RESPONSES,
        Script([*up.RESPONSES_STREAM[:2], up.response_event("response.incomplete", response=up.response_body(
            "incomplete", incomplete_details={"reason": "max_output_tokens"}))]),
        up.RESPONSES_STREAM[1], up.RESPONSES_STREAM[1], {"outcome": "ok", "stop": "max_output_tokens"}),
    "responses cut": (RESPONSES, Script(up.RESPONSES_STREAM[:3]), None, None, {"outcome": "truncated"}),
    "responses, not streamed": (RESPONSES, Script.json(up.response_body()), None, None,
        {"outcome": "ok", "stop": "completed", "output_tokens": 6}),
    "gzip, flushed": (None, Script(up.gzipped([*up.STREAM[:2], GAP, *up.STREAM[2:]]), headers=[("Content-Encoding", "gzip")]),
        None, None, {"outcome": "ok", "chunks": 3, "output_tokens": 3}),
    "gzip, not flushed": (None, Script(up.gzipped(up.STREAM, flush=False), headers=[("Content-Encoding", "gzip")]), None,
        None, {"outcome": "ok", "chunks": 3, "gap_max_ns": 0}),
    "gzip that is none": (None, Script(up.STREAM, headers=[("Content-Encoding", "gzip")]), None, None,
        {"outcome": "ok", "chunks": NAN, "output_tokens": NAN}),
    "brotli": (None, Script([b"\x0b\x02\x80hello\x03"], headers=[("Content-Encoding", "br")]), None, None,
        {"outcome": "ok", "chunks": NAN, "output_tokens": NAN, "ttft_ns": NAN}),
    "early hints": (None, Script(up.STREAM, before=b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"), up.STREAM[2],
        up.STREAM[2], {"outcome": "ok", "status": 200}),
    "embeddings": ("/v1/embeddings", Script.json({"object": "list", "data": [], "model": "e",
            "usage": {"prompt_tokens": 8, "total_tokens": 8}}), None, None, {"outcome": "ok", "input_tokens": 8}),
    "redirect": (None, Script([], 307, [("Location", "http://elsewhere.invalid/"), ("Content-Type", "text/plain")]), None,
        None, {"outcome": "ok", "status": 307}),
}  # fmt: skip


def unframed(got):
    """The headers in order; how the body is delimited is each connection's own."""
    return [(name, value) for name, value in got.headers.items() if name != "Transfer-Encoding"]


def same(value, wanted):
    return math.isnan(value) if isinstance(wanted, float) and math.isnan(wanted) else value == wanted


@pytest.mark.parametrize("name", CASES)
async def test_wire(name):
    path, script, token, answer, wanted = CASES[name]
    path = path or "/v1/messages"
    async with Proxied() as run:
        got, row = await run.ask(script, path=path, allow_redirects=False)
        direct = await fetch(run.upstream.url, path, allow_redirects=False)
        seen = run.upstream.seen[0]
    assert hashlib.sha256(got.body).digest() == hashlib.sha256(direct.body).digest()
    assert got.body == script.body
    assert (got.status, unframed(got)) == (direct.status, unframed(direct))
    assert {key: row[key] for key in wanted if not same(row[key], wanted[key])} == {}
    assert (row["source"], row["start"], row["endpoint"], row["model"]) == (
        "proxy",
        "sent upstream",
        path,
        "m",
    )
    assert (row["response_b"], row["request_b"]) == (len(script.body), len(b'{"model":"m","stream":true}'))
    for field, piece in (("ttft_ns", token), ("first_answer_ns", answer)):
        if piece is not None:
            assert seen.sent_at(piece) - seen.came <= row[field] <= got.seen_at(piece) - got.began, field
    if token is None and row["chunks"] == 0:
        assert math.isnan(row["ttft_ns"])
    assert row["headers_ns"] <= row["e2e_ns"] <= got.ended - got.began


async def test_a_stream_arrives_as_it_is_sent():
    """Each event waits for the client to have seen the one before: nothing may be held back."""
    events = [asyncio.Event() for _ in up.STREAM]
    pieces = [part for event, piece in zip(events, up.STREAM, strict=True) for part in (piece, event)]
    async with Proxied() as run:
        run.upstream.on("/v1/messages", Script(pieces))
        async with (
            aiohttp.ClientSession() as session,
            session.post(run.url + "/v1/messages", data=b"{}") as response,
            asyncio.timeout(10),
        ):
            for event, piece in zip(events, up.STREAM, strict=True):
                assert await response.content.readexactly(len(piece)) == piece
                event.set()
            assert await response.content.read() == b""
        (row,) = await run.rows()
    assert (row["outcome"], row["model"]) == ("ok", "claude-test-1")


async def test_gzip_is_seen_event_by_event_and_passed_on_as_it_is():
    packed = up.gzipped([*up.STREAM[:2], 0.03, *up.STREAM[2:]])
    async with Proxied() as run:
        got, row = await run.ask(Script(packed, headers=[("Content-Encoding", "gzip")]))
        seen = run.upstream.seen[0]
    assert got.headers["Content-Encoding"] == "gzip"
    assert seen.sent_at(packed[3]) - seen.came <= row["ttft_ns"] <= got.seen_at(packed[3]) - got.began
    assert row["ttft_ns"] > 30e6


async def test_tpot_and_gaps_by_the_upstreams_clock():
    async with Proxied() as run:
        pieces = [*up.STREAM[:3], 0.02, up.STREAM[3], 0.06, *up.STREAM[4:]]
        got, row = await run.ask(Script(pieces))
    sent = [run.upstream.seen[0].sent_at(piece) for piece in up.STREAM[2:5]]
    slack = 2 * (got.seen_at(up.STREAM[4]) - sent[-1] + got.seen_at(up.STREAM[2]) - sent[0])
    assert row["tpot_ns"] == pytest.approx((sent[2] - sent[0]) / 2, abs=slack)
    assert row["tpot_ns"] == row["gap_mean_ns"] == (row["last_token_ns"] - row["ttft_ns"]) / 2
    assert row["gap_max_ns"] == pytest.approx(sent[2] - sent[1], abs=slack)
    assert row["gap_p95_ns"] <= row["gap_max_ns"]


async def test_own_time_is_part_of_what_the_client_waited_and_not_of_the_servers():
    async with Proxied() as run:
        await run.ask(Script(up.STREAM))
        began = time.monotonic_ns()
        _, row = await run.ask(Script([*up.STREAM[:2], 0.05, *up.STREAM[2:]]))
        took = time.monotonic_ns() - began
    assert 0 < row["own_ns"] < took - 50e6
    assert 0 < row["own_chunk_ns"] < took - 50e6


async def test_what_cannot_be_read_is_counted_with_its_reason():
    async with Proxied() as run:
        await run.ask(Script([b"x"], headers=[("Content-Encoding", "br")]))
        await run.ask(Script([b"x"], headers=[("Content-Encoding", "br")]))
        await run.ask(Script(up.STREAM, headers=[("Content-Encoding", "gzip")]))
        assert run.flights.unseen == {"encoding br": 2, "it is not compressed as it says": 1}


async def test_a_zip_bomb_is_forwarded_and_not_unpacked():
    bomb = up.gzipped([b"data: " + bytes(64 << 20)])
    async with Proxied() as run:
        got, row = await run.ask(Script(bomb, headers=[("Content-Encoding", "gzip")]))
        assert run.flights.unseen == {"its compression expands too far": 1}
    assert got.body == b"".join(bomb)
    assert row["outcome"] == "ok"

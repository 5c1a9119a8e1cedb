"""The real clients through the proxy: anthropic 2.x by ANTHROPIC_BASE_URL, openai, and curl."""

import asyncio
import math
import shutil

import anthropic
import fake_upstream as up
import openai
import pytest
from fake_upstream import Script
from proxyrun import Proxied

ASKED = {"model": "claude-test-1", "max_tokens": 64, "messages": [{"role": "user", "content": "hello"}]}
STREAM = Script(up.STREAM, headers=[("request-id", "req_1")])


@pytest.fixture
def key(monkeypatch):
    for name in (
        "ANTHROPIC_AUTH_TOKEN",
        "ANTHROPIC_CUSTOM_HEADERS",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-test")
    monkeypatch.setenv("ANTHROPIC_OPEN_TELEMETRY", "false")


def by_environment(run, monkeypatch, kind, **options):
    monkeypatch.setenv("ANTHROPIC_BASE_URL", run.url)
    return kind(**options)


async def read_all(client):
    async with client.messages.stream(**ASKED) as stream:
        async for _ in stream:
            pass


async def test_anthropic_async_stream(key, monkeypatch):
    async with Proxied() as run:
        run.upstream.on("/v1/messages", STREAM)
        async with (
            by_environment(run, monkeypatch, anthropic.AsyncAnthropic) as client,
            client.messages.stream(**ASKED) as stream,
        ):
            words = [word async for word in stream.text_stream]
            final = await stream.get_final_message()
        (row,) = await run.rows()
        seen = run.upstream.seen[0]
    assert (words, final.usage.output_tokens) == (["one", "two", "three"], 3)
    assert (row["outcome"], row["model"], row["streaming"]) == ("ok", "claude-test-1", 1)
    assert (row["input_tokens"], row["output_tokens"], row["chunks"], row["retry"]) == (10, 3, 3, 0)
    assert seen.values("authorization") == ["Bearer sk-test"]


async def test_anthropic_sync_stream_and_message(key, monkeypatch):
    def work(client):
        with client:
            with client.messages.stream(**ASKED) as stream:
                words = list(stream.text_stream)
            return words, client.messages.create(**ASKED), client.messages.count_tokens(**counted_words)

    counted_words = {name: ASKED[name] for name in ("model", "messages")}
    async with Proxied() as run:
        run.upstream.on("/v1/messages", STREAM, Script.json(up.MESSAGE))
        run.upstream.on("/v1/messages/count_tokens", Script.json({"input_tokens": 12}))
        client = by_environment(run, monkeypatch, anthropic.Anthropic)
        words, message, counted = await asyncio.to_thread(work, client)
        rows = await run.rows()
    assert (words, message.content[0].text, counted.input_tokens) == (["one", "two", "three"], "hello", 12)
    assert [row["endpoint"] for row in rows] == ["/v1/messages", "/v1/messages", "/v1/messages/count_tokens"]
    assert [row["outcome"] for row in rows] == ["ok"] * 3
    assert [row["input_tokens"] for row in rows] == [10, 42, 12]


async def test_anthropic_error_in_the_stream_is_the_clients_and_the_rows(key, monkeypatch):
    async with Proxied() as run:
        run.upstream.on("/v1/messages", Script([*up.STREAM[:3], up.OVERLOADED]))
        async with by_environment(run, monkeypatch, anthropic.AsyncAnthropic) as client:
            with pytest.raises(anthropic.APIStatusError) as caught:
                await read_all(client)
        (row,) = await run.rows()
    assert caught.value.status_code == 200
    assert (row["outcome"], row["error"], row["chunks"]) == ("stream_error_event", "overloaded_error", 1)


async def test_anthropic_retries_are_seen_as_attempts(key, monkeypatch):
    overloaded = Script.json(
        {"type": "error", "error": {"type": "overloaded_error", "message": "m"}},
        529,
        [("retry-after-ms", "1")],
    )
    async with Proxied() as run:
        run.upstream.on("/v1/messages", overloaded, overloaded, Script.json(up.MESSAGE))
        async with by_environment(run, monkeypatch, anthropic.AsyncAnthropic, max_retries=2) as client:
            await client.messages.create(**ASKED)
        rows = await run.rows()
    assert [row["retry"] for row in rows] == [0, 1, 2]
    assert [row["outcome"] for row in rows] == ["upstream_http_error", "upstream_http_error", "ok"]
    assert rows[0]["retry_after_s"] == pytest.approx(0.001)


async def test_anthropic_meets_a_cut(key, monkeypatch):
    async with Proxied() as run:
        run.upstream.on("/v1/messages", Script(up.STREAM[:4], end="reset"))
        async with by_environment(run, monkeypatch, anthropic.AsyncAnthropic) as client:
            with pytest.raises(Exception, match=r"peer closed connection|incomplete"):
                await read_all(client)
        (row,) = await run.rows()
    assert row["outcome"] == "transport_error"


async def test_anthropic_leaves_in_the_middle(key, monkeypatch):
    async with Proxied() as run:
        run.upstream.on("/v1/messages", Script(up.STREAM[:4], end="hang"))
        async with by_environment(run, monkeypatch, anthropic.AsyncAnthropic) as client:
            async with client.messages.stream(**ASKED) as stream:
                async for _ in stream.text_stream:
                    break
            seen = await run.upstream.request()
            async with asyncio.timeout(5):
                await seen.gone.wait()
        (row,) = await run.rows()
    assert row["outcome"] == "client_disconnect"


async def test_anthropic_sees_that_the_upstream_is_not_there(key, monkeypatch):
    async with Proxied() as run:
        run.upstream._server.close()
        async with by_environment(run, monkeypatch, anthropic.AsyncAnthropic, max_retries=0) as client:
            with pytest.raises(anthropic.InternalServerError, match="connection refused") as caught:
                await client.messages.create(**ASKED)
    assert caught.value.status_code == 502


async def test_openai_chat_stream(key):
    async with Proxied() as run:
        run.upstream.on("/v1/chat/completions", Script(up.CHAT_STREAM))
        async with openai.AsyncOpenAI(base_url=run.url + "/v1", api_key="k") as client:
            stream = await client.chat.completions.create(
                model="gpt-test",
                messages=[{"role": "user", "content": "x"}],
                stream=True,
                stream_options={"include_usage": True},
            )
            words = [choice.delta.content async for chunk in stream for choice in chunk.choices]
        (row,) = await run.rows()
    assert [word for word in words if word] == ["one", "two"]
    assert (row["outcome"], row["model"], row["chunks"], row["cache_read_tokens"]) == (
        "ok",
        "gpt-test",
        2,
        30,
    )


async def test_openai_responses_stream_and_whole(key):
    async with Proxied() as run:
        run.upstream.on("/v1/responses", Script(up.RESPONSES_STREAM), Script.json(up.response_body()))
        async with openai.AsyncOpenAI(base_url=run.url + "/v1", api_key="k") as client:
            stream = await client.responses.create(model="gpt-test", input="x", stream=True)
            kinds = [event.type async for event in stream]
            whole = await client.responses.create(model="gpt-test", input="x")
        rows = await run.rows()
    assert kinds[-1] == "response.completed"
    assert whole.usage.output_tokens == 6
    assert [row["outcome"] for row in rows] == ["ok", "ok"]
    assert [row["streaming"] for row in rows] == [1, 0]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_byte_for_byte():
    async with Proxied() as run:
        run.upstream.on("/v1/messages", Script(up.STREAM))
        child = await asyncio.create_subprocess_exec(
            "curl", "-sN", "--noproxy", "*", run.url + "/v1/messages", "-H", "content-type: application/json",
            "-H", "x-opusmon-label: by hand", "-d", '{"model":"m","stream":true}', stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, _ = await child.communicate()
        (row,) = await run.rows()
    assert out == b"".join(up.STREAM)
    assert (row["outcome"], row["label"], math.isnan(row["retry"])) == ("ok", "by hand", True)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_with_a_large_body_expects_100_continue():
    async with Proxied() as run:
        run.upstream.on("/v1/messages", Script.json(up.MESSAGE))
        child = await asyncio.create_subprocess_exec(
            "curl", "-s", "--noproxy", "*", run.url + "/v1/messages", "-H", "Expect: 100-continue", "--expect100-timeout", "30",
            "--max-time", "20", "--data-binary", "@-", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        body = b'{"messages":"' + b"x" * (3 << 20) + b'","model":"tail"}'
        out, _ = await child.communicate(body)
        (row,) = await run.rows()
        seen = run.upstream.seen[0]
    assert b'"msg_2"' in out
    assert (seen.body == body, row["request_b"], row["model"]) == (True, len(body), "tail")

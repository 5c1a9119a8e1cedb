"""The canary against a server whose every delay is known: clocks, outcomes, phases, keys."""

import asyncio
import gzip
import json
import math
import shutil
import socket
import ssl
import subprocess
from contextlib import asynccontextmanager, closing

import needs
import pytest

from opusmon.clock import SystemClock
from opusmon.collectors.canary.endpoint import PLACEHOLDER, CanaryConfig, CanaryRefused, announce, check
from opusmon.collectors.canary.exchange import Client
from opusmon.collectors.canary.warmup import warm_up

from .canary_server import STOP, delta, end, good, serving, start

CLOCK = SystemClock()


def config(url, **words):
    words.setdefault("env", {})
    return check(CanaryConfig(url, "m", **words))


@asynccontextmanager
async def client(url, **words):
    one = Client(config(url, **words), CLOCK)
    try:
        yield one
    finally:
        await one.close()


async def ask(answer, **words):
    """One request to a server that answers so: the row, and what the server saw."""
    async with serving(answer) as server, client(server.url, **words) as one:
        request = await one.ask("hello", 1)
        return request, server.seen[0]


# Clocks


async def test_clocks_lie_between_the_servers_own():
    async with (
        serving(lambda seen, out: good(seen, out, pause_s=0.08)) as server,
        client(server.url) as one,
    ):
        intended = CLOCK.now() - 250_000_000
        row = await one.ask("hello", 7, intended)
        seen = server.seen[0]
    at = {name: t - intended for name, t in seen.wrote.items()}
    assert at["head"] <= row.headers_ns <= at["token0"]
    assert at["start"] <= row.first_event_ns <= at["token0"]
    assert at["token0"] <= row.ttft_ns <= at["token1"]
    assert row.first_answer_ns == row.ttft_ns
    assert at["token2"] <= row.last_token_ns <= at["usage"]
    assert at["stop"] <= row.e2e_ns == row.t - intended
    assert row.late_ns >= 250_000_000
    assert row.ttft_ns > row.late_ns
    assert row.tpot_ns == pytest.approx((row.last_token_ns - row.ttft_ns) / 2)
    assert (row.outcome, row.number, row.start) == ("ok", 7, "intended send time")
    assert (row.input_tokens, row.output_tokens, row.chunks, row.retry) == (10, 3, 3, 0)
    assert (row.id, row.status, row.stop, row.streaming) == ("req_1", 200, "end_turn", 1)


async def test_without_an_intended_time_the_clocks_start_when_the_request_was_sent():
    row, seen = await ask(good)
    assert row.start == "sent upstream"
    assert math.isnan(row.late_ns)
    assert row.t - row.e2e_ns <= seen.t
    assert row.e2e_ns < row.t


async def test_what_the_client_loads_at_first_use_is_loaded_before_and_its_own_time_is_told():
    async with serving() as server:
        one = config(server.url, env={"ANTHROPIC_API_KEY": "sk-planted"})
        await warm_up(one, CLOCK)
        assert server.seen == []
        async with client(server.url) as asker:
            called = CLOCK.now()
            row = await asker.ask("hello", 1, called)
    sent = row.own_ns + row.connect_ns
    assert 0 < sent <= server.seen[0].t - called
    assert sent <= row.headers_ns


async def test_sizes_are_those_on_the_wire():
    async def answer(seen, out):
        text = "".join(
            f"event: {body['type']}\ndata: {json.dumps(body)}\n\n" for body in (start(), delta(), end(), STOP)
        )
        await out.plain(200, gzip.compress(text.encode()), "text/event-stream", content_encoding="gzip")
        seen.wrote["size"] = len(gzip.compress(text.encode()))

    row, seen = await ask(answer)
    assert row.outcome == "ok"
    assert row.response_b == seen.wrote["size"]
    assert row.request_b == int(seen.headers["content-length"])


# Outcomes


def events(*bodies, named=True, finish=True):
    async def answer(seen, out):
        await out.head()
        for n, body in enumerate(bodies):
            await out.event(str(n), body, named)
        if finish:
            await out.end()
        else:
            out.cut()

    return answer


def plain(status, body, kind="application/json", **headers):
    async def answer(seen, out):
        await out.plain(status, body, kind, **headers)

    return answer


OVERLOADED = {"type": "error", "error": {"type": "overloaded_error", "message": "SECRETWORD"}}
MESSAGE = {
    "type": "message",
    "model": "m",
    "content": [{"type": "text", "text": "SECRETWORD"}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 4, "output_tokens": 2},
}


@pytest.mark.parametrize(
    ("answer", "outcome", "error", "status"),
    [
        (events(start(), delta(), end(), STOP), "ok", "", 200),
        (events(start(), delta(), end(), STOP, named=False), "ok", "", 200),
        (events(start(), delta(), OVERLOADED), "stream_error_event", "overloaded_error", 200),
        (events(OVERLOADED, named=False), "stream_error_event", "overloaded_error", 200),
        (events(start(), delta()), "truncated", "", 200),
        (events(), "truncated", "no_events", 200),
        (events(start(), delta(), finish=False), "truncated", "connection_lost", 200),
        (plain(200, OVERLOADED), "json_error_in_200", "overloaded_error", 200),
        (plain(200, b"<html>", "text/html"), "json_error_in_200", "not_a_stream", 200),
        (plain(200, b"[1]"), "json_error_in_200", "not_a_stream", 200),
        (plain(200, b"[" * 100_000), "json_error_in_200", "not_a_stream", 200),
        (plain(200, MESSAGE), "ok", "", 200),
        (plain(529, OVERLOADED), "upstream_http_error", "overloaded_error", 529),
        (plain(500, b"oops", "text/plain"), "upstream_http_error", "http_500", 500),
        (plain(307, b"", location="http://127.0.0.1:1/"), "upstream_http_error", "http_307", 307),
    ],
)
async def test_outcome_is_decided_at_the_end(answer, outcome, error, status):
    row, _ = await ask(answer)
    assert (row.outcome, row.error, row.status) == (outcome, error, status)
    assert math.isnan(row.tpot_ns) or row.outcome == "ok"


async def test_429_is_not_retried_and_says_how_long_to_wait_and_what_is_left():
    body = {"type": "error", "error": {"type": "rate_limit_error", "message": "no"}}
    limits = {
        "anthropic_ratelimit_requests_limit": "50",
        "anthropic_ratelimit_requests_remaining": "0",
        "anthropic_ratelimit_input_tokens_limit": "40000",
        "anthropic_ratelimit_input_tokens_remaining": "39000",
    }
    async with (
        serving(plain(429, body, retry_after="17", **limits)) as server,
        client(server.url) as one,
    ):
        row = await one.ask("hello", 1)
        assert len(server.seen) == 1
    assert (row.outcome, row.error, row.retry_after_s) == ("upstream_http_error", "rate_limit_error", 17)
    assert (row.limit_requests, row.left_requests) == (50, 0)
    assert (row.limit_input_tokens, row.left_input_tokens) == (40_000, 39_000)
    assert math.isnan(row.limit_output_tokens)
    assert server.seen[0].headers["x-stainless-retry-count"] == "0"


async def test_a_server_that_stays_silent_is_given_up():
    async def silent(seen, out):
        await asyncio.sleep(60)

    begun = CLOCK.now()
    row, _ = await ask(silent, timeout_s=0.5)
    assert (row.outcome, row.error) == ("timeout", "waiting_timeout")
    assert row.t - begun >= 0.5e9
    assert math.isnan(row.status)


async def test_a_stream_that_stops_is_given_up_with_what_it_had():
    async def stalls(seen, out):
        await out.head()
        await out.event("start", start())
        await out.event("token0", delta())
        await asyncio.sleep(60)

    row, _ = await ask(stalls, timeout_s=0.3)
    assert (row.outcome, row.error, row.chunks) == ("timeout", "reading_timeout", 1)
    assert row.ttft_ns > 0


async def test_a_dead_endpoint_is_told_from_a_name_that_does_not_exist(monkeypatch):
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with client(f"http://127.0.0.1:{port}") as one:
        row = await one.ask("hello", 1)
    assert (row.outcome, row.error) == ("transport_error", "connect_error")
    counts = (row.chunks, row.tool_calls, row.streaming, row.response_b, row.output_tokens)
    assert all(math.isnan(count) for count in counts)  # nothing was there to count
    assert math.isnan(row.reused)

    async def no_such_name(*args, **words):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", no_such_name)
    async with client("https://gpu-host-7.example") as one:
        row = await one.ask("hello", 1)
    assert (row.outcome, row.error) == ("transport_error", "dns_error")


# Phases


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for localhost that signs itself."""
    if shutil.which("openssl") is None:
        needs.lacking("openssl", "openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", folder / "key", "-out", folder / "ca"]
    subprocess.run(["openssl", *words.split(), *names], check=True, capture_output=True)
    return folder


async def test_phases_apart_then_reused(certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "ca"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate / "ca", certificate / "key")
    async with serving(good, context) as server, client(server.url) as one:
        begun = CLOCK.now()
        first, second = await one.ask("hello", 1), await one.ask("hello", 2)
        assert server.seen[0].connection == server.seen[1].connection
    assert first.outcome == second.outcome == "ok"
    assert first.reused == 0
    for phase in (first.dns_ns, first.connect_ns, first.tls_ns):
        assert 0 < phase < first.t - begun
    assert first.dns_ns + first.connect_ns + first.tls_ns < first.t - begun
    assert second.reused == 1
    assert all(map(math.isnan, (second.dns_ns, second.connect_ns, second.tls_ns)))


async def test_a_certificate_that_nobody_vouches_for_is_a_tls_error(certificate):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate / "ca", certificate / "key")
    async with serving(good, context) as server, client(server.url) as one:
        row = await one.ask("hello", 1)
    assert (row.outcome, row.error) == ("transport_error", "tls_error")
    assert row.connect_ns > 0


async def test_the_lookup_is_not_counted_twice(monkeypatch):
    loop = asyncio.get_running_loop()
    real = loop.getaddrinfo

    async def slow(host, *args, **words):
        await asyncio.sleep(0.2)
        return await real(host, *args, **words)

    monkeypatch.setattr(loop, "getaddrinfo", slow)
    async with serving() as server, client(f"http://localhost:{server.port}") as one:
        begun = CLOCK.now()
        row = await one.ask("hello", 1)
    assert row.dns_ns >= 0.19e9
    assert row.connect_ns < row.t - begun - 0.19e9
    assert row.t - row.e2e_ns >= begun + row.dns_ns  # sent after that: no part of its clocks


async def test_no_lookup_for_an_address_in_digits_and_no_tls_over_http():
    row, _ = await ask(good)
    assert math.isnan(row.dns_ns)
    assert math.isnan(row.tls_ns)
    assert row.connect_ns > 0


# Keys and addresses


async def test_the_key_comes_from_the_environment_and_goes_nowhere_else(monkeypatch):
    _, seen = await ask(good, env={"ANTHROPIC_API_KEY": "sk-planted"})
    assert seen.headers["authorization"] == "Bearer sk-planted"
    _, seen = await ask(good, env={"ANTHROPIC_AUTH_TOKEN": "token-planted"})
    assert seen.headers["authorization"] == "Bearer token-planted"


async def test_without_a_key_a_placeholder_is_sent_and_no_profile_is_read(monkeypatch):
    monkeypatch.setenv("ANTHROPIC_PROFILE", "does-not-exist")
    _, seen = await ask(good)
    assert seen.headers["authorization"] == f"Bearer {PLACEHOLDER}"


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    row, _ = await ask(good)
    assert row.outcome == "ok"


KEY = {"ANTHROPIC_API_KEY": "sk-planted"}


@pytest.mark.parametrize(
    ("url", "env", "word"),
    [
        ("", {}, "--base-url"),
        ("127.0.0.1:8000", {}, "http"),
        ("ftp://host", {}, "http"),
        ("http://", {}, "http"),
        ("http://host:99999", {}, "address"),
        ("https://user:sk-planted@host", {}, "credentials"),
        ("https://sk-planted@host", {}, "credentials"),
        ("https://host/?key=sk-planted", {}, "query"),
        ("https://host/#sk-planted", {}, "query"),
        ("https://ho st/", {}, "blanks"),
        ("http://10.0.0.7:8000", KEY, "https"),
        ("http://example.com", {"ANTHROPIC_AUTH_TOKEN": "sk-planted"}, "https"),
        ("http://example.com", {"ANTHROPIC_CUSTOM_HEADERS": "x: sk-planted"}, "https"),
        ("http://127.0.0.1.example.com", KEY, "https"),
    ],
)
def test_addresses_that_would_leak_or_mean_nothing_are_refused_in_one_line(url, env, word):
    with pytest.raises(CanaryRefused) as refused:
        config(url, env=env)
    assert word in str(refused.value)
    assert "sk-planted" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "env", "address"),
    [
        ("http://127.0.0.1:8000/v1/messages", KEY, "http://127.0.0.1:8000"),
        ("http://[::1]:8000/v1/", KEY, "http://[::1]:8000"),
        ("http://localhost:8000/", KEY, "http://localhost:8000"),
        ("http://10.0.0.7:8000", {}, "http://10.0.0.7:8000"),
        ("https://api.anthropic.com", KEY, "https://api.anthropic.com"),
        ("https://gateway.example/team-a/v1", KEY, "https://gateway.example/team-a"),
    ],
)
def test_addresses_that_are_fine_lose_the_path_that_the_client_adds(url, env, address):
    assert config(url, env=env).base_url == address


@pytest.mark.parametrize(
    "words",
    [
        {"per_hour": 0},
        {"per_hour": 3601},
        {"per_hour": math.nan},
        {"max_tokens": 0},
        {"hourly_tokens": 0},
        {"timeout_s": 0},
    ],
)
def test_amounts_out_of_range_are_refused(words):
    with pytest.raises(CanaryRefused):
        config("http://127.0.0.1:8000", **words)


def test_it_says_what_it_will_spend_before_it_starts():
    text = announce(config("https://api.anthropic.com/v1", env=KEY))
    for word in ("12 requests", "6,000 tokens an hour", "api.anthropic.com", "300 s", "ANTHROPIC_API_KEY"):
        assert word in text
    assert "sk-planted" not in text + repr(config("https://api.anthropic.com", env=KEY))

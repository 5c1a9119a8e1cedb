"""Addresses, paths and what is read of a request."""

import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from opusmon.clock import ManualClock
from opusmon.collectors.api.asked import WHOLE_B, Asked, BodyWatch
from opusmon.collectors.api.content import UnreadableError, decoder
from opusmon.collectors.api.limits import amount, retry_after_s
from opusmon.collectors.proxy import ProxyCollector, rules
from opusmon.collectors.proxy.errors import ProxyUnavailable
from opusmon.collectors.proxy.rules import Listen
from opusmon.schema import StringTable


@pytest.mark.parametrize(
    ("text", "listen", "again"),
    [
        ("127.0.0.1:8788", Listen("127.0.0.1", 8788), "127.0.0.1:8788"),
        ("8788", Listen("127.0.0.1", 8788), "127.0.0.1:8788"),
        ("localhost:0", Listen("127.0.0.1", 0), "127.0.0.1:0"),
        ("127.8.8.8:1", Listen("127.8.8.8", 1), "127.8.8.8:1"),
        ("[::1]:8788", Listen("::1", 8788), "[::1]:8788"),
        ("unix:/run/x.sock", Listen(path="/run/x.sock"), "unix:/run/x.sock"),
    ],
)
def test_listen(text, listen, again):
    assert rules.parse_listen(text) == listen
    assert listen.text == again


@pytest.mark.parametrize(
    "text",
    ["0.0.0.0:8788", "[::]:8788", ":8788", "10.1.2.3:80", "example.com:80", "", "x", "127.0.0.1:99999", "127.0.0.1:-1",
     "unix:relative", "127.0.0.1", "127.0.0.1:8\u0662"],
)  # fmt: skip
def test_listen_elsewhere_is_refused_with_a_remedy(text):
    with pytest.raises(ProxyUnavailable) as caught:
        rules.parse_listen(text)
    why = caught.value.why
    assert "127.0.0.1:" in why.remedy or "unix:/" in why.remedy
    assert "--" not in why.reason + why.remedy


@pytest.mark.parametrize(
    ("text", "base"),
    [
        ("https://api.anthropic.com", "https://api.anthropic.com"),
        ("http://localhost:8000/", "http://localhost:8000"),
        ("http://localhost:8000/v1", "http://localhost:8000"),
        ("https://gateway.example/api/v1/", "https://gateway.example/api"),
    ],
)
def test_upstream(text, base):
    assert rules.parse_upstream(text) == base


@pytest.mark.parametrize(
    "text", ["", "api.anthropic.com", "ftp://x", "http://", "http://u:p@x", "https://x?key=1", "https://x/#f", "http://x:99999", "http://[::1"]
)  # fmt: skip
def test_upstreams_that_will_not_do(text):
    with pytest.raises(ProxyUnavailable) as caught:
        rules.parse_upstream(text)
    assert caught.value.why.remedy == "write http://HOST:PORT or https://HOST"
    assert "u:p" not in str(caught.value)


@pytest.mark.parametrize("allow", ["rerank", "/*", "/a*b", "/ok,bad"])
def test_paths_that_cannot_be_allowed(allow):
    with pytest.raises(ProxyUnavailable):
        rules.parse_allow(allow)


def test_allowed_paths():
    assert rules.parse_allow(" /v1/rerank, /api/* ,") == ("/v1/rerank", "/api/*")
    assert rules.parse_allow("") == ()
    paths = rules.Paths(("/api/*",))
    assert paths.match("/api/x/y") == "/api/*"
    assert paths.match("/v1/models/meta-llama/Llama-3.1") == "/v1/models/*"
    assert [paths.match(bad) for bad in ("/api/../etc", "/api/%2E%2e/x", "/api/.", "/api/a\\b", "/apix")] == [
        ""
    ] * 5


async def test_the_collector_says_what_is_wrong_before_it_listens():
    for options in (
        {},
        {"upstream": "http://x", "listen": "0.0.0.0:1"},
        {"upstream": "http://x", "allow": "x"},
    ):
        with pytest.raises(ProxyUnavailable) as caught:
            await anext(ProxyCollector(StringTable(), ManualClock(), **options).batches())
        assert caught.value.why.reason
    assert ProxyCollector.probe() is None


# What a request asks for


def asked(body, step=1 << 16):
    watch = BodyWatch()
    for place in range(0, len(body), step):
        watch.feed(body[place : place + step])
    assert watch.size_b == len(body)
    found = watch.asked()
    assert not watch._kept
    assert not watch._tail
    return found


PROMPT = {"messages": [{"role": "user", "content": 'say "model": "evil", "stream": true \\ "'}]}


@pytest.mark.parametrize("size", [0, 200_000, 3 * WHOLE_B])
@pytest.mark.parametrize("order", ["first", "last"])
@pytest.mark.parametrize("stream", [True, False])
def test_asked_of_small_and_large_bodies(size, order, stream):
    own = {"model": "claude-x", "stream": stream}
    rest = PROMPT | {"system": 'x"\\' * (size // 5)}
    body = json.dumps(own | rest if order == "first" else rest | own).encode()
    assert asked(body) == Asked("claude-x", stream)


def test_asked_with_keys_of_inner_objects():
    tool = {
        "properties": {"model": {"type": "string"}, "stream": {"type": "boolean"}},
        "default": {"model": "inner"},
    }
    for pad in (10, 300_000):
        body = json.dumps({"tools": [tool], "pad": "x" * pad, "model": "outer"}).encode()
        assert asked(body).model == "outer"


def test_asked_of_anything_else():
    for body in (b"", b"[1]", b"{", b"null", b'{"model": 3, "stream": "yes"}', b"[" * 100_000, b"\xff\x00"):
        assert asked(body).model == ""
    assert asked(b'{"model":"a\\u001b[31mb' + b"c" * 300 + b'"}').model == "a?[31mb" + "c" * 121
    assert asked(b'{"model":"m"}') == Asked("m", stream=False)


@given(st.binary(max_size=300), st.integers(1, 50))
def test_asked_of_any_bytes(body, step):
    asked(body, step)


@given(
    st.recursive(
        st.text() | st.booleans(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    ),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40),
    st.booleans(),
)
def test_the_scan_of_large_bodies_agrees_with_json(filler, model, stream):
    body = json.dumps({"filler": filler, "pad": "x" * 140_000, "model": model, "stream": stream}).encode()
    found = asked(body)
    assert found == Asked(model, stream)


# Coding and limits


def test_codings():
    with pytest.raises(UnreadableError, match="encoding br"):
        decoder("br")
    with pytest.raises(UnreadableError, match="encoding another one"):
        decoder("secret\n")
    assert decoder("identity").feed(b"x") == b"x"


@pytest.mark.parametrize("kind", ["gzip", "members", "zlib", "raw"])
@given(cut=st.integers(1, 40), data=st.binary(max_size=200))
def test_compressed_in_any_pieces(kind, cut, data):
    def pack(part, bits):
        packer = zlib.compressobj(wbits=bits)
        return packer.compress(part) + packer.flush()

    wire = {
        "gzip": lambda: pack(data, 31),
        "members": lambda: pack(data[:50], 31) + pack(data[50:], 31),
        "zlib": lambda: pack(data, 15),
        "raw": lambda: pack(data, -15),
    }[kind]()
    reader = decoder("gzip" if kind in ("gzip", "members") else "deflate")
    if kind == "raw" and cut < 3:
        cut = 3  # one byte of bare deflate may look like zlib's
    assert b"".join(reader.feed(wire[n : n + cut]) for n in range(0, len(wire), cut)) == data


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7),
        ({"retry-after": "7", "retry-after-ms": "250"}, 0.25),
        ({"retry-after": "Sun, 06 Nov 1994 08:50:07 GMT", "date": "Sun, 06 Nov 1994 08:49:37 GMT"}, 30),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:12 GMT"}, 2),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:02 GMT"}, 0),
    ],
)
def test_retry_after(headers, seconds):
    assert retry_after_s(headers, 10_000_000_000) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1", "nan", "inf", "1e99", "9" * 40, "Fri, 99 Foo 2000"])
def test_numbers_that_are_none(text):
    assert amount(text) != amount(text)
    assert retry_after_s({"retry-after": text}, 0) != retry_after_s({"retry-after": text}, 0)


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=60))
def test_any_allowed_path_makes_an_address_of_the_same_upstream(rest):
    path = "/v1/models/" + rest
    if rules.Paths().match(path.partition("?")[0]):
        url = URL("http://127.0.0.1:8000" + path, encoded=True)
        assert (url.scheme, url.host, url.port) == ("http", "127.0.0.1", 8000)
        assert url.raw_path.startswith("/v1/models/")
        assert ".." not in url.raw_path.split("/")

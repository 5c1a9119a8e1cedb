"""A model's reading: what leaves the host, what comes back, and that nothing of it is taken on trust."""

import asyncio
import json
import socket

import pytest
from fake_upstream import FakeUpstream, Script

from opusmon.clock import NS
from opusmon.triage.explain import explain
from opusmon.triage.narrate import (
    SYSTEM,
    NarrateError,
    address,
    ask,
    parts,
    preview,
    rendered,
    shown,
    to_json,
)
from opusmon.triage.narrate_check import doubts
from opusmon.triage.narrate_redact import WITHHELD, scrub
from opusmon.triage.sequence import render

from .explain_session import Planted, ns, nvlink, stream

KEY = "sk-ant-test-0123456789abcdef"
PATH = "/v1/messages"
MODEL = "claude-test-1"
HEADER_SECRET = "hunter2hunter2"


def incident(process="python", model="acme-secret-70b", mark="call Bob, password=hunter2"):
    planted = Planted(120, 1)
    nvlink(planted, 0, (7,), 62.3, links=8)
    stream(planted, 65.4, process=process)
    planted.requests(
        12, lambda t: 0.4 + 0.64 * (t > 69.2) + 0.02 * planted.rng.normal(size=len(t)), model=model
    )
    planted.channel("gpu_event", t=[66.9], gpu=0, gi=-1, kind="xid", code=79.0, detail="off the bus")
    from opusmon.recording.store import Mark

    planted.window.add_mark(Mark(ns(75), ns(75), "bookmark", mark))
    return explain(planted.window, ns(60), ns(120))


@pytest.fixture(scope="module")
def told():
    return incident()


def answer(hypotheses=(), checks=(), **more):
    text = json.dumps({"hypotheses": list(hypotheses), "checks": list(checks)})
    body = {
        "id": "msg_1", "type": "message", "role": "assistant", "model": MODEL, "stop_reason": "end_turn",
        "stop_sequence": None, "content": [{"type": "text", "text": text}],
        "usage": {"input_tokens": 900, "output_tokens": 120},
    }  # fmt: skip
    return body | more


async def asked(prompt, *scripts, **env):
    """The reading, and the requests that the server saw."""
    async with FakeUpstream() as upstream:
        upstream.on(PATH, *scripts)
        environ = {"ANTHROPIC_API_KEY": KEY, "ANTHROPIC_BASE_URL": upstream.url, **env}
        try:
            return await asyncio.to_thread(ask, prompt, environ, 5.0), upstream.seen
        except NarrateError as error:
            return error, upstream.seen


# -- what leaves


def test_the_evidence_is_the_reports_lines_with_stand_ins_for_names(told):
    prompt = preview(told, MODEL, env={})
    lines = list(prompt.evidence.values())
    assert list(prompt.evidence) == [f"E{n}" for n in range(1, len(lines) + 1)]
    assert "gpu 0 link 7 NVLink TX halves (12.1 -> 6.0 GB/s)" in lines[0]
    assert "name-1 1234 stream 0x7 waits double" in lines[1]
    assert "XID 79" in lines[2]
    assert "TTFT p95 (proxy, name-2)" in lines[3]
    assert dict(prompt.names) == {"name-1": "python", "name-2": "acme-secret-70b"}
    assert "acme" not in prompt.text
    assert "python" not in prompt.text


def test_names_go_when_asked_for(told):
    prompt = preview(told, MODEL, mask=False, env={})
    assert "python 1234" in prompt.text
    assert "acme-secret-70b" in prompt.text
    assert prompt.names == {}


def test_free_text_of_a_mark_never_goes(told):
    for mask in (True, False):
        prompt = preview(told, MODEL, mask=mask, env={})
        assert "Bob" not in prompt.text
        assert f"bookmark: {WITHHELD}" in prompt.text


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("secret", ["sk-ant-api03-AbCdEf123456", "eyJhbGciOiJIUzI1NiJ9.x", HEADER_SECRET])
def test_a_planted_secret_is_nowhere_in_what_is_sent_or_shown(mask, secret):
    env = {"MY_API_TOKEN": HEADER_SECRET, "HOME": "/home/me"}
    told = incident(process=f"srv --key={secret}", model=f"m-{secret}", mark=secret)
    prompt = preview(told, MODEL, mask=mask, env=env)
    for text in (json.dumps(prompt.body()), shown(prompt, env), repr(prompt)):
        assert secret not in text


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("key sk-ant-abc123XYZ here", f"key {WITHHELD} here"),
        ("Authorization: Bearer abc", WITHHELD),
        ("api_key=abc x", f"{WITHHELD} x"),
        ("GET /v1?token=1&b=2", f"GET {WITHHELD}"),
        ("id 0123456789abcdef0123456789abcdef0123", f"id {WITHHELD}"),
        (
            "gpu 0 link 7 NVLink TX halves (12.1 -> 6.0 GB/s)",
            "gpu 0 link 7 NVLink TX halves (12.1 -> 6.0 GB/s)",
        ),
        ("generated tokens (3.1 -> 6.2 k/s)", "generated tokens (3.1 -> 6.2 k/s)"),
        ("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"),
    ],
)
def test_what_looks_like_a_secret_is_withheld_and_nothing_else(text, left):
    assert scrub(text, {}) == left


def test_the_prompt_is_shown_with_its_size_before_anything_is_sent(told):
    prompt = preview(told, MODEL, env={})
    text = shown(prompt, {"ANTHROPIC_API_KEY": KEY})
    assert (
        f"to {MODEL} at api.anthropic.com, with the key of ANTHROPIC_API_KEY: {prompt.size_b:,} bytes" in text
    )
    assert all(line in text for line in prompt.evidence.values())
    assert SYSTEM in text
    assert KEY not in text
    assert prompt.size_b < 10_000


async def test_what_is_sent_is_what_was_shown_and_no_more(told):
    prompt = preview(told, MODEL, env={})
    reading, seen = await asked(prompt, Script.json(answer()))
    body = json.loads(seen[0].body)
    assert len(seen) == 1
    assert body["messages"] == [{"role": "user", "content": prompt.text}]
    assert body["system"] == SYSTEM
    assert body["max_tokens"] == prompt.max_tokens <= 4096
    assert body["model"] == MODEL
    assert set(body) == {"messages", "system", "max_tokens", "model", "output_config"}
    assert f"Bearer {KEY}" in seen[0].values("authorization") or KEY in seen[0].values("x-api-key")
    assert (reading.input_tokens, reading.output_tokens) == (900, 120)


# -- what comes back


async def test_a_supported_hypothesis_is_shown_with_its_evidence_and_an_unsupported_one_is_marked(told):
    prompt = preview(told, MODEL, env={})
    script = Script.json(
        answer(
            [
                {
                    "claim": "Likely link 7 of gpu 0 halved, so waits of name-1 doubled.",
                    "evidence": ["E1", "E2"],
                },
                {"claim": "Likely gpu 3 ran out of memory at 98 %.", "evidence": ["E1"]},
                {"claim": "Somebody deployed.", "evidence": []},
                {"claim": "A driver fault.", "evidence": ["E99"]},
            ],
            ["nvidia-smi nvlink -e -i 0", "ask name-2's \x1b[31mowner"],
        )
    )
    reading, _ = await asked(prompt, script)
    first, second, third, fourth = reading.hypotheses
    assert first.doubts == ()
    assert first.claim == "Likely link 7 of gpu 0 halved, so waits of python doubled."
    assert second.doubts == ("gpu 3 is not in what it cites", "98 is not in what it cites")
    assert third.doubts == ("it cites no evidence",)
    assert fourth.doubts == ("E99 is not in the evidence",)
    text = rendered(reading, prompt)
    assert text.count("[UNSUPPORTED:") == 3
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "E1 " in text
    body = to_json(reading)
    assert [one["supported"] for one in body["hypotheses"]] == [True, False, False, False]
    assert body["checks"] == ["nvidia-smi nvlink -e -i 0", "ask acme-secret-70b's ?[31mowner"]


EVIDENCE = {
    "E1": "14:02:11 +-0.8 s gpu 0 link 7 NVLink TX halves (12.1 -> 6.0 GB/s)",
    "E2": "14:02:16 +-0.8 s TTFT p95 (proxy) +640 ms (410 -> 1050 ms)",
    "E3": "14:02:20 event: gpu 1: XID 79 (off the bus)",
    "E4": "14:02:21 gpu 1, per link NVLink RX stops (22.3 -> 0.0 GB/s; 3 of 18 links: 7, 9, 12)",
}


@pytest.mark.parametrize(
    ("claim", "cited", "why"),
    [
        ("Link 7 fell from 12.1 to 6.0 GB/s", ["E1"], ()),
        ("Link 7 lost 50 % (6.1 GB/s)", ["E1"], ()),
        ("TTFT rose 2.6 times, by 0.64 s", ["E2"], ()),
        ("TTFT p95 followed 5 s after the link, at 14:02:16", ["E1", "E2"], ()),
        ("Both GPUs of this H200 host, and 1 link", ["E1"], ()),
        ("Link 9 stopped", ["E4"], ()),
        ("Link 8 stopped", ["E4"], ("Link 8 is not in what it cites",)),
        ("gpu 1 failed", ["E1"], ("gpu 1 is not in what it cites",)),
        ("XID 79 came first", ["E1"], ("XID 79 is not in what it cites",)),
        ("XID 48 came first", ["E3"], ("XID 48 is not in what it cites",)),
        ("TTFT rose by 900 ms", ["E2"], ("900 is not in what it cites",)),
        ("It began at 13:59:00", ["E1"], ("13:59:00 is not in what it cites",)),
        ("As E7 shows, link 7 fell", ["E1"], ("E7 is not in the evidence",)),
        ("The network is slow", [], ("it cites no evidence",)),
    ],
)
def test_a_claim_stands_on_what_it_cites_or_is_doubted(claim, cited, why):
    assert doubts(claim, cited, EVIDENCE) == why


async def test_hostile_answers_are_cut_cleaned_and_never_trusted(told):
    prompt = preview(told, MODEL, env={})
    body = {
        "hypotheses": [
            {"claim": "x" * 5000, "evidence": ["E1"] * 500},
            {"claim": 7, "evidence": "E1"},
            "text",
            *({"claim": f"h{n}", "evidence": [None, 3]} for n in range(50)),
        ],
        "checks": ["\x1b]0;owned\x07rm -rf", 5, *["c"] * 50],
    }
    content = [{"type": "text", "text": json.dumps(body)}]
    reading, _ = await asked(prompt, Script.json(answer(content=content)))
    assert len(reading.hypotheses) == 6
    assert len(reading.checks) == 6
    assert len(reading.hypotheses[0].claim) == 600
    assert len(reading.hypotheses[0].evidence) == 20
    assert all(one.doubts for one in reading.hypotheses[1:])
    assert "\x1b" not in rendered(reading, prompt)


# -- what goes wrong


@pytest.mark.parametrize(
    ("script", "word"),
    [
        (Script.json({"type": "error", "error": {"type": "authentication_error", "message": KEY}}, 401), "KEY"),
        (Script.json({"type": "error", "error": {"type": "not_found_error", "message": "x"}}, 404), "--model"),
        (Script.json({"type": "error", "error": {"type": "invalid_request_error", "message": "x"}}, 400), "structured"),
        (Script.json(answer(stop_reason="max_tokens")), "did not fit"),
        (Script.json(answer(stop_reason="refusal")), "declined"),
        (Script.json(answer(content=[{"type": "text", "text": "I think ..."}])), "form"),
        (Script.json(answer(content=[])), "form"),
        (Script.json({"hello": 1}), "usable"),
        (Script.json([1, 2]), "usable"),
        (Script([b"<html>"], headers=[("Content-Type", "text/html")]), "usable"),
        (Script([b"{"], headers=[("Content-Type", "application/json")]), "usable"),
    ],
)  # fmt: skip
async def test_trouble_is_one_line_without_what_the_server_said(told, script, word):
    error, seen = await asked(preview(told, MODEL, env={}), script)
    assert isinstance(error, NarrateError)
    assert word in str(error)
    assert KEY not in str(error)
    assert "\n" not in str(error)
    assert len(seen) == 1


async def test_a_redirect_is_not_followed_with_the_key(told):
    async with FakeUpstream() as elsewhere:
        elsewhere.on(PATH, Script.json(answer()))
        script = Script([], 307, [("Location", elsewhere.url + PATH)], "length")
        error, seen = await asked(preview(told, MODEL, env={}), script)
        assert str(error) == "the server answered 307; try again later"
        assert (len(seen), elsewhere.seen) == (1, [])


def test_without_a_key_the_report_stands_alone(told):
    given = parts(told, preview(told, MODEL, env={}), env={})
    assert next(given) == render(told)
    with pytest.raises(NarrateError) as caught:
        next(given)
    assert str(caught.value) == "--llm needs a key: set ANTHROPIC_API_KEY; the report above needs none"


def test_without_a_network_the_report_and_the_prompt_have_been_shown(told):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    prompt, env = preview(told, MODEL, env={}), {"ANTHROPIC_API_KEY": KEY, "ANTHROPIC_BASE_URL": url}
    given = parts(told, prompt, env=env)
    assert (next(given), next(given)) == (render(told), shown(prompt, env))
    with pytest.raises(NarrateError, match="cannot reach") as caught:
        next(given)
    assert KEY not in str(caught.value)


def test_a_dry_run_shows_and_sends_nothing(told):
    prompt = preview(told, MODEL, env={})
    for env in ({}, {"ANTHROPIC_API_KEY": KEY, "ANTHROPIC_BASE_URL": "http://127.0.0.1:1"}):
        assert list(parts(told, prompt, dry_run=True, env=env)) == [render(told), shown(prompt, env)]


async def test_the_reading_comes_last(told):
    prompt = preview(told, MODEL, env={})
    async with FakeUpstream() as upstream:
        upstream.on(PATH, Script.json(answer(checks=["look at E1"])))
        env = {"ANTHROPIC_API_KEY": KEY, "ANTHROPIC_BASE_URL": upstream.url}
        given = await asyncio.to_thread(lambda: list(parts(told, prompt, env=env)))
    assert given[:2] == [render(told), shown(prompt, env)]
    assert "look at E1" in given[2]


def test_no_model_is_said_before_anything_is_sent(told):
    with pytest.raises(NarrateError, match="--model"):
        ask(preview(told, "", env={}), {"ANTHROPIC_API_KEY": KEY, "ANTHROPIC_BASE_URL": "http://127.0.0.1:1"})


@pytest.mark.parametrize(
    "url",
    [
        "http://api.example.com",
        "ftp://h",
        "https://u:p@h",
        "https://h/?k=1",
        "https://h:99999",
        "nonsense",
        "https://",
    ],
)
def test_addresses_that_would_leak_or_cannot_work_are_refused(url):
    with pytest.raises(NarrateError, match="ANTHROPIC_BASE_URL"):
        address({"ANTHROPIC_BASE_URL": url})


def test_addresses_that_work():
    assert address({}) == "https://api.anthropic.com"
    assert address({"ANTHROPIC_BASE_URL": "http://127.0.0.1:8000"}) == "http://127.0.0.1:8000"
    assert address({"ANTHROPIC_BASE_URL": "https://gw.example.com/x"}) == "https://gw.example.com/x"


def test_a_comparison_without_changes_has_no_evidence_to_send():
    planted = Planted(120, 3)
    nvlink(planted, 0)
    prompt = preview(explain(planted.window, ns(60), ns(120)), MODEL, env={})
    assert prompt.evidence == {}
    assert "Nothing changed." in prompt.text
    assert ns(60) - ns(0) == 60 * NS

"""`opusmon record` told to watch requests: real processes, real clients."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from pathlib import Path

import aiohttp
import anthropic
import fake_upstream as up
import pytest
from fake_upstream import FakeUpstream, Script
from sessions import DATA

from opusmon import config
from opusmon.cli.watch import changes

from .api_runs import (
    ASKED,
    KEY,
    LIMIT_S,
    LOCAL,
    ended,
    free_port,
    kept,
    listening,
    nowhere,
    opusmon,
    rows,
    running,
)


def span() -> dict[str, object]:
    """What the anthropic SDK sends of a call that took 2 s and has just ended."""
    texts = {"gen_ai.request.model": "claude-otlp", "gen_ai.prompt": "SECRET-PROMPT", "session": KEY}
    attributes = [{"key": name, "value": {"stringValue": value}} for name, value in texts.items()]
    attributes.append({"key": "gen_ai.usage.output_tokens", "value": {"intValue": "42"}})
    ended_ns = time.time_ns()
    record = {
        "traceId": "0" * 31 + "1",
        "spanId": "0" * 15 + "1",
        "name": "anthropic.messages.create",
        "startTimeUnixNano": str(ended_ns - 2_000_000_000),
        "endTimeUnixNano": str(ended_ns),
        "attributes": attributes,
    }
    return {"resourceSpans": [{"scopeSpans": [{"spans": [record]}]}]}


async def test_record_watches_requests_from_every_side(tmp_path: Path) -> None:
    """One process with a proxy, a canary, an OTLP receiver, an engine to scrape and an objective."""
    path, proxied, taking = tmp_path / "r.opusmon", free_port(), free_port()
    page = (DATA / "engine_pages/vllm.prom").read_bytes()
    async with FakeUpstream() as upstream:
        upstream.on("/v1/messages", Script(up.STREAM))
        upstream.on("/metrics", Script([page], headers=[("Content-Type", "text/plain")], framing="length"))
        words = (
            *("record", "-o", path, "--only", "proxy,canary,otlp,engine", "--no-discover"),
            *("--proxy", upstream.url, "--proxy-listen", f"127.0.0.1:{proxied}"),
            *("--probe", upstream.url, "--probe-model", "claude-canary", "--probe-per-hour", "3600"),
            *("--otlp-listen", f"127.0.0.1:{taking}", "--engine", upstream.url),
            *("--slo", "ttft_p95<800ms", "--slo", "errors<1%"),
        )
        async with running(tmp_path, *words) as process:
            await asyncio.gather(listening(proxied), listening(taking))
            client = anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{proxied}", api_key=KEY)
            async with client, client.messages.stream(**ASKED) as stream:
                assert await stream.get_final_text() == "onetwothree"
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"http://127.0.0.1:{taking}/v1/traces", json=span()) as answer,
            ):
                assert answer.status == 200
            wanted = {"proxy", "canary", "otlp"}
            await kept(
                path,
                lambda: wanted <= {one["source"] for one in rows(path, "request")} and rows(path, "engine"),
            )
            process.send_signal(signal.SIGINT)
            done = await ended(process)
    assert done.status == 0
    assert "canary: claude-canary at 127.0.0.1" in done.err.splitlines()[0]  # what it spends, before it does
    by_source = {one["source"]: one for one in rows(path, "request")}
    assert {name: one["model"] for name, one in by_source.items()} == {
        "proxy": "claude-test-1",
        "canary": "claude-canary",
        "otlp": "claude-otlp",
    }
    assert (by_source["otlp"]["e2e_ns"], by_source["otlp"]["output_tokens"]) == (2e9, 42)
    assert {one["kind"] for one in rows(path, "engine")} == {"vllm"}
    told = [one["reason"] for one in rows(path, "status") if one["collector"] == "slo"]
    assert set(told) == {"ttft_p95<800ms", "errors<1%"}
    for secret in (KEY, "SECRET-PROMPT", "onetwothree"):
        nowhere(secret, path, done.out, done.err)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--probe", LOCAL), "no model to ask"),
        (("--probe", "nonsense", "--probe-model", "m"), "not an http address"),
        (("--probe", "http://10.1.2.3", "--probe-model", "m"), "would show the key"),
        (("--probe", LOCAL, "--probe-model", "m", "--probe-per-hour", "1e9"), "more than 0, 3600 at most"),
        (("--probe", LOCAL, "--probe-model", "m", "--probe-per-hour", "nan"), "more than 0, 3600 at most"),
        (("--slo", "ttft<1"), "--slo ttft<1: "),
        (("--slo", ""), "--slo : "),
        (("--stall-threshold", "soon"), "'soon' is not a duration"),
        (("--probe", LOCAL, "--probe-model", "m", "--probe-per-hour", "0"), "more than 0, 3600 at most"),
        (("--probe-model", "m"), "--probe URL"),
        (("--only", "proxy"), "runs only when asked for"),
    ],
)
async def test_what_cannot_be_watched_is_one_line(
    here, tmp_path: Path, words: tuple[str, ...], line: str
) -> None:
    done = await here("record", "--duration", "20s", "-o", tmp_path / "r.opusmon", *words)
    assert line in done.problem


async def test_a_wrong_value_of_the_config_file_is_not_blamed_on_the_command_line(
    here, tmp_path: Path
) -> None:
    done = await here("record", "--slo", "soon")
    assert "config.toml" not in done.problem
    file = config.path()
    assert tmp_path in file.parents
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('slo = ["soon"]\n')
    done = await here("record")
    assert "--slo soon: " in done.problem
    assert done.problem.endswith(f" (options of {file} are in force)")


async def test_a_wrong_limit_is_not_blamed_on_the_config_file(here) -> None:
    folder = config.path().parent
    folder.mkdir(parents=True, exist_ok=True)
    config.path().write_text('span = "5m"\n')
    (folder / "triage.toml").write_text("no_such = 1\n")
    done = await here("live", "--screenshot", "/dev/null")
    assert done.problem.startswith(f"{folder}/triage.toml: ")
    assert "config.toml" not in done.problem


async def test_what_is_typed_takes_the_place_of_what_the_config_file_says(here) -> None:
    file = config.path()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('slo = ["soon", "sooner"]\n')
    done = await here("record", "--slo", "late", "--slo", "later")
    assert done.problem.startswith("--slo late: ")


async def test_record_says_what_does_not_run_beside_the_rest(tmp_path: Path) -> None:
    """A port in use must not first be noticed in the recording, the next day."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        words = ("--only", "host,proxy", "--proxy", LOCAL, "--proxy-listen", address)
        async with running(tmp_path, "record", *words, "-o", tmp_path / "r.opusmon") as process:
            assert process.stderr is not None
            async with asyncio.timeout(LIMIT_S):
                while not (line := (await process.stderr.readline()).decode()).startswith("opusmon: proxy"):
                    pass
    assert line.startswith(f"opusmon: proxy: {address} is in use. choose another address; ss -ltnp")


async def test_what_only_leaves_out_is_said_and_spends_nothing(tmp_path: Path) -> None:
    words = ("--only", "host", "--duration", "1s", "--proxy", LOCAL, "--probe", LOCAL, "--probe-model", "m")
    done = await opusmon(tmp_path, "record", "-o", tmp_path / "r.opusmon", *words)
    assert done.status == 0
    assert "proxy was set up and does not run: --only names host" in done.err
    assert "canary was set up and does not run: --only names host" in done.err
    assert "at most" not in done.err


def test_what_does_not_run_is_told_once_and_when_it_is_back() -> None:
    taken = {"proxy": "proxy: in use"}
    assert changes({}, taken) == ["proxy: in use"]
    assert changes(taken, dict(taken)) == []
    assert changes(taken, {"proxy": "proxy: other"}) == ["proxy: other"]
    assert changes(taken, {}) == ["proxy: runs again"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--proxy", "nonsense"), "--proxy nonsense: the upstream is no http or https URL"),
        (("--otlp-listen", "nonsense"), "--otlp-listen nonsense"),
        (("--engine", "http://u:p@127.0.0.1:1/metrics"), "--engine"),
        (("--proxy", "http://127.0.0.1:1", "--proxy-listen", "0.0.0.0:1"), "--proxy-listen 0.0.0.0:1"),
        (("--otlp-listen", "0.0.0.0:1"), "write 127.0.0.1:1, and reach it from elsewhere by ssh -L"),
    ],
)
async def test_an_address_that_cannot_be_meant_is_refused_before_anything_is_recorded(
    tmp_path: Path, words: tuple[str, ...], problem: str
) -> None:
    path = tmp_path / "host.opusmon"
    done = await opusmon(tmp_path, "record", "-o", path, "--only", "host", "--duration", "2s", *words)
    assert problem in done.problem
    assert "u:p" not in done.err
    assert not path.exists()

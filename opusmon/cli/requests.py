"""The verbs about API requests."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from opusmon.cli.watch import check_proxy, duration_s_of, headless, open_session
from opusmon.cli.words import ERROR, OK, CliError, UsageError

if TYPE_CHECKING:
    from opusmon.collectors.api.request import Request
    from opusmon.collectors.canary.endpoint import CanaryConfig


def proxy(args: argparse.Namespace) -> int:
    """`opusmon proxy`: the recorder with nothing but the proxy."""
    from opusmon.collectors.base import LEFT_OUT, Unavailable
    from opusmon.session import plan

    check_proxy({"--upstream": args.upstream, "--listen": args.listen, "--allow": ",".join(args.allow)})
    duration_s = duration_s_of(args)
    options = {"upstream": args.upstream, "listen": args.listen, "allow": args.allow}
    left_out = Unavailable(
        f"{LEFT_OUT}: opusmon proxy runs the proxy only", f"opusmon --proxy {args.upstream}"
    )
    wanted = plan(["proxy"], {"proxy": options}, left_out=left_out)
    session = open_session(wanted, args, keep_window=False, process="record")
    print(f"opusmon: once it listens, {how_to_reach(args.listen)}", file=sys.stderr)
    return headless(session, duration_s)


def how_to_reach(address: str) -> str:
    """What its clients must be told, for an address that `check_proxy` has accepted."""
    from opusmon.collectors.proxy.rules import parse_listen

    listen = parse_listen(address)
    if listen.path:
        return (
            f"curl uses it with --unix-socket {listen.path} http://localhost/v1/messages, and the anthropic SDK with"
            " base_url='http://localhost' and http_client=anthropic.DefaultHttpxClient("
            f"transport=httpx2.HTTPTransport(uds={listen.path!r}))"
        )
    if not listen.port:
        return "`opusmon dump FILE --channel status` says which port it found free"
    return f"clients use http://{listen.text}; for anthropic: export ANTHROPIC_BASE_URL=http://{listen.text}"


def probe(args: argparse.Namespace) -> int:
    """`opusmon probe`: a few requests, or a sweep over prompt lengths."""
    import asyncio

    from opusmon.collectors.canary.endpoint import CanaryConfig, check

    config = check(CanaryConfig(args.base_url, args.model, max_tokens=args.max_tokens))
    if args.output is not None:
        _check_place(args.output)
    requests: list[Request] = []
    work = _sweep(config, args, requests) if args.sweep else _count(config, args, requests)
    status = OK
    try:
        status = asyncio.run(work)
    except KeyboardInterrupt:
        status = ERROR
    if args.output is not None and requests:
        _keep(args, requests)
    return status


def _check_place(path: Path) -> None:
    """Refuse a file that cannot be made, before tokens are spent on what it should keep."""
    if path.exists():
        raise CliError(f"{path} exists already: name a new file")
    folder = next(one for one in path.absolute().parents if one.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise CliError(f"{path} cannot be made: {folder} is no folder that you may write to")


async def _count(config: CanaryConfig, args: argparse.Namespace, requests: list[Request]) -> int:
    from opusmon.collectors.canary.report import request_json, request_line, summary
    from opusmon.collectors.canary.turns import announce_count, ask_in_turn

    print(f"opusmon: {announce_count(config, args.count)}", file=sys.stderr)

    def told(request: Request) -> None:
        requests.append(request)
        print(json.dumps(request_json(request)) if args.json else request_line(request), flush=True)

    try:
        _, why = await ask_in_turn(config, args.count, on_request=told)
    finally:
        if requests and not args.json:
            print(summary(requests), flush=True)
    return _ended(why, requests)


async def _sweep(config: CanaryConfig, args: argparse.Namespace, requests: list[Request]) -> int:
    from opusmon.collectors.canary.report import render, request_line
    from opusmon.collectors.canary.sweep import Sweep, announce_sweep, as_json

    work = Sweep(config, _sizes(args.sweep), args.repeats)
    print(f"opusmon: {announce_sweep(config, work.sizes, args.repeats)}", file=sys.stderr)

    def told(request: Request) -> None:
        requests.append(request)
        print(f"opusmon: {request.label}: {request_line(request)}", file=sys.stderr)

    try:
        await work.run(on_request=told)
    finally:  # ctrl+c too: what was measured has been paid for
        if requests:
            result = work.result()
            print(json.dumps(as_json(result), indent=2) if args.json else render(result), flush=True)
    return _ended(work.aborted, requests)


def _ended(why: str, requests: Sequence[Request]) -> int:
    """Exit status: an error when nothing was answered, or the budget ended it."""
    if why:
        print(f"opusmon: {why}", file=sys.stderr)
    return OK if not why and any(request.outcome == "ok" for request in requests) else ERROR


def _sizes(text: str) -> list[int]:
    """Token counts of `1k,4k,16k`.

    Raises:
        UsageError: it is something else.
    """
    found = []
    for word in text.lower().split(","):
        scale = 1024 if word.endswith("k") else 1
        number = word.removesuffix("k")
        if not (number.isascii() and number.isdecimal()):
            raise UsageError(f"--sweep {text}: write lengths in tokens, as 1k,4k,16k")
        found.append(int(number) * scale)
    return found


def _keep(args: argparse.Namespace, requests: Sequence[Request]) -> None:
    """Write the requests to a recording."""
    from opusmon.clock import Anchors, SystemClock
    from opusmon.collectors.api.request import Keeper, request_batch
    from opusmon.recording import Recorder
    from opusmon.schema import StringTable
    from opusmon.session import describe
    from opusmon.text import counted

    strings, clock = StringTable(), SystemClock()
    recorder = Recorder(args.output, strings=strings, clock=clock, session=describe())
    with contextlib.closing(recorder):
        anchor = Anchors().observe(clock.anchor())
        if anchor is not None:
            recorder.anchor(anchor)
        recorder.push(request_batch(requests, strings, Keeper()))
    print(f"opusmon: {counted(len(requests), 'request')} in {args.output}", file=sys.stderr)

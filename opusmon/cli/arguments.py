"""Every verb and option, with its help."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

from opusmon import __version__
from opusmon.cli import check, files, host, requests, triage, watch
from opusmon.cli.words import pid, speed

EPILOG = """\
examples:
  opusmon                          watch this host and record
  opusmon demo                     a recorded incident on two H200s; no GPU, no root, no network
  opusmon record -o night.opusmon --duration 8h
  opusmon replay night.opusmon --at 03:12
  opusmon replay --follow FILE     watch what another process records
  opusmon triage night.opusmon     what was wrong, since when, and what to look at
  opusmon explain night.opusmon --from 03:10 --to 03:20
  opusmon dump night.opusmon --channel gpu --from -10m --format csv
  opusmon --proxy http://127.0.0.1:8000   and point clients at http://127.0.0.1:8788
  opusmon probe --base-url http://127.0.0.1:8000 --model M --sweep 1k,4k,16k
  opusmon check graph serve.py:step   can it be captured as a CUDA Graph?
  opusmon doctor                   what is missing on this host and how to get it

times: 10m (after the start), -90s (before the end), 14:03, 14:03:21, +0:30, ISO 8601, epoch seconds
defaults for live and record: config.toml in ~/.config/opusmon, for example  slo = ["ttft_p95<800ms"]
exit status: 0 ok, 1 error, 2 usage, 3 findings
"""


def parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser, and those of its verbs by name."""
    top = argparse.ArgumentParser(
        prog="opusmon",
        description="Terminal monitor and flight recorder for hosts that serve LLMs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"opusmon {__version__}")
    top.set_defaults(debug=False)
    verbs = top.add_subparsers(metavar="VERB", title="verbs")
    _watching(verbs)
    _requests(verbs)
    _files(verbs)
    check.arguments(_verb(verbs, "check", check.check, "will your torch code run on the fast path?"))
    _host(verbs)
    return top, verbs.choices


def _verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    help_text: str,
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=help_text, description=help_text[0].upper() + help_text[1:] + ".")
    parser.add_argument("--debug", action="store_true", help="show a traceback instead of one line")
    parser.set_defaults(run=run)
    return parser


def _watching(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    live = _verb(
        verbs, "live", watch.live, "watch this host on the screen and record (what `opusmon` alone does)"
    )
    _collecting(live)
    _screen(live)
    live.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="record here (default: a new file in the state folder)",
    )
    live.add_argument(
        "--no-record", action="store_true", help="keep nothing on disk; scrub back 15 minutes at most"
    )
    record = _verb(verbs, "record", watch.record, "record this host without a screen")
    _collecting(record)
    record.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: a new file in the state folder"
    )
    record.add_argument(
        "--duration", metavar="TIME", help="stop after this long (10m); default: until interrupted"
    )
    stream = _verb(
        verbs, "stream", watch.stream, "write one collector's batches to stdout, for another opusmon to read"
    )
    stream.add_argument("--only", required=True, metavar="COLLECTOR", help="one collector's name")
    stream.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="for that collector (repeatable)"
    )
    stream.add_argument("--interval", default="1s", metavar="TIME", help="sampling interval (default 1s)")
    _pids(stream)
    stream.add_argument("--compress", action="store_true", help="for a network")


def _pids(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pid",
        type=pid,
        action="append",
        default=[],
        metavar="N",
        help="watch only this process (repeatable)",
    )


def _collecting(parser: argparse.ArgumentParser) -> None:
    _pids(parser)
    parser.add_argument(
        "--only",
        metavar="NAMES",
        default="",
        help="collectors to run, comma-separated: gpu, host, engine, streams, stalls (the last two need root), and of what"
        " other options set up: proxy, canary, otlp, l2",
    )
    parser.add_argument(
        "--interval", default="1s", metavar="TIME", help="sampling interval, 250ms to 5s (default 1s)"
    )
    _keeping(parser)
    _probing(parser)
    _measuring_requests(parser)


def _keeping(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--retain", default="24h", metavar="TIME", help="forget rows older than this (default 24h)"
    )
    parser.add_argument(
        "--retain-size", default="2GiB", metavar="SIZE", help="keep the file under this (default 2GiB)"
    )


def _probing(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("probes in the kernel (streams, stalls) and hardware counters")
    group.add_argument(
        "--sudo", action="store_true", help="let sudo run the eBPF collectors; the screen stays without root"
    )
    group.add_argument(
        "--probe-budget",
        type=float,
        metavar="PERCENT",
        help="of one core that counting and timing launches may take from the server (default 1)",
    )
    group.add_argument(
        "--stall-threshold", metavar="TIME", help="shortest wait that is a stall (default 5ms)"
    )
    group.add_argument(
        "--deep", action="store_true", help="L2 and HBM bytes from the hardware counters, at a price"
    )
    group.add_argument(
        "--bank-conflicts",
        action="store_true",
        help="shared-memory bank conflicts instead of those (implies --deep)",
    )


def _measuring_requests(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("API latency")
    group.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="URL",
        help="scrape this engine's metrics (repeatable); engines on this host are found by themselves",
    )
    group.add_argument("--no-discover", action="store_true", help="look for no engines on this host")
    group.add_argument("--proxy", metavar="URL", help="forward API requests to this server and time them")
    group.add_argument(
        "--proxy-listen", metavar="ADDRESS", help="127.0.0.1:PORT or unix:PATH (default 127.0.0.1:8788)"
    )
    group.add_argument(
        "--proxy-allow",
        action="append",
        default=[],
        metavar="PATHS",
        help="forward these as well: /v1/rerank,/api/* (repeatable)",
    )
    group.add_argument(
        "--probe", metavar="URL", help="send small requests to this Messages endpoint; spends tokens"
    )
    group.add_argument("--probe-model", metavar="MODEL", help="model for --probe")
    group.add_argument("--probe-per-hour", type=float, metavar="N", help="requests an hour (default 12)")
    group.add_argument(
        "--otlp-listen", metavar="ADDRESS", help="take OTLP over HTTP here, for example 127.0.0.1:4318"
    )
    group.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="TERMS",
        help="objective to keep watch over, for example 'ttft_p95<800ms' (repeatable)",
    )


def _screen(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--span", default="5m", metavar="TIME", help="time range of the histories (default 5m)"
    )
    parser.add_argument("--theme", default="", metavar="NAME", help="see `opusmon themes`")
    parser.add_argument(
        "--glyphs",
        choices=("auto", "braille", "block", "ascii"),
        default="auto",
        help="characters to draw with",
    )
    parser.add_argument(
        "--screenshot", type=Path, metavar="OUT.svg", help="draw one frame without a terminal and exit"
    )
    parser.add_argument(
        "--size", default="160x50", metavar="COLSxLINES", help="size of the screenshot (default 160x50)"
    )


def _requests(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    proxy = _verb(verbs, "proxy", requests.proxy, "forward API requests to one server, time and record them")
    proxy.add_argument(
        "--upstream", required=True, metavar="URL", help="the server, for example http://127.0.0.1:8000"
    )
    proxy.add_argument(
        "--listen",
        default="127.0.0.1:8788",
        metavar="ADDRESS",
        help="127.0.0.1:PORT or unix:PATH (default 127.0.0.1:8788)",
    )
    proxy.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="PATHS",
        help="forward these as well: /v1/rerank,/api/* (repeatable)",
    )
    proxy.add_argument("--duration", metavar="TIME", help="stop after this long; default: until interrupted")
    proxy.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: a new file in the state folder"
    )
    _keeping(proxy)
    probe = _verb(
        verbs,
        "probe",
        requests.probe,
        "send a few requests to a Messages endpoint and time them; spends tokens",
    )
    probe.epilog = (
        "The key is that of ANTHROPIC_API_KEY, or the token of ANTHROPIC_AUTH_TOKEN, in the environment; engines on this"
        " host need none."
    )
    probe.add_argument(
        "--base-url",
        required=True,
        metavar="URL",
        help="without /v1/messages, for example https://api.anthropic.com",
    )
    probe.add_argument("--model", required=True, metavar="MODEL", help="as the server names it")
    probe.add_argument(
        "--count", type=int, default=5, metavar="N", help="requests, one after another (default 5)"
    )
    probe.add_argument(
        "--max-tokens", type=int, default=16, metavar="N", help="most tokens of an answer (default 16)"
    )
    probe.add_argument(
        "--sweep",
        metavar="LENGTHS",
        help="TTFT against prompt length, for example 1k,4k,16k,64k; finds the knee",
    )
    probe.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="requests per length of a sweep (default 3)"
    )
    probe.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="keep the requests in a new recording"
    )
    probe.add_argument("--json", action="store_true", help="for programs")


def _files(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    replay = _verb(verbs, "replay", files.replay, "show a recording, also one that is still being written")
    replay.add_argument("file", type=Path, metavar="FILE")
    replay.add_argument("--at", metavar="TIME", help="where to start, paused there")
    replay.add_argument(
        "--speed", type=speed, default=1.0, metavar="N", help="session seconds per second (default 1)"
    )
    replay.add_argument("--follow", action="store_true", help="stay at the newest row while it is written")
    _screen(replay)
    demo = _verb(
        verbs, "demo", files.demo, "replay the bundled session: a server on two H200s that runs out of memory"
    )
    demo.add_argument("--at", metavar="TIME", help="where to start, paused there")
    demo.add_argument(
        "--speed", type=speed, default=1.0, metavar="N", help="session seconds per second (default 1)"
    )
    _screen(demo)
    info = _verb(verbs, "info", files.info, "what a recording holds, and whether all of it can be read")
    info.add_argument("file", type=Path, metavar="FILE")
    info.add_argument("--json", action="store_true", help="for programs")
    dump = _verb(verbs, "dump", files.dump, "rows of one channel as text, on stdout")
    dump.add_argument("file", type=Path, metavar="FILE")
    dump.add_argument("--channel", required=True, metavar="C", help="`opusmon info FILE` lists them")
    dump.add_argument("--from", dest="begin", metavar="TIME", help="rows after this time")
    dump.add_argument("--to", dest="end", metavar="TIME", help="rows up to this time")
    dump.add_argument("--format", choices=("csv", "ndjson"), default="csv", help="default csv")
    _conclusions(verbs)
    _explaining(verbs)
    salvage = _verb(
        verbs, "salvage", files.rescue, "rescue what a truncated or damaged recording still holds"
    )
    salvage.add_argument("file", type=Path, metavar="FILE")
    salvage.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="the new recording")


def _conclusions(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    found = _verb(
        verbs, "triage", triage.triage, "what is wrong in a recording, since when, and what to look at next"
    )
    found.add_argument("file", type=Path, metavar="FILE", nargs="?")
    found.add_argument("--from", dest="begin", metavar="TIME", help="look from here on")
    found.add_argument("--to", dest="end", metavar="TIME", help="look up to here")
    found.add_argument("--json", action="store_true", help="for programs")
    found.add_argument("--markdown", action="store_true", help="for a ticket")
    found.add_argument(
        "--scenarios",
        action="store_true",
        help="instead: latency per label or model and prompt size, with what coincided with the slow requests",
    )
    found.add_argument(
        "--fail-on",
        choices=tuple(triage.LEVELS),
        default="note",
        help="exit with 3 when something this bad was found (default note)",
    )
    found.add_argument("--limits", type=Path, metavar="TOML", help="changed thresholds: name = number")
    found.add_argument("--limits-help", action="store_true", help="list the thresholds with their reasons")


def _explaining(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    told = _verb(
        verbs, "explain", triage.explain, "what moved first in a range of a recording, against the one before"
    )
    told.add_argument("file", type=Path, metavar="FILE")
    told.add_argument(
        "--from", dest="begin", required=True, metavar="TIME", help="the range in question begins"
    )
    told.add_argument("--to", dest="end", required=True, metavar="TIME", help="it ends")
    told.add_argument(
        "--before",
        nargs=2,
        metavar=("TIME", "TIME"),
        help="compare with this range (default: as long, at least 15 s, just before)",
    )
    told.add_argument("--json", action="store_true", help="for programs")
    group = told.add_argument_group("a model's reading of it, through the Messages API; spends tokens")
    group.add_argument("--llm", action="store_true", help="ask for hypotheses and next checks")
    group.add_argument("--model", metavar="MODEL", help="which model")
    group.add_argument("--dry-run", action="store_true", help="show what would be sent, and send nothing")
    group.add_argument("--names", action="store_true", help="send process and model names as they are")


def _host(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = _verb(
        verbs,
        "doctor",
        host.doctor,
        "what this host has, what is missing, why, and the command that mends it",
    )
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.epilog = "exit status: 0 a GPU answers, 1 none does"
    calibrate = _verb(
        verbs,
        "calibrate",
        host.calibrate,
        "measure how long launch calls take on this host, for the rules; needs root",
    )
    calibrate.add_argument("--duration", default="30s", metavar="TIME", help="how long (default 30s)")
    _pids(calibrate)
    calibrate.add_argument("--json", action="store_true", help="for programs")
    themes = _verb(verbs, "themes", host.themes, "list the themes")
    themes.add_argument("--dir", action="store_true", help="print the folder that user themes are read from")

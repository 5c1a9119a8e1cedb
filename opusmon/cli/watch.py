"""The verbs that watch: a screen, a headless recorder, one collector for another opusmon."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opusmon.cli.files import screen_options, show
from opusmon.cli.words import ERROR, OK, CliError, UsageError, duration_ns, need_terminal, say, size_b_of

if TYPE_CHECKING:
    from opusmon.session import LiveSession, Plan
    from opusmon.slo import Slo

_UNUSED_S = 60.0
"""A recording without rows that is no longer than this was a start that failed."""


def live(args: argparse.Namespace) -> int:
    """`opusmon live`."""
    need_terminal(args)
    options = screen_options(args)
    session = _live_session(args, keep_window=True, process="screen")
    status = show(session, args, options=options)
    state = session.recording
    if state is not None:
        say(f"recorded to {state.path}")
    return status


def record(args: argparse.Namespace) -> int:
    """`opusmon record`."""
    duration_s = duration_s_of(args)  # before there is a file
    return headless(_live_session(args, keep_window=False, process="record"), duration_s)


def duration_s_of(args: argparse.Namespace) -> float | None:
    """Seconds of `--duration`, None without one."""
    return duration_ns("--duration", args.duration) / 1e9 if args.duration is not None else None


def headless(session: LiveSession, duration_s: float | None) -> int:
    """Record until the time is over or a signal comes; returns the exit status.

    Raises:
        NothingToWatch: no collector can run.
    """
    import asyncio

    from opusmon.session import NothingToWatch

    said = ""
    lost: Mapping[str, str] = {}

    def report() -> None:
        nonlocal said, lost
        before, lost = lost, session.source.lost()
        for line in changes(before, lost):
            say(line, 0)
        state = session.recording
        if state is not None and state.error != said:
            said = state.error
            say(said or "recording again", 0)

    state = session.recording
    if state is not None:
        print(f"opusmon: recording to {state.path}; ctrl+c stops", file=sys.stderr)
    if session.warning:
        print(f"opusmon: {session.warning}", file=sys.stderr)
    nothing = False
    try:
        asyncio.run(_until_stopped(session, duration_s, report))
    except NothingToWatch:
        nothing = True
        raise
    finally:
        session.close()
        if nothing and state is not None:
            _remove_unused(state.path)
    state = session.recording
    if state is not None:
        say(f"{state.size_b / 1e6:.1f} MB in {state.path}")
    return ERROR if state is not None and state.error else OK


async def _until_stopped(session: LiveSession, duration_s: float | None, report: Callable[[], None]) -> None:
    import asyncio
    import signal

    from opusmon.session import record as run

    task = asyncio.ensure_future(run(session, duration_s, report))
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup it records on
        numbers.append(signal.SIGHUP)
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with suppress(asyncio.CancelledError):
        await task


def _remove_unused(path: Path) -> None:
    """Remove a short recording in which stands only that nothing could run.

    Once that is mended, the same command must work again. A long one says that for all that time nothing happened.
    """
    from opusmon.recording import Recording, RecordingError

    with suppress(RecordingError, OSError):  # there is a better reason to tell
        with Recording.open(path) as recording:
            used = recording.channels.keys() - {"status", "cost"}
            seconds = (recording.t1 - recording.t0) / 1e9
        if not used and seconds < _UNUSED_S:
            path.unlink()


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What to tell of the collectors that do not run: why, once, and when they do again."""
    news = [why for name, why in now.items() if before.get(name) != why]
    return [*news, *(f"{name}: runs again" for name in before if name not in now)]


def _live_session(args: argparse.Namespace, *, keep_window: bool, process: str) -> LiveSession:
    from opusmon import sudo
    from opusmon.session import plan

    interval_ns = _interval_ns(args.interval)
    options = _options(args)
    slos = _slos(args.slo)
    only = [name for name in args.only.split(",") if name]
    _check_addresses(args)
    _say_what_it_spends(options["canary"], runs=not only or "canary" in only)
    wanted = plan(only, options, sudo=args.sudo)
    for name in _left_out(only, options):
        say(f"{name} was set up and does not run: --only names {', '.join(only)}")
    if wanted.raised:
        sudo.ask()
    return open_session(
        wanted,
        args,
        keep_window=keep_window,
        interval_ns=interval_ns,
        pids=args.pid,
        process=process,
        slos=slos,
    )


def open_session(wanted: Plan, args: argparse.Namespace, **more: Any) -> LiveSession:
    """A session of what was planned, in the recording and with the limits that the words ask for.

    Args:
        wanted: what it runs.
        args: the words.
        more: as `LiveSession` takes it.

    Raises:
        UsageError: a limit cannot be used.
        CliError, RecordingError: see `_naming_a_way`.
    """
    from opusmon.clock import SystemClock
    from opusmon.session import LiveSession, default_path

    path = None if getattr(args, "no_record", False) else args.output or default_path()
    retain_ns, retain_b = duration_ns("--retain", args.retain), size_b_of("--retain-size", args.retain_size)
    with _naming_a_way(args.output):
        return LiveSession(wanted, SystemClock(), path=path, retain_ns=retain_ns, retain_b=retain_b, **more)


@contextmanager
def _naming_a_way(output: Path | None) -> Iterator[None]:
    """Add to a file that cannot be made how to have it elsewhere; nothing where the user chose the place.

    Raises:
        CliError: it cannot be made in the state folder.
        RecordingError: it cannot be made where the user wants it.
    """
    from opusmon.recording import RecordingError

    try:
        yield
    except RecordingError as error:
        if output is not None or not str(error).startswith("cannot write"):
            raise
        raise CliError(f"{error}; -o FILE records elsewhere") from error


def _slos(texts: Sequence[str]) -> list[Slo]:
    from opusmon.slo import parse_slo, problems

    found = []
    for text in texts:
        try:
            found.append(parse_slo(text))
        except ValueError as error:
            raise UsageError(f"--slo {text}: {error}") from error
        for problem in problems(found[-1]):
            print(f"opusmon: --slo {text}: {problem}", file=sys.stderr)
    return found


def _check_addresses(args: argparse.Namespace) -> None:
    """Refuse an address that cannot be meant, before a session begins without what was asked for."""
    if args.engine:
        from opusmon.collectors.engine.address import AddressError, parse

        for url in args.engine:
            try:
                parse(url)
            except AddressError as error:
                raise UsageError(f"--engine: {error}") from error
    if args.proxy or args.otlp_listen:
        words = {
            "--proxy": args.proxy,
            "--proxy-listen": args.proxy_listen,
            "--proxy-allow": ",".join(args.proxy_allow),
            "--otlp-listen": args.otlp_listen,
        }
        check_proxy(words)


def check_proxy(words: Mapping[str, str | None]) -> None:
    """Refuse addresses and paths that a proxy, or a receiver, would refuse.

    Before anything is started: a password in a URL must not reach another process's command line.

    Args:
        words: by option, what it says.

    Raises:
        UsageError: one cannot be used.
    """
    from opusmon.collectors.proxy.errors import ProxyUnavailable
    from opusmon.collectors.proxy.rules import parse_allow, parse_listen, parse_upstream

    checks: Mapping[str, Callable[[str], object]] = {
        "--proxy": parse_upstream,
        "--upstream": parse_upstream,
        "--proxy-allow": parse_allow,
        "--allow": parse_allow,
    }
    for option, value in words.items():
        try:
            if value:
                checks.get(option, parse_listen)(value)
        except ProxyUnavailable as error:
            # A password or a query is not repeated.
            shown = option if value and set("@?#") & set(value) else f"{option} {value}"
            raise UsageError(f"{shown}: {error.why.reason}; {error.why.remedy}") from error


def _left_out(only: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Collectors that were told what to watch, and are not among those that are to run."""
    from opusmon.collectors import REGISTRY

    needs = {name: entry.needs or "urls" for name, entry in REGISTRY.items()}
    set_up = [name for name, words in options.items() if words.get(needs[name])]
    return [name for name in set_up if only and name not in only]


def _say_what_it_spends(options: Mapping[str, Any], *, runs: bool) -> None:
    """Refuse a canary that must not run before anything of it reaches another process's command line."""
    if not options.get("base_url"):
        if options:
            raise UsageError("--probe-model and --probe-per-hour say how to ask; --probe URL says whom")
        return
    from opusmon.collectors.canary.endpoint import CanaryConfig, announce, check

    config = check(CanaryConfig(**{"model": "", **options}))
    if runs:
        print(f"opusmon: {announce(config)}", file=sys.stderr)


def _interval_ns(text: str) -> int:
    from opusmon.collectors.base import MIN_INTERVAL_NS

    interval_ns = duration_ns("--interval", text)
    if interval_ns > 5_000_000_000:
        raise UsageError(f"--interval {text}: 5s is the longest; beyond it the screen calls a value stale")
    if interval_ns < MIN_INTERVAL_NS:
        raise UsageError(
            f"--interval {text}: 250ms is the shortest; in less, the GPU's counters and CPU times say little"
        )
    return interval_ns


def _options(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What the words say to each collector; what was not said is left to its own default."""
    threshold_ns = duration_ns("--stall-threshold", args.stall_threshold) if args.stall_threshold else None
    if args.probe_budget is not None and not 0 < args.probe_budget <= 100:
        raise UsageError(
            f"--probe-budget {args.probe_budget:g}: per cent of one core, more than 0 and up to 100"
        )
    # Both probe the same calls: each gets half of what the server may lose.
    budget_pct = (1.0 if args.probe_budget is None else args.probe_budget) / 2
    said = {
        "streams": {"launch_budget_pct": budget_pct},
        "stalls": {"threshold_ns": threshold_ns, "budget_pct": budget_pct},
        "engine": {"urls": args.engine or None, "discover": False if args.no_discover else None},
        "proxy": {"upstream": args.proxy, "listen": args.proxy_listen, "allow": args.proxy_allow or None},
        "canary": {
            "base_url": args.probe,
            "model": args.probe_model,
            "per_hour": args.probe_per_hour,
        },
        "otlp": {"listen": args.otlp_listen},
        "l2": {
            "deep": args.deep or args.bank_conflicts or None,
            "bank_conflicts": args.bank_conflicts or None,
        },
    }
    return {
        name: {option: value for option, value in words.items() if value is not None}
        for name, words in said.items()
    }


def stream(args: argparse.Namespace) -> int:
    """`opusmon stream`."""
    from opusmon import collectors
    from opusmon.worker import serve

    if sys.stdout.isatty():
        raise CliError("this writes binary frames for another opusmon: send them to a pipe or a file")
    if args.only not in collectors.REGISTRY:
        raise UsageError(f"no collector is named {args.only!r}; there is {', '.join(collectors.REGISTRY)}")
    try:
        options = collectors.from_words(args.only, args.option)
    except ValueError as error:
        raise UsageError(f"--option: {error}") from error
    status = serve(
        args.only, _interval_ns(args.interval), pids=args.pid, options=options, compress=args.compress
    )
    # A thread that is stuck in a driver call must not keep this process: leave without waiting for threads.
    os._exit(status)

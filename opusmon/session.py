"""A session: what is being watched or replayed, the window on it, and the file it is kept in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from opusmon import __version__, collectors, sudo
from opusmon.bus import Bus, Sink
from opusmon.channels import ALL
from opusmon.clock import NS, Anchors, Clock
from opusmon.collectors import Options
from opusmon.collectors.base import LEFT_OUT, UNASKED, Status, Unavailable
from opusmon.collectors.cost import SelfCost
from opusmon.guarded import GuardedStore
from opusmon.paths import is_there, state_dir
from opusmon.recording import Mark, Recorder, RecorderState, Recording
from opusmon.recording.store import clean_text
from opusmon.schema import StringTable
from opusmon.slo import Slo
from opusmon.source import LiveSource, Source
from opusmon.window import Window
from opusmon.worker import WorkerSource, child_argv

RETAIN_NS = 24 * 3600 * NS
RETAIN_B = 2 * 1024**3
_FOLLOW_S = 0.5
_REPORT_S = 1.0
_STEP_MARK_NS = 100_000_000
"""A clock that is slewed hard looks like many small steps; every one gets its anchor, only a jump gets a mark."""


class NothingToWatch(Exception):  # noqa: N818  (it reads as what happened)
    """No collector can run on this host; the text is one line that says why and what to do."""


class NoSuchCollector(NothingToWatch):
    """A name is not one of the collectors'."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Which collectors will run, and why the others cannot.

    Attributes:
        runnable: names of those that run.
        absent: name to reason, for the others.
        options: per collector, what its constructor is given.
        raised: of the runnable ones, those whose child is started through sudo.
    """

    runnable: tuple[str, ...]
    absent: Mapping[str, Unavailable]
    options: Options = field(default_factory=dict)
    raised: frozenset[str] = frozenset()


def plan(
    only: Sequence[str] = (),
    options: Options | None = None,
    *,
    sudo: bool = False,
    left_out: Unavailable | None = None,
) -> Plan:
    """Probe the collectors that are to run.

    Args:
        only: their names; empty for all that run by themselves and those that `options` sets up.
        options: per collector, what its constructor is given.
        sudo: collectors that only lack root get it from sudo.
        left_out: why those that `only` does not name are absent, where it was not `--only` that named the others.

    Raises:
        NothingToWatch: none of them can run.
        NoSuchCollector: a name is not one of theirs.
    """
    options = options or {}
    known = list(collectors.REGISTRY)
    strange = [name for name in only if name not in known]
    if strange:
        raise NoSuchCollector(f"no collector is named {strange[0]!r}; there is {', '.join(known)}")
    asked = list(only) or known
    answers = {name: _not_set_up(name, options) or collectors.probe(name) for name in asked}
    raised = tuple(
        name for name, why in answers.items() if why is not None and sudo and collectors.lacks_only_root(name)
    )
    runnable = tuple(name for name, why in answers.items() if why is None or name in raised)
    if not runnable:
        reasons = [f"{name}: {why.reason}" for name, why in answers.items() if why]
        raise NothingToWatch(
            f"nothing can be watched on this host ({'; '.join(reasons)}). "
            "`opusmon doctor` says how to mend it, `opusmon demo` shows a recorded session"
        )
    other = left_out or Unavailable(
        f"{LEFT_OUT}: --only named {', '.join(only)}", "start opusmon without --only"
    )
    absent = {name: answers.get(name, other) for name in known if name not in runnable}
    return Plan(
        runnable, {name: why for name, why in absent.items() if why is not None}, options, frozenset(raised)
    )


def _not_set_up(name: str, options: Options) -> Unavailable | None:
    """Why a collector that must be told what to watch does not run."""
    entry = collectors.REGISTRY[name]
    if not entry.needs or options.get(name, {}).get(entry.needs):
        return None
    return Unavailable(UNASKED, entry.enabled_by)


def default_path(now: float | None = None) -> Path:
    """A new file in the state folder, named by local time and host."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    host = "".join(c if c.isalnum() or c in "-." else "-" for c in socket.gethostname())
    names = (f"{stamp}-{host}{suffix}.opusmon" for suffix in ("", *(f"-{n}" for n in range(2, 100))))
    return next(path for path in (state_dir() / name for name in names) if not is_there(path))


def describe() -> dict[str, str]:
    """What the file says about the host and the program. No arguments and no environment: they may hold secrets."""
    return {
        "opusmon": __version__,
        "host": socket.gethostname(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "timezone": time.strftime("%Z"),
        "pid": str(os.getpid()),
        "platform": sys.platform,
    }


class LiveSession:
    """Collectors, the bus, the window and the recorder of a live session.

    Args:
        plan: what to run.
        clock: the session clock.
        path: file to record into; None records nothing.
        keep_window: hold rows in memory for a screen.
        interval_ns: sampling interval of polled collectors.
        pids: processes to watch, all of them when empty.
        process: name of this process in `cost` rows.
        slos: objectives to keep watch over, as `opusmon.slo.parse_slo` reads them.

    Raises:
        RecordingError: the file cannot be made.
    """

    follows = True
    word = "LIVE"

    def __init__(
        self,
        plan: Plan,
        clock: Clock,
        *,
        path: Path | None,
        keep_window: bool = True,
        interval_ns: int = NS,
        pids: Sequence[int] = (),
        retain_ns: int | None = RETAIN_NS,
        retain_b: int | None = RETAIN_B,
        process: str = "screen",
        slos: Sequence[Slo] = (),
    ) -> None:
        self.clock = clock
        self.strings = StringTable()
        self.anchors = Anchors()
        self.meta: Mapping[str, str] = describe()
        self.interval_ns = interval_ns
        self.recorder: Recorder | None = None
        self._store: GuardedStore | None = None
        if path is not None:
            self.recorder = Recorder(
                path,
                strings=self.strings,
                clock=clock,
                session=self.meta,
                retain_ns=retain_ns,
                retain_b=retain_b,
            )
            # In exclusive mode (a network filesystem) nobody else can read the file while it is written.
            readable = keep_window and not self.recorder.warning
            self._store = GuardedStore(Recording.open(path)) if readable else None
        self.window = Window(self.strings, self.anchors, channels=ALL, store=self._store)
        sources = [self._source(name, plan, pids) for name in plan.runnable]
        # A collector in this process may learn from the others which processes matter.
        sinks: list[Sink] = [source for source in sources if isinstance(source, Sink)]
        sources.append(SelfCost(self.strings, clock, process))
        stated = [Status("slo", "ok", reason=slo.text, scope=slo.text) for slo in slos]
        self.source = LiveSource(sources, self.strings, clock, absent=plan.absent, stated=stated)
        if keep_window:
            sinks.append(self.window)
        if self.recorder is not None:
            sinks.append(self.recorder)
        self._bus = Bus(sinks)
        self._observe_clock()

    def _source(self, name: str, plan: Plan, pids: Sequence[int]) -> Source:
        options = plan.options.get(name, {})
        if collectors.REGISTRY[name].in_process:
            made: Source = collectors.load(name)(
                self.strings, self.clock, self.interval_ns, frozenset(pids), **options
            )
            return made
        argv = child_argv(name, self.interval_ns, pids, options)
        if name in plan.raised:
            argv = sudo.command(argv)
        return WorkerSource(
            name,
            self.strings,
            self.clock,
            argv=argv,
            same_terminal=name in plan.raised,
            end_s=collectors.REGISTRY[name].end_s,
        )

    @property
    def warning(self) -> str:
        """What the user must know about the file, "" when nothing."""
        return self.recorder.warning if self.recorder is not None else ""

    @property
    def recording(self) -> RecorderState | None:
        """State of the file, None when nothing is recorded."""
        return self.recorder.state if self.recorder is not None else None

    @property
    def trouble(self) -> str:
        """Why the file is not written or cannot be read, "" when all is well."""
        state = self.recording
        if state is not None and not state.recording and state.error:
            return state.error
        return self._store.trouble if self._store is not None else ""

    def edge(self) -> int:
        """The newest instant there is: now."""
        return self.clock.now()

    def late_ns(self, newest_t: int) -> int:
        """Age of the newest sample."""
        return max(0, self.clock.now() - newest_t)

    async def run(self) -> None:
        """Pump batches to the sinks until cancelled; what the sources still had comes last."""
        ticker = asyncio.create_task(self._tick())
        try:
            async with contextlib.aclosing(self.source.batches()) as batches:  # type: ignore[type-var]
                async for batch in batches:
                    self._bus.push(batch)
        finally:
            ticker.cancel()
            for batch in self.source.rest():
                self._bus.push(batch)

    def mark(self, t0: int, t1: int, kind: str, text: str) -> str:
        """Put a mark on the timeline and in the file; returns what to tell the user."""
        text = clean_text(text)
        if self.recorder is not None:
            self.recorder.mark(t0, t1, kind, text)
        self.window.add_mark(Mark(t0, t1, kind, text))
        return (
            "bookmark kept in the recording" if self.recorder is not None else "bookmark kept until you quit"
        )

    def close(self) -> None:
        """Close the file; what was pushed before is in it."""
        if self._store is not None:
            self._store.close()
        if self.recorder is not None:
            self.recorder.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(1)
            self._observe_clock()
            if self._store is not None:
                self._store.refresh()

    def _observe_clock(self) -> None:
        anchor = self.anchors.observe(self.clock.anchor())
        if anchor is None:
            return
        self.anchors.add(anchor)
        if self.recorder is not None:
            self.recorder.anchor(anchor)
        if abs(anchor.step_ns) >= _STEP_MARK_NS:
            self.mark(anchor.t, anchor.t, "clock", f"wall clock stepped by {anchor.step_ns / 1e9:+.3f} s")


class ReplaySession:
    """A recording as the source of the screen, possibly one that is still being written."""

    recording: RecorderState | None = None
    warning = ""
    interval_ns = NS

    def __init__(self, recording: Recording, clock: Clock, *, follow: bool = False) -> None:
        self.store = GuardedStore(recording)
        self.clock = clock
        self.meta: Mapping[str, str] = recording.session
        self.window = Window.over(self.store)
        self.follows = follow

    @property
    def word(self) -> str:
        """FOLLOW, or ENDED once the recorder has closed the file."""
        return "ENDED" if self.store.finished else "FOLLOW"

    @property
    def trouble(self) -> str:
        """Why the file cannot be read, "" when it can."""
        return self.store.trouble

    def late_ns(self, newest_t: int) -> int:
        """Age of the newest sample of a file that should be growing, by wall time: it may be another host's."""
        if self.store.finished:
            return 0
        return max(0, self.clock.anchor().wall_ns - self.window.anchors.wall(newest_t))

    def edge(self) -> int:
        """The newest instant there is: the last row in the file."""
        return self.window.t1

    async def run(self) -> None:
        """Notice what is written, when following."""
        while self.follows:
            await asyncio.sleep(_FOLLOW_S)
            self.window.refresh()

    def mark(self, t0: int, t1: int, kind: str, text: str) -> str:
        """Keep a mark for this viewing: a recording under replay is evidence and is not written to."""
        self.window.add_mark(Mark(t0, t1, kind, clean_text(text)))
        return "bookmark kept until you quit: a replayed file is not changed"

    def close(self) -> None:
        """Close the file."""
        self.store.close()


Session = LiveSession | ReplaySession


async def record(session: LiveSession, duration_s: float | None, report: Callable[[], None]) -> None:
    """Run a headless session until the time is over or it is cancelled; `report` is called each second.

    Raises:
        NothingToWatch: every collector has said that it cannot run.
    """
    pump = asyncio.create_task(session.run())
    deadline = time.monotonic() + duration_s if duration_s is not None else None
    try:
        while not pump.done():
            left = _REPORT_S if deadline is None else min(_REPORT_S, deadline - time.monotonic())
            if left <= 0:
                return
            await asyncio.wait({pump}, timeout=left)
            if gone := session.source.gave_up():
                raise NothingToWatch(gone)
            report()
        pump.result()
    finally:
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)

"""One engine: asked, read, compared with the time before, and left alone for longer when it does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from opusmon.clock import NS, Clock
from opusmon.collectors.engine.address import Address
from opusmon.collectors.engine.dcgm import HbmShare, hbm_shares
from opusmon.collectors.engine.deltas import Deltas
from opusmon.collectors.engine.figures import MAX_MODELS, Figures, collapse, figures
from opusmon.collectors.engine.kinds import DCGM, WANTED, recognise
from opusmon.collectors.engine.page import Page, PageError, Reader
from opusmon.collectors.engine.rows import Scrape, reasons
from opusmon.collectors.engine.trouble import FetchError, Getter
from opusmon.collectors.engine.vocabulary import EngineKind, counters
from opusmon.collectors.notes import Key

PATHS = ("/metrics", "/prometheus/metrics")
MAX_WAIT_NS = 30 * NS
DCGM_WAIT_NS = 10 * NS
"""A dcgm-exporter has news every 30 s unless told otherwise."""
IDLE_WAIT_NS = 60 * NS
"""Between questions to something that answers but is no engine."""
DUTY = 10
"""An engine spends at most one part in so many on making pages; what makes one in 100 ms is asked once a second."""
MAX_PACE_NS = 5 * NS
_SMALL_CHARS = 65_536


@dataclass(slots=True)
class Outcome:
    """What a turn gave.

    Attributes:
        scrape: where and when; None where there was no page.
        entries: figures per model.
        notes: `status` rows that hold from now on: key, state, reason, remedy.
        took_ns: time the answer took.
        shares: HBM bandwidth per GPU, of a dcgm-exporter.
    """

    scrape: Scrape | None = None
    entries: Sequence[Figures] = ()
    notes: list[tuple[Key, str, str, str]] = field(default_factory=list)
    took_ns: int = 0
    shares: Sequence[HbmShare] = ()


class Target:
    """An engine that is asked again and again.

    Args:
        address: where it is.
        clock: time of the rows.
        paths: where its page may be; the address's own path wins.
        expected: what it looks like from outside.

    Attributes:
        address: where it is; the process may change.
        kind: what it is, None until it has answered.
        due: not to be asked before this, monotonic ns.
        gone: its port has no listener any more.
        forgotten: it is not coming back.
    """

    def __init__(
        self,
        address: Address,
        clock: Clock,
        paths: Sequence[str] = PATHS,
        expected: EngineKind | None = None,
    ) -> None:
        self.address = address
        self.kind: EngineKind | None = None
        self.due = 0
        self.gone = False
        self.forgotten = False
        self._clock = clock
        self._expected = expected
        self._paths = [address.path] if address.path else list(paths)
        self._reader = Reader(WANTED)
        self._deltas = Deltas(frozenset())
        self._fails = 0
        self._last_t: int | None = None

    @property
    def label(self) -> str:
        """host:port/path, as rows have it."""
        return self.address.label(self._paths[0])

    @property
    def place(self) -> str:
        """What tells it from other targets, whichever path is being tried."""
        return self.address.label(self.address.path)

    @property
    def answered(self) -> bool:
        """It has given a page of an engine."""
        return self._last_t is not None

    def meet(self, pid: int) -> None:
        """Its port has a listener; after a pause it is asked at once. `pid` is 0 where it is not known."""
        if self.gone:
            self.gone, self.due, self._fails = False, 0, 0
        if pid and pid != self.address.pid:
            self.address = replace(self.address, pid=pid)

    async def turn(self, getter: Getter, interval_ns: int) -> Outcome:
        """Ask once; never raises for what the other side does."""
        began = self._clock.now()
        try:
            text = await getter.get(self.address.url(self._paths[0]))
            t = self._clock.now()
            took_ns = t - began
            if len(text) < _SMALL_CHARS:
                outcome = self._digest(text, t, took_ns)
            else:  # tens of milliseconds: not on the loop
                outcome = await asyncio.to_thread(self._digest, text, t, took_ns)
        except FetchError as error:
            return self._failed(error, began, interval_ns)
        except PageError as error:
            return self._failed(FetchError(str(error), status=200), began, interval_ns)
        self._fails = 0
        pace_ns = max(interval_ns, min(DUTY * took_ns, MAX_PACE_NS))
        self.due = began + (
            DCGM_WAIT_NS if self.kind is DCGM else pace_ns if outcome.scrape else IDLE_WAIT_NS
        )
        if pace_ns > interval_ns and outcome.scrape:
            reason = f"its page takes long to make: asked every {pace_ns / NS:.0f} s at most"
            outcome.notes.append((("engine", "scrape_ns", self.label), "sampled", reason, ""))
        return outcome

    def _digest(self, text: str, t: int, took_ns: int) -> Outcome:
        """Read a page and compare it with the one before.

        Raises:
            PageError: it is none.
            FetchError: it is not an engine's.
        """
        page = self._reader.read(text)
        kind = recognise(page.names)
        if kind is None:
            raise FetchError("it has metrics, but is not an inference engine that opusmon knows", status=200)
        if kind is DCGM:
            self.kind = kind
            return Outcome(None, (), [_dcgm_note(self.label)], took_ns, hbm_shares(page.samples))
        if kind is not self.kind:
            self.kind, self._deltas, self._last_t = kind, Deltas(counters(kind)), None
        dt_ns = 0 if self._last_t is None else t - self._last_t
        self._last_t = t
        samples = collapse(page.samples, kind.copy_labels)
        step = self._deltas.advance(samples)
        entries = figures(kind, samples, step, dt_ns)
        scrape = Scrape(t, dt_ns, took_ns, self.label, kind, self.address.pid)
        notes = [] if step.first or step.restarted else list(reasons(self.label, kind, entries))
        return Outcome(scrape, entries, notes + _page_notes(self.label, page, entries), took_ns)

    def _failed(self, error: FetchError, began: int, interval_ns: int) -> Outcome:
        self._fails += 1
        self.due = began + min(interval_ns << min(self._fails, 10), MAX_WAIT_NS)
        looks = f"it looks like {self._expected.title}, but " if self._expected and not self.answered else ""
        reason = looks + error.reason
        # One that has given no page yet is tried at several paths: which one that was is no part of the scope.
        scope = self.label if self.answered else self.place
        note = (("engine", "", scope), self._state(error), reason, self._remedy(error))
        if error.status and not self.answered:  # someone is there: the page may be at another path
            self._paths.append(self._paths.pop(0))
        return Outcome(None, (), [note], self._clock.now() - began)

    def _state(self, error: FetchError) -> str:
        if error.status in (401, 403):
            return "no_permission"
        return "stale" if self.answered and not error.refused else "unavailable"

    def _remedy(self, error: FetchError) -> str:
        if error.remedy:
            return error.remedy
        if error.status >= 500 or (error.status and self.answered):
            return "Look at the engine's log: its page is there, and fails"
        if error.status and self._expected is not None and self._expected.enable:
            step = self._expected.enable
            return step[0].upper() + step[1:]
        if error.refused:
            return "Start the engine, or correct --engine URL"
        return "Name the address of its metrics page: --engine http://HOST:PORT/PATH" if error.status else ""


def _dcgm_note(label: str) -> tuple[Key, str, str, str]:
    return ("engine", "", label), "ok", "a dcgm-exporter: HBM bandwidth is taken from it", ""


def _page_notes(label: str, page: Page, entries: Sequence[Figures]) -> list[tuple[Key, str, str, str]]:
    """What is wrong with a page that could be read all the same."""
    # No numbers: they would make a new text of each scrape.
    flaws = (
        (page.unreadable, "lines of its page cannot be read"),
        (page.repeated, "lines of its page repeat a series, the first one counts"),
        (page.valueless, "numbers of its page are NaN or infinite and left out"),
        (len(entries) >= MAX_MODELS, f"of its models {MAX_MODELS} are shown at most"),
    )
    reason = "; ".join(what for flaw, what in flaws if flaw)
    notes = [(("engine", "", label), "ok", reason, "")] if reason else []
    if not entries:
        reason = "its page has none of the metrics that opusmon knows yet; it may have served no request"
        notes.append((("engine", "", label), "unavailable", reason, ""))
    return notes

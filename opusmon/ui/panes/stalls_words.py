"""The words and characters of stalls: kinds, severities, results of calls, durations that line up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from opusmon.cuda_codes import RESULTS
from opusmon.jit_words import JIT, MODULE, WORDS
from opusmon.triage.severity import CRIT, NONE, NOTE, WARN
from opusmon.ui import units
from opusmon.ui.glyphs import Glyphs
from opusmon.ui.panes.streams_table import short_number
from opusmon.ui.text import Span


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of stall: as in channel `stall`, its letter, what it is called in `KIND_CELLS` cells, and in full."""

    name: str
    letter: str
    short: str
    words: str


KINDS: tuple[Kind, ...] = (
    Kind("capture", "c", "capture", "CUDA graph capture"),
    Kind("init_in_capture", "i", "ctx init", "initialisation inside a graph capture"),
    Kind(JIT, "j", "jit", WORDS[JIT]),
    Kind("wait", "w", "sync wait", "wait for the GPU"),
    Kind("off_cpu", "o", "off-cpu", "thread off the CPU"),
    Kind("run_queue", "q", "run queue", "thread ready to run, waiting for a CPU"),
    Kind("futex", "f", "futex", "wait for another thread"),
    Kind(MODULE, "m", "module", f"{WORDS[MODULE]} after warm-up"),
    Kind("alloc", "a", "alloc", "device memory allocated after warm-up"),
    Kind("free", "r", "free", "device memory released after warm-up"),
    Kind("page_faults", "p", "faults", "page faults"),
    Kind("tls", "t", "tls", "TLS handshake"),
)
"""Most telling first; the letters of a capture and of a compilation are those of the time bar."""
OTHER = len(KINDS)
"""Place of kinds that this version does not know."""
PAGE_FAULTS = [kind.name for kind in KINDS].index("page_faults")
OTHER_LETTER = "*"
KIND_CELLS = 9

MARKS = {NONE: ("", "dim"), NOTE: ("·", "dim"), WARN: ("!", "warn"), CRIT: ("!!", "bad")}
"""Characters and style of each severity."""
LEVEL_WORDS = {NONE: "nothing of note", NOTE: "note", WARN: "warning", CRIT: "critical"}
_ASCII_NOTE = "."


def letter_of(place: int, level: int = NONE) -> str:
    """The letter of a kind by its place in `KINDS`; a capital one when it is critical."""
    letter = KINDS[place].letter if place < OTHER else OTHER_LETTER
    return letter.upper() if level >= CRIT else letter


def severity_mark(level: int, glyphs: Glyphs) -> Span:
    """`!!`, `!`, a dot or nothing, right-aligned in two cells."""
    text, style = MARKS[level]
    if level == NOTE and glyphs.name == "ascii":
        text = _ASCII_NOTE
    return text.rjust(2), style


def code_words(kind: str, code: float) -> str:
    """`901 invalidated`, `exit 1`, `SSL -1`; "" for success and where there is no code."""
    if not math.isfinite(code) or code == (1 if kind == "tls" else 0):
        return ""
    if kind == "tls":
        return f"SSL {code:.0f}"
    if kind == "jit":
        return f"signal {-code:.0f}" if code < 0 else f"exit {code:.0f}"
    meaning = RESULTS.get(int(code), "")
    return f"{code:.0f} {meaning}".rstrip()


def duration_cell(ns: float) -> str:
    """Eight cells, numbers and units in a column each: `" 84.2 ms"`, `"  1.9 s "`, `"   --   "`."""
    if not math.isfinite(ns):
        return f"{units.MISSING:>5}   "
    value, _, unit = units.duration(ns).partition(" ")
    return f"{value if len(value) <= 5 else '#####':>5} {unit:<2}"


def whole(count: float) -> str:
    """A count in at most four cells: `7`, `9999`, `12k`; "--" when missing."""
    return short_number(count) if not count < 9999.5 else f"{count:.0f}"


MIN_BAR_NS, MAX_BAR_NS = 1e6, 1e10
"""The ends of the bar's logarithmic scale."""
BAR_WORDS = "log 1ms-10s"


def bar_share(ns: float) -> float:
    """How far the bar of a duration is filled, 0 to 1, by its logarithm; NaN when missing."""
    if not math.isfinite(ns):
        return math.nan
    if ns <= MIN_BAR_NS:
        return 0.0
    return min(math.log(ns / MIN_BAR_NS) / math.log(MAX_BAR_NS / MIN_BAR_NS), 1.0)

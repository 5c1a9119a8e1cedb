"""The keys in words: the footer and the help sheet. Pure."""

from __future__ import annotations

from opusmon.ui.text import Line, fill, fit

TIME_KEYS = (
    ("space", "pause, resume (live: back to now)"),
    ("t  ]", "next sample"),
    ("T  [", "previous sample; while live this pauses first"),
    ("j", "jump forward by a duration (10m, 90s)"),
    ("J", "jump back by a duration"),
    ("g  b", "go to a time (14:03, 10m after the start, -90s before the end)"),
    ("n  N", "next, previous finding, mark or event"),
    ("+  -", "longer, shorter time span"),
    (">  <", "replay faster, slower"),
    ("r", "bookmark this time"),
    ("l", "event lane under the time bar, on or off (on from 40 lines)"),
)
PANE_KEYS = (
    ("1-4 tab", "choose a pane"),
    ("m enter", "maximize it, and back"),
    ("up down", "select in it (page up, page down: by eight)"),
    ("/", "filter"),
    ("s", "sort"),
    ("p", "GPU processes"),
)
OTHER_KEYS = (
    ("f", "findings: what is wrong at the playhead, and all there were"),
    ("e", "explain: what moved first in this span, against before it"),
    ("w", "what is missing at the playhead, and why: all of it"),
    ("c", "what watching costs"),
    (":", "command palette, themes too (also ctrl+p)"),
    ("?", "this help"),
    ("escape", "close what is on top"),
    ("q", "quit (ctrl+q, ctrl+c: also while typing)"),
)
MARKS = (
    ("!!  !  i", "a finding: critical, warning, note; f shows them all"),
    ("x  r", "XID; a GPU that is back, an engine that was restarted"),
    ("c  j", "graph capture that failed; JIT compilation"),
    ("b k d g", "bookmark; a check's result; rows dropped; gap in the recording"),
    ("lane", "a row per pane: its marks, how long they last, their number"),
)
WORDS = (
    ("--", "missing: w says why; zero is a measured zero"),
    ("HBM bw", "share of the memory bandwidth, by GPM counters (Hopper up)"),
    ("mem busy", "share of time in which memory was used; not a bandwidth"),
    ("occ", "warps resident of the most possible"),
    ("!  !!", "worth a look, needs a person"),
    ("~", "too few samples to trust (p95: 20, p99: 100)"),
    ("<=  >", "only a bound is known: it lies in the first or last bucket"),
    ("6.1 s+", "still in flight"),
    ("stale", "the newest value is older than 2.5 intervals"),
)


def footer(width: int, *, paused: bool, follows: bool) -> Line:
    """The most useful keys in one line."""
    resume = ("resume" if follows else "play") if paused else "pause"
    parts = [
        ("space", resume),
        ("t/T", "step"),
        ("J", "back"),
        ("g", "goto"),
        ("n", "next"),
        ("f", "findings"),
        ("+/-", "span"),
    ]
    parts += [
        ("1-4", "pane"),
        ("m", "max"),
        ("p", "processes"),
        ("w", "missing"),
        ("l", "lane"),
        ("/", "filter"),
        (":", "palette"),
        ("?", "help"),
        ("q", "quit"),
    ]
    # The way out stays on screen at any width.
    must = [parts[-1], parts[-2]]
    spans: list[Line] = [((key, "key"), (f" {word}", "dim")) for key, word in [parts[0], *must, *parts[1:-2]]]
    return fit(((" ", ""), *fill(spans, width - 1)), width)


def sheet_lines() -> list[Line]:
    """The help sheet."""
    lines: list[Line] = []
    for title, rows in (
        ("time", TIME_KEYS),
        ("panes", PANE_KEYS),
        ("other", OTHER_KEYS),
        ("marks on the time bar and in its lane", MARKS),
        ("what the words mean", WORDS),
    ):
        lines.append(((title, "title"),))
        lines.extend((("  ", ""), (f"{key:<9}", "key"), (text, "")) for key, text in rows)
        lines.append(())
    return lines[:-1]

"""One stall in full: every field, the calls before it, the stack, and what else was going on."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator

import numpy as np

from opusmon.channels import STREAM, WHOLE_CONTEXT
from opusmon.clock import NS
from opusmon.cuda_codes import RESULTS
from opusmon.schema import Rows, conform
from opusmon.text import counted
from opusmon.triage.severity import CRIT, NOTE, OTHER_LIMITS, STALL_LIMITS, WARN
from opusmon.ui import units
from opusmon.ui.panes.base import Frame
from opusmon.ui.panes.stalls_state import Snapshot, Stall, same_thread
from opusmon.ui.panes.stalls_table import clock_words, kind_words, remark
from opusmon.ui.panes.stalls_words import KINDS, LEVEL_WORDS, OTHER, PAGE_FAULTS, severity_mark, whole
from opusmon.ui.panes.streams_lanes import devices_words
from opusmon.ui.panes.streams_state import read_devices
from opusmon.ui.panes.streams_table import short_number
from opusmon.ui.text import CUT_OFF, Line, fill

SAME_THREAD_NS = NS
"""Other stalls of the thread are listed when they ended this near."""
MAX_SAME_THREAD = 5
NEAR_ROWS_NS = 2 * NS
"""The stream's row must be this near."""
MAX_BEFORE_LINES = 4
_INDENT = "   "


def detail_lines(frame: Frame, known: Snapshot, place: int, width: int, height: int) -> list[Line]:
    """A stall in at most `height` lines of about `width` cells; the stack gets the room that is left.

    Args:
        frame: what and when.
        known: the pane's snapshot.
        place: of the stall in its rows.
        width: cells.
        height: lines.
    """
    stall = known.stall(place)
    lines = [
        *_head(frame, stall, width),
        *_result(stall, width),
        *_culprit(stall, width),
        *_before(stall, width),
        *_around(frame, stall, width),
        *_same_thread(frame, known, place, width),
    ]
    stack = _stack(stall)
    lines = lines[: max(height - 1, 0)]
    if len(lines) + len(stack) > height:
        stack = _cut_stack(stack, height - len(lines))
    return [*lines, *stack][: max(height, 0)]


def _head(frame: Frame, stall: Stall, width: int) -> Iterator[Line]:
    """What, when, how long; how bad and why; who."""
    anchors = frame.view.anchors
    mark, style = severity_mark(stall.level, frame.glyphs)
    words = KINDS[stall.place].words if stall.place < OTHER else "of a kind unknown here"
    end = clock_words(anchors, stall.t, 3)
    lasted = not stall.count > 1 and math.isfinite(stall.dur_ns) and 0 <= stall.dur_ns < 2**62
    begin = f"{clock_words(anchors, stall.t - int(stall.dur_ns), 3)} - " if lasted else "ended "
    title = f" {mark.strip()} {kind_words(stall)}".replace("  ", " ")
    yield fill(
        [
            ((title, style if stall.level else "title"),),
            _lasted(stall),
            ((f"{begin}{end}", "label"),),
            ((words, "dim"),),
        ],
        width,
    )
    yield fill(
        [
            ((f" {stall.who}", "title"),),
            _pair("pid", str(stall.pid)),
            _pair("thread", str(stall.tid)),
            _pair("stream", stall.stream_words.removeprefix("stream ") or "none in particular"),
        ],
        width,
    )
    yield from _verdict(stall, width)


def _lasted(stall: Stall) -> Line:
    """How long it took; of several the mean and the sum."""
    if stall.count > 1 and stall.place != PAGE_FAULTS:
        words = f"mean {units.duration(stall.each_ns)} of {whole(stall.count)}, in all {units.duration(stall.dur_ns)}"
    else:
        words = units.duration(stall.dur_ns)
    return ((words, "value"),)


def _verdict(stall: Stall, width: int) -> Iterator[Line]:
    """How bad it is, from what value on, and why."""
    limits = STALL_LIMITS.get(stall.kind, OTHER_LIMITS)
    start = {NOTE: limits.note, WARN: limits.warn, CRIT: limits.crit}.get(stall.level, 0.0)
    value = stall.count if limits.counted else stall.dur_ns if limits.summed else stall.each_ns
    said = f" from {whole(start) if limits.counted else units.duration(start)}" if 0 < start <= value else ""
    label = f" {LEVEL_WORDS[stall.level]}{said}: "
    lines = textwrap.wrap(limits.why, max(width - len(label), 20))
    yield ((label, "label"), (lines[0], "dim"))
    for line in lines[1:]:
        yield ((" " * len(label), ""), (line, "dim"))


def _pair(label: str, words: str) -> Line:
    return ((f"{label} ", "label"), (words, "value")) if words else ()


def _result_words(kind: str, code: float) -> str:
    if not math.isfinite(code):
        return ""
    if kind in ("jit", "tls"):
        return f"{code:.0f}"
    return f"{code:.0f} {RESULTS.get(int(code), '') if code else 'success'}".rstrip()


def _result(stall: Stall, width: int) -> Iterator[Line]:
    """The call with its result, then the reason, count and bytes."""
    label = {"jit": "exit status", "tls": "SSL result"}.get(stall.kind, "result")
    parts = [
        _pair("call", stall.call),
        _pair(label, _result_words(stall.kind, stall.code)),
        _pair("reason", stall.reason),
        _pair("count", whole(stall.count) if math.isfinite(stall.count) else ""),
        _pair("size", units.size(stall.size_b) if math.isfinite(stall.size_b) else ""),
    ]
    if any(parts):
        yield ((" ", ""), *fill(parts, width - 1))


def _culprit(stall: Stall, width: int) -> Iterator[Line]:
    """What broke a capture."""
    if stall.by_call or stall.by_tid:
        thread = f"{stall.by_thread or '?'} ({stall.by_tid})"
        parts = [
            _pair("broken by", stall.by_call or "?"),
            _pair("thread", thread),
            _pair("result", _result_words("capture", stall.by_code)),
        ]
        yield ((" ", ""), *fill(parts, width - 1))


def _before(stall: Stall, width: int) -> Iterator[Line]:
    """The calls of the thread before it, the oldest first."""
    if not stall.before:
        return
    lines = textwrap.wrap(stall.before, max(width - 10, 10), break_on_hyphens=False)
    for number, line in enumerate(lines[-MAX_BEFORE_LINES:]):
        cut_off = CUT_OFF if number == 0 and len(lines) > MAX_BEFORE_LINES else " "
        yield ((" before" if number == 0 else "       ", "label"), (f" {cut_off}{line}", "value"))


# -- what was going on -------------------------------------------------------------------------------------------


def _around(frame: Frame, stall: Stall, width: int) -> Iterator[Line]:
    """What its stream did and what the GPUs measured at that time."""
    row = nearest_stream_row(frame, stall)
    if row is not None:
        yield ((" then   ", "label"), *fill(_stream_parts(row, stall), width - 8))
    devices = read_devices(frame.view, min(stall.t + NS, frame.t))
    if devices:
        yield ((" then   ", "label"), *devices_words(devices, width - 8))


def nearest_stream_row(frame: Frame, stall: Stall) -> Rows | None:
    """The row of channel `stream` nearest in time for the stall's process and stream, not after the playhead.

    A stall that concerns no single stream takes the row of a stream that its thread used last. Shape (1,), None
    when there is none within `NEAR_ROWS_NS`.
    """
    view = frame.view
    if STREAM.name not in view.channels:
        return None
    near = view.query(STREAM.name, stall.t - NEAR_ROWS_NS, min(stall.t + NEAR_ROWS_NS, frame.t))
    rows = conform(near, STREAM)
    of_thread = stall.stream == WHOLE_CONTEXT
    same = rows["tid"] == stall.tid if of_thread else rows["stream"] == np.uint64(stall.stream)
    rows = rows[same & (rows["pid"] == stall.pid)]
    nearest: Rows = rows[np.argsort(np.abs(rows["t"] - stall.t), kind="stable")[:1]]
    return nearest if len(nearest) else None


def _stream_parts(row: Rows, stall: Stall) -> list[Line]:
    dt_ns = int(row["dt_ns"][0])
    scale = 1e9 / dt_ns if dt_ns > 0 else math.nan

    def per_s(name: str) -> float:
        return float(row[name][0]) * scale

    offset_s = (int(row["t"][0]) - stall.t) / 1e9
    return [
        ((f"stream {int(row['stream'][0]):#x}" if stall.stream == WHOLE_CONTEXT else "stream", "label"),),
        _pair("kernels", f"{short_number(per_s('launches'))}/s"),
        _pair("graphs", f"{short_number(per_s('graph_launches'))}/s"),
        _pair("wait", f"{short_number(per_s('wait_ns') / 1e6)} ms/s"),
        _pair("bubbles", f"{short_number(per_s('bubble_ns') / 1e6)} ms/s"),
        ((f"row {offset_s:+.1f} s", "dim"),),
    ]


def _same_thread(frame: Frame, known: Snapshot, place: int, width: int) -> Iterator[Line]:
    """Other stalls of the thread that ended within `SAME_THREAD_NS`, the nearest ones."""
    others = same_thread(known, place, SAME_THREAD_NS)
    if not others:
        return
    t = int(known.rows["t"][place])
    nearest = sorted(sorted(others, key=lambda other: abs(int(known.rows["t"][other]) - t))[:MAX_SAME_THREAD])
    more = f", the nearest {len(nearest)}" if len(others) > len(nearest) else ""
    count = len(others)
    word = "stall" if count == 1 else "stalls"
    yield ((f" same thread within {units.duration(SAME_THREAD_NS)}: {count} other {word}{more}", "label"),)
    for other in nearest:
        stall = known.stall(other)
        mark, style = severity_mark(stall.level, frame.glyphs)
        parts: list[Line] = [
            ((f"{(stall.t - t) / 1e9:+6.2f} s", "label"),),
            ((f"{mark} {kind_words(stall)}", style if stall.level else ""),),
            ((units.duration(stall.each_ns), "value"),),
            ((stall.call, "label"),) if stall.call else (),
            ((remark(stall), "dim"),) if remark(stall) else (),
        ]
        yield ((_INDENT, ""), *fill(parts, width - len(_INDENT)))


def _stack(stall: Stall) -> list[Line]:
    """The user stack, one frame per line, innermost first as debuggers show it."""
    frames = [frame.strip() for frame in stall.stack.split(";") if frame.strip()]
    if not frames:
        return [((" no stack was taken", "dim"),)]
    count = counted(len(frames), "frame")
    lines: list[Line] = [((f" stack, innermost first, {count}", "label"),)]
    lines.extend(((_INDENT, ""), (frame, "value")) for frame in reversed(frames))
    return lines


def _cut_stack(stack: list[Line], room: int) -> list[Line]:
    """As many of its lines as fit, the last one saying how many do not; in one line all in a row."""
    if room < 3 and len(stack) > 1:
        frames = " < ".join(frame[-1][0] for frame in stack[1:])
        line: Line = ((" stack ", "label"), (frames, "value"))
        return [line][:room]
    return [*stack[: room - 1], ((f"{_INDENT}+{len(stack) - room + 1} more frames", "dim"),)]
